"""Packs a grafted wheel: the base's files, those of the stage in their place, a new version."""

from __future__ import annotations

import email.parser
import email.policy
import re
import shutil
import sysconfig
import zipfile
from pathlib import Path

from wheel.wheelfile import WheelFile

from fork.base import Base
from fork.errors import ForkError
from fork.stack import files_under


def pack(base: Base, stage: Path, into: Path, compress: bool) -> Path:
    """Writes the wheel into the folder `into`, which then holds it alone.

    Without `compress` the files are stored: for installing at once, in a tenth of the time.
    """
    version = base.grafted_version
    with zipfile.ZipFile(base.wheel) as old:
        infos = [i for i in old.infolist() if not i.is_dir()]
        dist_info = next(
            i.filename.split("/")[0] for i in infos if i.filename.endswith(".dist-info/WHEEL")
        )
        tags = base.wheel.stem.split("-")[-3:-1]
        platform = re.sub(r"[-.]", "_", sysconfig.get_platform())  # linked here, so no manylinux
        tag = "-".join([*tags, platform])
        name = f"torch-{version}-{tag}.whl"
        changed = {path: stage / path for path in files_under(stage)}
        changed_meta = {
            f"{dist_info}/METADATA": lambda text: header(text, Version=version),
            f"{dist_info}/WHEEL": lambda text: header(text, Tag=tag, Generator="fork.pack"),
            "torch/version.py": lambda text: text.replace(f"'{base.version}'", f"'{version}'", 1),
        }
        shutil.rmtree(into, ignore_errors=True)
        partial = into.with_name(into.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        how = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
        try:
            with WheelFile(partial / name, "w", compression=how) as new:  # writes RECORD

                def add(path: str, data: bytes, date: tuple, mode: int) -> None:
                    place = zipfile.ZipInfo(path, date)
                    place.external_attr = mode
                    place.compress_type = how
                    new.writestr(place, data)

                for info in infos:
                    path = info.filename
                    if path.endswith((".dist-info/RECORD", ".dist-info/RECORD.jws")):
                        continue
                    data = changed.pop(path).read_bytes() if path in changed else old.read(info)
                    if path in changed_meta:
                        data = changed_meta[path](data.decode()).encode()
                    path = path.replace(dist_info, f"torch-{version}.dist-info", 1)
                    add(path, data, info.date_time, info.external_attr)
                for path, file in sorted(changed.items()):
                    mode = (0o755 if path.endswith(".so") else 0o644) << 16
                    add(path, file.read_bytes(), (2020, 1, 1, 0, 0, 0), mode)
        except OSError as e:
            shutil.rmtree(partial, ignore_errors=True)
            raise ForkError(f"the wheel cannot be written: {e}") from None
    partial.rename(into)
    return into / name


def header(text: str, **values: str) -> str:
    """An e-mail style header (METADATA, WHEEL) with some fields set anew."""
    policy = email.policy.compat32.clone(max_line_length=0)
    message = email.parser.Parser(policy=policy).parsestr(text)
    for key, value in values.items():
        del message[key]
        message[key] = value
    return message.as_string(policy=policy)
