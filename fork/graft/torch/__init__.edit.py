# @@ before: for __name in dir(_C._VariableFunctions):
from torch import _C_graft as _C_graft  # adds the grafted functions
# @@ before: # `_import_device_backends` should be kept at the end
# @@ only: torch>=2.10,<2.13
from torch import _graft_triton as _graft_triton  # registers the kernels for GPUs

