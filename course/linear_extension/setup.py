"""Builds the extension's library: `pip install --no-build-isolation .`

The kernel for CUDA is in it if the torch that is installed is built for CUDA and there is an nvcc.
"""

import torch
from setuptools import setup
from torch.utils.cpp_extension import (
    CUDA_HOME,
    BuildExtension,
    CppExtension,
    CUDAExtension,
)

SOURCES = ["csrc/linear.cpp", "csrc/linear_function.cpp"]
has_cuda = torch.version.cuda is not None and CUDA_HOME is not None
Extension = CUDAExtension if has_cuda else CppExtension
options = {"cxx": ["-O3", "-DAT_PER_OPERATOR_HEADERS"]}
if has_cuda:
    SOURCES.append("csrc/linear_cuda.cu")
    options["nvcc"] = ["-O3", "-DAT_PER_OPERATOR_HEADERS"]

setup(
    ext_modules=[
        Extension(
            "linear_extension._C",
            SOURCES,
            extra_compile_args=options,
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
