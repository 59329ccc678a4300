# @@ before: "baddbmm",
    "attn",
