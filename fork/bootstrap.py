"""What the Makefile calls: makes .venv with the requirements, runs `python -m fork ARGS` in it.

Only the standard library, and only syntax that an old Python can read, so that it can say so.
"""

import os
import shutil
import subprocess
import sys
import sysconfig

from fork.errors import ForkError, cause

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
OLDEST = (3, 11)


def check_machine():
    if sys.version_info < OLDEST:
        raise ForkError(
            "Python {}.{} or newer is needed, and this is {}; name one with PYTHON=".format(
                OLDEST[0], OLDEST[1], sys.version.split()[0]
            )
        )
    if sys.implementation.name != "cpython" or not sys.platform.startswith("linux"):
        name = "{} on {}".format(sys.implementation.name, sys.platform)
        raise ForkError("CPython on Linux is needed, and this is " + name)
    if not os.environ.get("CXX") and not shutil.which("g++"):
        raise ForkError("no C++ compiler: install g++ (Debian: apt-get install g++), or set CXX")
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        raise ForkError("Python's headers are missing (Debian: apt-get install python3-dev)")


def run(command, wrong):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode:
        text = result.stdout.decode(errors="replace")
        if "ensurepip" in text:
            wrong, text = (
                "Python's venv module is incomplete",
                "apt-get install python3-venv on Debian",
            )
        raise ForkError("{}: {}".format(wrong, cause(text) or "no message"))


def read(path):
    if not os.path.exists(path):
        return ""
    with open(path) as file:
        return file.read()


def make_venv(venv, requirements):
    """A virtual environment of this Python with `requirements`; returns its interpreter.

    One that is complete stays as it is; one that a kill left half made is made anew.
    """
    python = os.path.join(venv, "bin", "python")
    stamp, made = os.path.join(venv, ".requirements"), os.path.join(venv, ".made")
    wanted = sys.version + read(requirements)
    if read(stamp) == wanted:
        return python
    print(
        "  making {} with {}".format(os.path.basename(venv), os.path.basename(requirements)),
        flush=True,
    )
    if read(made) != sys.version:
        shutil.rmtree(venv, ignore_errors=True)
        # The base interpreter: a virtual environment made from another's would hang on that one.
        base = getattr(sys, "_base_executable", None) or sys.executable
        run([base, "-m", "venv", venv], "python -m venv fails")
        with open(made, "w") as file:
            file.write(sys.version)
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run(pip + ["-r", requirements], "{} cannot be installed".format(os.path.basename(requirements)))
    with open(stamp, "w") as file:
        file.write(wanted)
    return python


def main():
    try:
        check_machine()
        python = make_venv(os.path.join(ROOT, ".venv"), os.path.join(ROOT, "requirements.txt"))
    except (ForkError, OSError) as e:
        sys.stderr.write("error: {}\n".format(e))
        sys.exit(1)
    os.chdir(ROOT)
    os.execv(python, [python, "-m", "fork"] + sys.argv[1:])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.stderr.write("stopped; run it again to go on\n")
        sys.exit(130)
