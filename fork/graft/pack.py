"""Packs a grafted wheel: the base's files, those of the stage in their place, a new version."""

from __future__ import annotations

import email.parser
import email.policy
import stat
import zipfile
from pathlib import Path

from wheel.wheelfile import WheelFile

from fork.errors import ForkError
from fork.graft.base import Base
from fork.overlay import files_under
from fork.paths import atomically


def pack(base: Base, stage: Path, into: Path, compress: bool) -> Path:
    """Writes the wheel into the folder `into`, which then holds it alone.

    Without `compress` the files are stored: for installing at once, in a tenth of the time.
    """
    version = base.grafted_version
    dist_info = base.dist_info.name
    tag = f"{base.tags}-linux_{base.machine}"  # linked here, so no manylinux
    name = f"torch-{version}-{tag}.whl"
    changed = {path: stage / path for path in files_under(stage)}
    changed_meta = {
        f"{dist_info}/METADATA": lambda text: header(text, Version=version),
        f"{dist_info}/WHEEL": lambda text: header(text, Tag=tag, Generator="fork.graft"),
    }
    how = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    try:
        with (
            atomically(into, folder=True) as partial,
            WheelFile(partial / name, "w", compression=how) as new,  # writes RECORD
        ):
            for path in dict.fromkeys([*base.files(), *sorted(changed)]):
                old = base.folder / path
                data = changed.get(path, old).read_bytes()
                if path in changed_meta:
                    data = changed_meta[path](data.decode()).encode()
                runs = path.endswith(".so") or old.exists() and old.stat().st_mode & stat.S_IXUSR
                path = path.replace(dist_info, f"torch-{version}.dist-info", 1)
                place = zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0))
                place.external_attr = (stat.S_IFREG | (0o755 if runs else 0o644)) << 16
                place.compress_type = how
                new.writestr(place, data)
    except OSError as e:
        raise ForkError(f"the wheel cannot be written: {e}") from None
    return into / name


def header(text: str, **values: str) -> str:
    """An e-mail style header (METADATA, WHEEL) with some fields set anew."""
    policy = email.policy.compat32.clone(max_line_length=0)
    message = email.parser.Parser(policy=policy).parsestr(text)
    for key, value in values.items():
        del message[key]
        message[key] = value
    return message.as_string(policy=policy)
