// @@ before: _(baddbmm)
  _(attn)                                \
  _(attn_output)                         \
