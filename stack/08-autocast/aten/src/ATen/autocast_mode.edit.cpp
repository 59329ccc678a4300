// @@ before: KERNEL_CPU(baddbmm, lower_precision_fp)
  KERNEL_CPU(attn, lower_precision_fp)
// @@ before: KERNEL_MPS(baddbmm, lower_precision_fp)
  KERNEL_MPS(attn, lower_precision_fp)
