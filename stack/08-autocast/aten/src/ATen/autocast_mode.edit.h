// @@ before: _(baddbmm)
  _(attn)                                \
