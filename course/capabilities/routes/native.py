"""The operator in ATen: at commit 3 a composite, at commit 4 explicit, then the tip."""

import torch

attn = torch.attn
operator = torch.ops.aten.attn.default
