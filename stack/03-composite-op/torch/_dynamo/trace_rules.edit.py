# @@ before: "torch.avg_pool1d",
        "torch.attn",
