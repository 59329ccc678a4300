# @@ before: "convolution_backward",
        "_attn_backward",
