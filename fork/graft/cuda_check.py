"""The kernels for CUDA compiled and linked without a GPU, for each architecture."""

from fork import paths
from fork.console import console, print_wide
from fork.graft import cuda
from fork.graft.build import kernels, open_graft
from fork.overlay import Stack, default_release


def cuda_check() -> list[str]:
    """What a kernel must not have, or lacks, on PyPI's default release; prints a line per kernel.

    A kernel that spills registers is a problem; a symbol that no library has is an error. Without a
    kernel nothing is downloaded.
    """
    stack = Stack(paths.ROOT)
    if not kernels(stack.tree()):
        console.print(f"{stack.commits[-1].folder.name} has no kernel for CUDA: nothing to check")
        return []
    with paths.alone():
        graft = open_graft(default_release(), of_pypi=True)
        found = graft.make_kernels()
    print_wide(cuda.table(found))
    if problems := cuda.problems(found, graft.nvcc.architectures):
        return problems
    names = {kernel.name for kernel in found}
    console.print(f"{len(names)} kernels for {len(graft.nvcc.architectures)} architectures: linked")
    return []
