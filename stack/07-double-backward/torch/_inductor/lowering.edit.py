# @@ before: make_fallback(aten._cdist_forward)
make_fallback(aten.attn)
make_fallback(aten._attn_backward)
