# @@ before: aten._scaled_dot_product_flash_attention,
        aten.attn,
        aten._attn_backward,
