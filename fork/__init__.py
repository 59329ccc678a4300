"""The machinery that carries torch.attn on top of PyTorch: overlay, stack, graft."""
