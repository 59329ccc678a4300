# @@ before: # see https://github.com/pytorch/pytorch/pull/96264
        # The CPU kernel rounds less often than the products and tanh do.
        (torch.float16, torch.ops.aten.attn.default): 1e-3,
        (torch.bfloat16, torch.ops.aten.attn.default): 1e-2,
        (torch.float16, torch.ops.aten._attn_backward.default): 5e-3,
        (torch.bfloat16, torch.ops.aten._attn_backward.default): 5e-2,
