# @@ before: "convolution_backward",
        "_attn_backward",
        "_attn_output_backward",
        "_attn_output_double_backward",
