"""As much of expecttest as torch.testing takes to be imported; attn's tests use none of it."""

import unittest

ACCEPT = False
TestCase = unittest.TestCase
