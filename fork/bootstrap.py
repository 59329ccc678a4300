"""What the Makefile calls: makes .venv with the requirements, runs `python -m fork ARGS` in it.

With `--base installed` among ARGS, or in BASE, the requirements are those that the running
Python has, so that nothing is downloaded.

Only the standard library, for the running Python need have nothing else.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path

from fork.errors import ForkError, cause

ROOT = Path(os.path.abspath(__file__)).parent.parent
VENV = ROOT / ".venv"
# The graft imports these modules and calls these programs. (Tests and lint need more.)
MODULES = ("click", "packaging", "pip", "rich", "typing_extensions", "wheel", "yaml")
TOOLS = ("cmake", "ninja")
# A file in a virtual environment's site-packages that says where another Python's packages are.
BORROWED = "borrowed.pth"
# With this variable, `python -m fork` checks the arguments of a command, and does not run it.
ONLY_CHECKS = "FORK_ONLY_CHECKS"
# Where nothing answers, pip would try for two minutes, and then look for a newer pip.
os.environ.setdefault("PIP_RETRIES", "1")
os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")


def check_machine():
    if sys.implementation.name != "cpython" or not sys.platform.startswith("linux"):
        name = f"{sys.implementation.name} on {sys.platform}"
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
    return path.read_text(encoding="utf-8") if path.exists() else ""


def aside(venv):
    """The path of the environment that `venv` replaces, until it is complete."""
    return venv.with_name(venv.name + ".before")


def put_back(venv):
    """Undoes what a run that failed or was killed has made of `venv`, if it replaced another."""
    if aside(venv).exists():
        shutil.rmtree(venv, ignore_errors=True)
        aside(venv).rename(venv)


@contextmanager
def replacing(venv):
    """Has the environment that was there before back if the block fails."""
    try:
        yield
    except BaseException:
        put_back(venv)
        raise
    shutil.rmtree(aside(venv), ignore_errors=True)


def new_venv(venv, *options):
    if read(venv / ".requirements") or read(venv / ".borrowed"):  # it is complete
        venv.rename(aside(venv))
    shutil.rmtree(venv, ignore_errors=True)
    # It is the base interpreter's: one made from another environment would depend on that.
    base = getattr(sys, "_base_executable", None) or sys.executable
    run([base, "-m", "venv", str(venv)] + list(options), "python -m venv fails")


def made_here(venv):
    """What is written in a virtual environment that is made: its Python, and its place.

    Its scripts name that place, so that those of a copy would run the original's Python.
    """
    return f"{sys.version}\n{os.path.realpath(venv)}\n"


def make_venv(venv, *requirements, check=None):
    """A virtual environment of this Python with the `requirements` files; returns its interpreter.

    One that is complete stays as it is; one that a kill left half made, or that was made at another
    place, is made anew. One that is replaced is removed after the new one is complete and `check`,
    called with it, returns.
    """
    put_back(venv)
    python, stamp, made = venv / "bin" / "python", venv / ".requirements", venv / ".made"
    wanted = made_here(venv) + "".join(read(file) for file in requirements)
    if read(stamp) == wanted:
        return python
    names = " and ".join(os.path.relpath(file, ROOT) for file in requirements)
    print(f"  making {venv.name} with {names}", flush=True)
    with replacing(venv):
        if read(made) != made_here(venv):
            new_venv(venv)
            made.write_text(made_here(venv), encoding="utf-8")
        pip = [str(python), "-m", "pip", "install", "-q"]
        files = [option for file in requirements for option in ("-r", str(file))]
        run(pip + files, f"{names} cannot be installed")
        if check:
            check(python)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def borrow_venv(venv, check=None):
    """A virtual environment with the running Python's packages; returns its interpreter.

    They stay where they are, behind those of its own: a torch that is installed in it comes first.
    `check` is called with the running Python before anything is made.
    """
    put_back(venv)
    python, stamp = venv / "bin" / "python", venv / ".borrowed"
    if Path(sys.prefix).resolve() == venv.resolve():
        raise ForkError(f"{sys.executable} is what is to be made: name another with PYTHON=")
    # These are pip's, Debian's and the user's own places, but not the folders of PYTHONPATH.
    names = ("site-packages", "dist-packages")
    packages = [p for p in sys.path if os.path.basename(p) in names and os.path.isdir(p)]
    scripts = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    tools = {tool: shutil.which(tool, path=scripts) for tool in TOOLS}
    missing = [m for m in MODULES if importlib.util.find_spec(m) is None]
    missing += [tool for tool in TOOLS if not tools[tool]]
    if missing:
        what = "BASE=installed takes all from {}, which lacks {}"
        raise ForkError(what.format(sys.executable, ", ".join(missing)))
    if check:
        check(sys.executable)
    # The last folder has stand-ins for packages that are missing.
    lines = packages + [str(ROOT / "fork" / "suites" / "stand_ins")]
    wanted = "\n".join([made_here(venv)] + lines + [tools[tool] for tool in TOOLS])
    if read(stamp) == wanted:
        return python
    print(f"  making {venv.name} with the packages of {sys.executable}", flush=True)
    with replacing(venv):
        new_venv(venv, "--without-pip")  # pip is among the packages
        for tool in TOOLS:
            (venv / "bin" / tool).symlink_to(tools[tool])
        site = Path(sysconfig.get_path("purelib", "venv", {"base": str(venv)}))
        (site / BORROWED).write_text("\n".join(lines) + "\n", encoding="utf-8")
    stamp.write_text(wanted, encoding="utf-8")
    return python


def chosen_base(args, environment):
    """Returns what --base names or, without it, the variable BASE; None for the default."""
    for at, arg in enumerate(args):
        if arg == "--base" and at + 1 < len(args):
            return args[at + 1]
        if arg.startswith("--base="):
            return arg[len("--base=") :]
    return environment.get("BASE")


def check_arguments(python):
    """Exits with what `python -m fork` says of this run's arguments, if they are wrong."""
    command = [str(python), "-m", "fork"] + sys.argv[1:]
    env = dict(os.environ, **{ONLY_CHECKS: "1"})
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=str(ROOT), env=env, **out)
    if done.returncode:
        sys.exit(done.stdout.decode(errors="replace").strip())


def main():
    try:
        check_machine()
        if chosen_base(sys.argv[1:], os.environ) == "installed":
            python = borrow_venv(VENV, check_arguments)
        else:
            python = make_venv(VENV, ROOT / "requirements.txt", check=check_arguments)
    except (ForkError, OSError) as e:
        sys.stderr.write(f"error: {e}\n")
        sys.exit(1)
    os.chdir(str(ROOT))
    os.execv(str(python), [str(python), "-m", "fork"] + sys.argv[1:])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.stderr.write("stopped; run it again to go on\n")
        sys.exit(130)
