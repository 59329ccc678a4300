"""PyTorch's own code generator, run on our entries alone, in a process of its own.

So the generator imported is the base's: `python -m fork.graft.codegen TORCHGEN NATIVE DERIVATIVES
OUT`. TORCHGEN is a folder that holds the base's `torchgen` package, with our edits in it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def generate(torchgen_parent: Path, native: Path, derivatives: Path, out: Path) -> None:
    """Writes ATen/, autograd/ and aoti/ (C++), and stubs/ (type stubs) below `out`."""
    sys.path.insert(0, str(torchgen_parent))
    packaged = torchgen_parent / "torchgen" / "packaged"
    sys.path.insert(1, str(packaged))

    # torchgen reads its input from one folder: our entries with the base's tags and templates.
    source = out / "source"
    (source / "native").mkdir(parents=True)
    (source / "native" / "native_functions.yaml").write_text(
        native.read_text(encoding="utf-8") or "[]\n", encoding="utf-8"
    )
    tags = source / "native" / "tags.yaml"
    tags.write_text(
        (packaged / "ATen" / "native" / "tags.yaml").read_text(encoding="utf-8"), encoding="utf-8"
    )
    (source / "templates").symlink_to(packaged / "ATen" / "templates")
    autograd = out / "source-autograd"
    autograd.mkdir()
    (autograd / "derivatives.yaml").write_text(
        derivatives.read_text(encoding="utf-8") or "[]\n", encoding="utf-8"
    )
    (autograd / "deprecated.yaml").write_text("[]\n", encoding="utf-8")
    (autograd / "templates").symlink_to(packaged / "autograd" / "templates")

    from torchgen import dest, gen

    # From 2.15 on: kernels to export on Windows, each of which must be in the YAML; ours has none.
    if hasattr(dest.native_functions, "_CPU_DLL_CUDA_KERNELS"):
        dest.native_functions._CPU_DLL_CUDA_KERNELS = frozenset()

    argv = ["gen", "-s", str(source), "-d", str(out / "ATen"), "--per-operator-headers"]
    sys.argv = [*argv, "--aoti_install_dir", str(out / "aoti"), "--update-aoti-c-shim"]
    gen.main()
    schema = out / "ATen" / "RegisterSchema.cpp"
    schema.write_text(fragment(schema.read_text(encoding="utf-8")), encoding="utf-8")

    from autograd.gen_autograd import gen_autograd, gen_autograd_python
    from torchgen.selective_build.selector import SelectiveBuilder

    (out / "autograd").mkdir()
    where = (str(source / "native" / "native_functions.yaml"), str(tags))
    everything = SelectiveBuilder.get_nop_selector()
    gen_autograd(*where, str(out / "autograd"), str(autograd), everything)
    gen_autograd_python(*where, str(out / "autograd"), str(autograd))
    write_stubs(*where, out / "stubs")


def fragment(schema: str) -> str:
    """RegisterSchema.cpp for a library that adds to aten instead of defining it."""
    schema, opened = re.subn(r"TORCH_LIBRARY\(aten,", "TORCH_LIBRARY_FRAGMENT(aten,", schema)
    # The template defines this one schema itself; the base has it already.
    schema, gradients = re.subn(r'^\s*m\.def\("get_gradients\(.*\n', "", schema, flags=re.M)
    if (opened, gradients) != (1, 1):
        raise SystemExit("RegisterSchema.cpp of this release is not as the graft knows it")
    return schema


def write_stubs(native: str, tags: str, out: Path) -> None:
    """One text per stub file of the wheel, to be appended to it."""
    from autograd.gen_python_functions import (
        group_overloads,
        load_signatures,
        should_generate_py_binding,
    )
    from torchgen.api.python import returns_structseq_pyi
    from torchgen.gen import parse_native_yaml

    functions = parse_native_yaml(native, tags).native_functions
    bound = [f for f in functions if should_generate_py_binding(f)]
    for f in bound:
        if f.python_module is not None or "method" in {v.name for v in f.variants}:
            raise SystemExit(
                f"{f.func.name}: the graft binds functions of torch only, "
                "no methods and no functions of a submodule"
            )
    deprecated = out.parent / "source-autograd" / "deprecated.yaml"
    pairs = load_signatures(bound, str(deprecated), method=False)
    groups: dict[str, list] = {}
    for overload in group_overloads(pairs):
        groups.setdefault(overload.signature.name, []).append(overload.signature)
    functions_pyi, types_pyi = [], []
    for name, signatures in sorted(groups.items()):
        functions_pyi.append(f'__all__ += ["{name}"]')
        for signature in signatures:
            if len(signatures) > 1:
                functions_pyi.append("@overload")
            functions_pyi.append(signature.signature_str_pyi())
        named = returns_structseq_pyi(signatures[0])
        if named is not None:
            types_pyi.append(named[1])
    out.mkdir()
    (out / "_VariableFunctions.pyi").write_text("\n".join(functions_pyi) + "\n", encoding="utf-8")
    (out / "return_types.pyi").write_text("\n".join(types_pyi) + "\n", encoding="utf-8")


if __name__ == "__main__":
    generate(*(Path(arg).resolve() for arg in sys.argv[1:]))
