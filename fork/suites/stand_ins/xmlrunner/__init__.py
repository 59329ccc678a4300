"""As much of unittest-xml-reporting as PyTorch's run_tests() and fork/suites/results.py want."""

import unittest


class XMLTestRunner(unittest.TextTestRunner):
    """Writes report.xml, with an entry for each outcome, into the folder `output`."""

    def __init__(self, output, **kwargs):
        super().__init__(**kwargs)
        self.output = output

    def run(self, test):
        result = super().run(test)
        result.write(self.output)
        return result
