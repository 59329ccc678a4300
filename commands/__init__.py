"""Commands of this project alone: `python -m fork new --into` copies fork/ without them."""
