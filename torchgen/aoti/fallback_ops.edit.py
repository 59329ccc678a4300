# @@ before: "aten._cdist_backward.default": {},
# @@ only: torch>=2.8,<2.13
    "aten._attn_backward.default": {},
    "aten._attn_output_backward.default": {},
    "aten._attn_output_double_backward.default": {},
    "aten._attn_output_jvp.default": {},
# @@ before: "aten._cdist_backward.default": {},
# @@ only: torch>=2.13
    "aten._attn_backward.default": {"since": "TORCH_VERSION_2_13_0"},
    "aten._attn_output_backward.default": {"since": "TORCH_VERSION_2_13_0"},
    "aten._attn_output_double_backward.default": {"since": "TORCH_VERSION_2_13_0"},
    "aten._attn_output_jvp.default": {"since": "TORCH_VERSION_2_13_0"},
# @@ before: "aten.avg_pool2d.default": {},
# @@ only: torch>=2.8,<2.13
    "aten.attn.default": {},
    "aten.attn_output.default": {},
# @@ before: "aten.avg_pool2d.default": {},
# @@ only: torch>=2.13
    "aten.attn.default": {"since": "TORCH_VERSION_2_13_0"},
    "aten.attn_output.default": {"since": "TORCH_VERSION_2_13_0"},
# @@ before: "aten.avg_pool2d_backward.default",
# @@ only: torch<2.8
    "aten._attn_backward.default",
    "aten._attn_output_backward.default",
    "aten._attn_output_double_backward.default",
    "aten._attn_output_jvp.default",
    "aten.attn.default",
    "aten.attn_output.default",
