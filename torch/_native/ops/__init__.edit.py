# @@ only: torch>=2.13
# @@ after: from . import
from .attn import triton_impl


triton_impl.register_to_dispatch()
