"""The machinery that carries an operator on top of PyTorch: overlay, stack, graft."""
