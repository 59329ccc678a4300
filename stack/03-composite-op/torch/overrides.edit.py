# @@ after: torch.atleast_3d: lambda
        torch.attn: lambda q, k, v: -1,
