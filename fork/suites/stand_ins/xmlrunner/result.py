"""The outcomes of tests as XML."""

import os
import re
import unittest
import xml.etree.ElementTree as ET
from types import SimpleNamespace

UNPRINTABLE = re.compile(r"[^\t\n\x20-\uD7FF\uE000-\uFFFD]")  # in XML, even as an entity


class _TestInfo:
    """What stands for the tests that are not run once a GPU is spoiled."""

    ERROR = "error"

    def __init__(self, result, test):
        self.test = test

    def shortDescription(self):
        return None

    def __str__(self):
        return str(self.test)


class _XMLTestResult(unittest.TextTestResult):
    callback = SimpleNamespace(__closure__=())  # in whose variables run_tests() puts its own words

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.report = ET.Element("testsuite")

    def add(self, test, tag="", message="", **attributes):
        test = getattr(test, "test_case", test)  # of a subtest
        # What fails may also be, say, a setUpClass.
        name = getattr(test, "_testMethodName", test.id())
        case = ET.SubElement(self.report, "testcase", classname=type(test).__name__, name=name)
        if tag:
            ET.SubElement(case, tag, message=UNPRINTABLE.sub("?", str(message)), **attributes)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.add(test)

    def addError(self, test, err):
        super().addError(test, err)
        self.add(test, "error", err[1])

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.add(test, "failure", err[1])

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.add(test, "failure", f"{subtest}: {err[1]}")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.add(test, "skipped", reason, type="skip")

    def addExpectedFailure(self, test, err):
        super().addExpectedFailure(test, err)
        self.add(test, "skipped", err[1], type="XFAIL")

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.add(test, "error", "unexpected success")

    def write(self, folder):
        os.makedirs(folder, exist_ok=True)
        ET.ElementTree(self.report).write(os.path.join(folder, "report.xml"), encoding="utf-8")
