# @@ before: for __name in dir(_C._VariableFunctions):
from torch import _C_attn as _C_attn  # adds the grafted functions
