# @@ before: from ._conv_ops import
from ._attn_ops import *  # noqa: F403
