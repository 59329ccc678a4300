# @@ before: for __name in dir(_C._VariableFunctions):
from torch import _C_graft as _C_graft  # adds the grafted functions
