# @@ before: make_fallback(aten._cdist_forward)
make_fallback(aten.attn)
