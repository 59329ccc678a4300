"""A C++ extension: kernel, fake kernel and torch::autograd::Function, all of them in C++."""

import torch
from compiling import built

library = built("cpp_extension.cpp")
torch.ops.load_library(library)

attn = operator = torch.ops.capabilities.attn.default
