# @@ before: "baddbmm",
    "attn",
    "_attn_backward",
