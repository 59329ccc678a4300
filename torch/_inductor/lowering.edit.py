# @@ before: make_fallback(aten._cdist_forward)
make_fallback(aten.attn, warn=False)  # decomposed for export only
make_fallback(aten._attn_backward, warn=False)  # decomposed for export only
make_fallback(aten.attn_output, warn=False)  # decomposed it would need m x n
make_fallback(aten._attn_output_backward, warn=False)
make_fallback(aten._attn_output_jvp, warn=False)
make_fallback(aten._attn_output_double_backward, warn=False)
make_fallback(aten._attn_output_triple_backward, warn=False)
