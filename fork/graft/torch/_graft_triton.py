"""Registers the overlay's Triton kernels in releases that have no `torch._native` for that yet."""

import importlib
import logging
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch._vendor.packaging.version import Version

LEAST = Version("3.6")  # as in later releases
# PyTorch's builds for CUDA bring the first one, those for ROCm one of the others.
DISTRIBUTIONS = ("triton", "triton-rocm", "pytorch-triton-rocm")
log = logging.getLogger(__name__)


def is_available() -> bool:
    """Whether there is a Triton for the kernels. Does not import it."""
    if os.environ.get("TORCH_DISABLE_NATIVE_JIT") == "1" or not torch.backends.cuda.is_built():
        return False
    installed = [d for name in DISTRIBUTIONS for d in metadata.distributions(name=name)]
    if not installed or Version(installed[0].version) < LEAST:
        found = installed[0].version if installed else "not installed"
        log.info("operators are composed on GPUs: Triton is %s, not %s or newer", found, LEAST)
        return False
    return True


def register(
    library: torch.library.Library, op: str, cond: Callable[..., bool], impl: Callable[..., Any]
) -> None:
    """Makes `impl` the kernel of an operator, for those calls of which `cond` is true."""
    otherwise = torch.library.get_kernel(f"aten::{op}", library.dispatch_key)

    def kernel(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if cond(*args, **kwargs):
            return impl(*args, **kwargs)
        return otherwise.call_boxed(keys, *args, **kwargs)

    library.impl(op, kernel, with_keyset=True)


if is_available():
    library = torch.library.Library("aten", "IMPL", "CUDA")  # undoes it all when it is freed
    for file in sorted(Path(torch.__file__).parent.glob("_native/ops/*/triton_impl.py")):
        module = importlib.import_module(f"torch._native.ops.{file.parent.name}.triton_impl")
        for op, override in module.overrides().items():
            register(library, op, *override)
