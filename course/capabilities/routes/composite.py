"""A composite in Python: autograd follows what is called inside."""

from formulas import forward as attn  # noqa: F401
