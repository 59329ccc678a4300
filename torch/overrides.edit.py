# @@ after: torch.atleast_3d: lambda
        torch.attn: lambda q, k, v: -1,
        torch.attn_output: lambda q, k, v, *, is_causal=False, scale=1.0: -1,
