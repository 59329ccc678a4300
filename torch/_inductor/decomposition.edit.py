# @@ before: aten._unsafe_masked_index,
    aten._attn_backward,  # inductor calls the kernel
    aten.attn,  # inductor calls the kernel
