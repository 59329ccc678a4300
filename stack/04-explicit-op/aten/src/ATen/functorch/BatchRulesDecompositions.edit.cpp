// @@ before: OP_DECOMPOSE(avg_pool1d);
  OP_DECOMPOSE(_attn_backward);
