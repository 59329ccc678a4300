"""The graft: a wheel of PyTorch in, a wheel of PyTorch with our operators out, and installed."""

from fork.graft.base import INSTALLED, Base, graftable
from fork.graft.build import Graft, Toolchain, made_of, open_graft
from fork.graft.cuda import ARCHITECTURE, OLDEST, Nvcc, compilers
from fork.graft.install import STAMP, graft_into, run_example
