"""Which test files there are: PyTorch's that go through every operator, and the operator's own."""

from collections.abc import Iterable
from pathlib import Path

from fork import paths
from fork.overlay import NATIVE, operators

# PyTorch's test files that go through all OpInfos, native functions, schemas or public functions.
# Beside each, as `Class.test`, the tests that go through a whole registry under a name that is not
# the operator's: these run too. The lab's six first.
LAB = {
    "test_ops.py": (),
    "test_overrides.py": ("TestResolveName.*", "TestDisabledUserWarnings.*"),
    "functorch/test_aotdispatch.py": (),
    "functorch/test_ops.py": (),
    "functorch/test_vmap.py": (),
    "test_proxy_tensor.py": (),
}
SUITES = LAB | {
    # every OpInfo
    "test_ops_gradients.py": (),
    "test_ops_fwd_gradients.py": (),
    "test_ops_jit.py": (),
    "test_meta.py": (),
    "test_decomp.py": ("HasDecompTest.*",),
    "test_schema_check.py": (),
    "test_fx.py": ("TestFX.test_get_torch_func_signature",),  # see torchbind.py
    "test_fx_experimental.py": (),
    "test_jit_fuser_te.py": (),
    "test_testing.py": (),
    "test_utils.py": (),
    "export/opinfo_schema.py": (),
    "inductor/test_torchinductor_opinfo.py": (),
    "distributed/_tensor/test_dtensor_ops.py": (),
    # every schema and registration, autocast's list
    "test_function_schema.py": ("TestFunctionSchema.test_serialize_and_deserialize",),
    "test_fake_tensor.py": (
        "FakeTensorOperatorInvariants.test_like_ops",
        "FakeTensorOperatorInvariants.test_non_kwarg_only_device",
        "FakeTensorOperatorInvariants.test_tensor_constructors_all_have_kwarg_device",
    ),
    "test_dispatch.py": ("TestDispatch.test_find_dangling_impls",),
    "test_namedtuple_return_api.py": ("TestNamedTupleAPI.*",),
    "functorch/test_vmap_registrations.py": (),
    "test_autocast.py": ("TestAutocastCPU.test_autocast_torch_16",),
    # every public function
    "test_public_bindings.py": (
        "TestPublicBindings.test_correct_module_names",
        "TestPublicBindings.test_no_new_*",
    ),
    "test_torch.py": (
        "TestTorch.test_dir",
        "TestTorch.test_doc*",
        "TestTorch.test_wildcard_import",
    ),
}


def is_test_file(suite: str) -> bool:
    """Whether it runs tests; of another script, the exit status says whether it passed."""
    return Path(suite).name.startswith("test_") or suite in SUITES


def own_files(tree: Path) -> dict[str, tuple[str, ...]]:
    """The operators' own test files in a tree, as suites: all of their tests run."""
    patterns = own_patterns(operators(paths.ROOT / NATIVE))
    files = {file for pattern in patterns for file in (tree / "test").glob(pattern)}
    return {file.name: () for file in sorted(files)}


def without(suites: Iterable[str], endings: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Returns those of the operators' own test files whose names do not end in one of `endings`.

    A script that runs no tests is not among them.
    """
    kept = (name for name in suites if is_test_file(name) and not name[:-3].endswith(endings))
    return dict.fromkeys(kept, ())


def own_patterns(ops: Iterable[str]) -> list[str]:
    """What the operators' own test files are called."""
    return [pattern for op in ops for pattern in (f"{op}_*.py", f"test_{op}*.py")]
