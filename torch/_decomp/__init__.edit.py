# @@ before: aten.avg_pool2d_backward,
            aten._attn_backward,
            aten.attn,
