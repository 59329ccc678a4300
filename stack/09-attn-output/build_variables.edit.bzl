# @@ before: "aten/src/ATen/native/AveragePool2d.cpp",
    "aten/src/ATen/native/Attn.cpp",
    "aten/src/ATen/native/AttnOutput.cpp",
