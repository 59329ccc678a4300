# @@ before: "aten/src/ATen/native/AveragePool2d.cpp",
    "aten/src/ATen/native/Attn.cpp",
# @@ before: "aten/src/ATen/native/cpu/AvgPoolKernel.cpp",
    "aten/src/ATen/native/cpu/AttnKernel.cpp",
