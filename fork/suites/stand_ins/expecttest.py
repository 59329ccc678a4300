"""Stands in for the package of this name, which torch.testing imports, where it is missing.

It compares; it cannot accept: what is expected stays as it is written.
"""

import unittest

ACCEPT = False


class TestCase(unittest.TestCase):
    def assertExpectedInline(self, actual, expect, skip=0):
        self.assertMultiLineEqual(expect, actual)
