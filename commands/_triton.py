"""Compiles kernels of attn for GPUs that need not be there; runs in a Python that has Triton.

It is called with the file of the kernels. It reads a job from each line, and answers with a line.
"""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# The matrices that triton_impl.py gives a kernel of this name, with all that it may leave out.
TANGENTS = "q_tangent k_tangent v_tangent"
OTHERS = "u_k u_v w_k w_v w_grad_output"
THIRD_ORDER = f"q k v grad_output u_q w_q {OTHERS}"
MATRICES = {
    "attn": "q k v attn output",
    "output": "q k v output",
    "grad_q": "q k v grad_output grad_q",
    "grad_kv": "q k v grad_output grad_k grad_v",
    "stored_grad_q": "k v grad_output grad_attn stored grad_q",
    "stored_grad_kv": "q v grad_output grad_attn stored grad_k grad_v",
    "tangent": f"q k v {TANGENTS} output_tangent",
    "tangent_grad_q": f"q k v grad_output {TANGENTS} output_tangent grad_q",
    "tangent_grad_kv": f"q k v grad_output {TANGENTS} grad_k grad_v",
    "third_grad_q": f"{THIRD_ORDER} output_tangent grad_q",
    "third_grad_kv": f"{THIRD_ORDER} grad_k grad_v",
}
TENSOR_MEMORY = 512  # columns that a block has on compute capability 10.0
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@functools.cache
def load(file):
    """The module of the kernels, which imports no torch."""
    spec = importlib.util.spec_from_file_location("triton_kernels", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(kernels, name, dtype, width, target, plan, hardest):
    """Compiles a kernel for contiguous operands, where 16 divides n.

    The hardest variant is causal, with tails, a gradient of attn, all tangents of the third order,
    and three products for each of floats. The other one has nothing of these, but tangents of q.
    """
    if name.startswith("third_"):
        kernel = kernels._attn_third_order
    else:
        kernel = kernels._attn_columns if name.endswith("grad_kv") else kernels._attn_rows
    left_out = [] if hardest else ["grad_attn", *OTHERS.split()]
    matrices = [matrix for matrix in MATRICES[name].split() if matrix not in left_out]
    is_nvidia = TARGETS[target].backend == "cuda"
    rows, columns, warps, stages = plan
    tanh = "float" if dtype == "fp32" else "reduced"
    precision = "ieee"
    if is_nvidia:
        tanh = "approx" if dtype == "bf16" else tanh
        precision = ("tf32x3" if hardest else "tf32") if dtype == "fp32" else precision
    values = {"D": width, "E": width, "BM": rows, "BN": columns, "D_TAIL": False, "E_TAIL": False}
    values |= {"TANH": tanh, "PRECISION": precision, "M_TAIL": hardest, "N_TAIL": hardest}
    values["CAUSAL"] = hardest and "attn" not in matrices and "stored" not in matrices
    scalars = {"sizes": ("i32",), "k_sizes": ("i32",), "sharing": "i32", "scale": "fp32"}
    scalars |= dict.fromkeys(("m", "n", "d", "e"), "i32")
    signature, constants, attributes = {}, {}, {}
    of_vectors = kernel.arg_names.index("sizes")
    for i, argument in enumerate(kernel.arg_names):
        if argument in matrices:
            # A pointer, the strides of rows and of columns, which is 1, those of the batch.
            signature[argument] = ("*" + dtype, "i32", "constexpr", ("i32",))
            constants[i, 2] = 1
            for place in ((i, 0), (i, 1), (i, 3, 0)):
                attributes[place] = [["tt.divisibility", 16]]
        elif i < of_vectors:
            signature[argument], constants[i,] = "constexpr", None
        elif argument in scalars:
            signature[argument] = scalars[argument]
            if argument in ("n", "d", "e"):
                attributes[i,] = [["tt.divisibility", 16]]
        else:
            signature[argument], constants[i,] = "constexpr", values[argument]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, target=TARGETS[target], options=options)


def found(kernel):
    """What the compiler says of a kernel: shared memory, registers, spilled bytes of a thread."""
    # More can be compiled, but not be launched.
    if (columns := getattr(kernel.metadata, "tmem_size", 0)) > TENSOR_MEMORY:
        raise ValueError(f"it takes {columns} columns of tensor memory, and not {TENSOR_MEMORY}")
    if assembly := kernel.asm.get("amdgcn"):
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", assembly)[1])
        spilled = 4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)[1])
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(kernel.asm["cubin"])
            cubin.flush()
            command = [CUOBJDUMP, "-res-usage", cubin.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers = int(re.search(r"REG:(\d+)", usage)[1])
        spilled = sum(int(re.search(rf"{where}:(\d+)", usage)[1]) for where in ("STACK", "LOCAL"))
    return {"shared": kernel.metadata.shared, "registers": registers, "spilled": spilled}


def answer(job):
    """What was found of a job, a line of JSON; or what went wrong."""
    try:
        values = found(compiled(load(sys.argv[1]), **json.loads(job)))
    except Exception as error:
        why = str(error).strip().splitlines() or [""]
        values = {"error": f"{type(error).__name__}: {why[-1]}"}
    return json.dumps(values)


if __name__ == "__main__":
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for line in pool.map(answer, list(sys.stdin)):
            print(line, flush=True)
