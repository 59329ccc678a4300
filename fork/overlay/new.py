"""The skeleton of a commit that adds an operator: all that PyTorch wants to know of it."""

import keyword
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from string import Template

from pygments.lexers.c_cpp import CppLexer
from pygments.token import Keyword, Name

from fork.errors import ForkError
from fork.overlay.edit import Edit, is_edit
from fork.overlay.stack import DERIVATIVES, NATIVE, Commit, Stack, files_under, operators
from fork.overlay.tree import write
from fork.project import FILE, PROJECT

# Templates. Those below overlay/ lie at the path of the file that they become; in a path, NAME and
# CAMEL stand for the operator's name.
HERE = Path(__file__).parent / "skeleton"
# Numbers as Python, C++ and the schema parsers of PyTorch all read them: no zero comes first.
INTEGER = r"(0|[1-9]\d{0,17})"
NUMBER = rf"-?(?=\.?\d){INTEGER}?(\.\d*)?([eE][+-]?\d{{1,2}})?"


@dataclass(frozen=True)
class Type:
    cpp: str
    sample: str  # a value for the samples
    default: str  # what a default matches
    wanted: str  # the same in words


# A schema's type -> what the skeleton knows of it.
TYPES = {
    "Tensor": Type("const Tensor&", "", "(?!)", "left out"),
    "Tensor?": Type("const std::optional<Tensor>&", "", "None", "None"),
    "Scalar": Type("const Scalar&", "0.5", NUMBER, "a number"),
    "float": Type("double", "0.5", NUMBER, "a number"),
    "int": Type("int64_t", "2", f"-?{INTEGER}", "an integer"),
    "bool": Type("bool", "True", "True|False", "True or False"),
}
# A new repository gets these files from this one, beside fork/, which they drive.
MACHINERY = (
    *("CMakeLists.txt", "Makefile", "pyproject.toml", "requirements.txt", "setup.py"),
    *(".clang-format", ".gitignore", ".yamllint"),
)
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# The C++ that PyTorch generates has variables of these names beside the arguments and the results.
GENERATED = {"grad_fn", "ks"}
# A formula or the binding for Python has these names for something else than an argument.
NO_ARGUMENT = re.compile(r"grads?|out|requires_grad|result\d*")
# Beside the gradient grad_NAME of one of several results it has variables of its own.
NO_RESULT = {"input_mask", "inputs", "result"}


@dataclass(frozen=True)
class Argument:
    name: str
    type: str  # of TYPES
    default: str | None
    keyword_only: bool

    @property
    def python(self) -> str:
        return self.name if self.default is None else f"{self.name}={self.default}"


@dataclass(frozen=True)
class Operator:
    """What a schema says."""

    name: str
    schema: str
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]  # their names; an empty one for a result without

    @property
    def tensors(self) -> list[str]:
        return [a.name for a in self.arguments if a.type.startswith("Tensor")]

    @property
    def signature(self) -> str:
        """As Python writes it."""
        positional = [a.python for a in self.arguments if not a.keyword_only]
        keywords = [a.python for a in self.arguments if a.keyword_only]
        return ", ".join([*positional, *(["*", *keywords] if keywords else [])])

    @property
    def camel(self) -> str:
        return "".join(word.capitalize() for word in self.name.split("_"))


def new(root: Path, name: str, schema: str, into: Path | None = None) -> list[str]:
    """Writes the skeleton as the stack's next commit, or as the first one of a folder of its own.

    Args:
        root: this repository.
        name: of the operator.
        schema: as native_functions.yaml has it, with or without the name before the parenthesis.
        into: a folder that does not exist yet: gets the machinery too, and no other operator.

    Returns:
        The files written, as paths below the repository, the versions kept for earlier commits too.

    Raises:
        ForkError: for a name or a schema that cannot be taken; nothing is written then.
    """
    operator = parse(name, schema)
    if into is None:
        target, commits, taken = root, Stack(root).commits, operators(root / NATIVE)
    else:
        target, commits, taken = into, [], []
        if into.exists() and (not into.is_dir() or any(into.iterdir())):
            raise ForkError(f"{into}: exists; name a new folder")
    if name in taken or any(c.folder.name[3:] == name.replace("_", "-") for c in commits):
        raise ForkError(f"{name}: the stack has an operator or a commit of that name")
    if upstream_has(name):
        raise ForkError(f"{name}: PyTorch has a function of that name")
    files = skeleton(operator)
    for path in files:
        exists = (target / path).exists()
        if exists and not is_edit(path):
            raise ForkError(f"{path}: exists already")
        if exists and not any(path in c.files for c in commits):
            raise ForkError(f"{path}: no commit of the stack claims this file")
    if into is not None:
        copy_machinery(root, into, operator)
    number = len(commits) + 1
    folder = target / "stack" / f"{number:02d}-{name.replace('_', '-')}"
    title, body = re.fullmatch(r"# (.+)\n\n(.*)", fill("commit.md.in", operator), re.S).groups()
    commit = Commit(number, folder, title, body, tuple(sorted(files)), ())
    kept = {}  # the versions at the root, which the commits that they belong to get
    for path, text in files.items():
        if (target / path).exists():
            last = [c for c in commits if path in c.files][-1]
            kept[f"{last}/{path}"] = old = (target / path).read_text(encoding="utf-8")
            files[path] = joined(path, old, text)
    message = f"{commit}/commit.md"
    texts = files | kept | {message: commit.text()}
    write({path: text.encode() for path, text in texts.items()}, target)
    return [*commit.files, *sorted(kept), message]


def parse(name: str, schema: str) -> Operator:
    """Parses the schema with PyTorch's own parser; raises ForkError with what is wrong."""
    if not NAME.fullmatch(name):
        raise ForkError(f"{name}: an operator is named in small letters, say log_cosh")
    if language := reserved_in(name):
        raise ForkError(f"{name}: {language} reserves this word")
    schema = text = " ".join(schema.split())
    if text.startswith("("):
        text = f"{name}{text}"
    try:
        from torchgen.model import FunctionSchema
    except ModuleNotFoundError:  # or this repository's folder torchgen was found
        wanted = f"run `make {PROJECT}` first, to its end"
        raise ForkError(f"no torch, whose parser reads a schema: {wanted}") from None
    try:
        found = FunctionSchema.parse(text)
    except (AssertionError, RuntimeError, ValueError) as e:
        reason = " ".join(str(e).split()) or "PyTorch's parser does not take it"
        example = f'"{name}(Tensor self, *, float scale=1.0) -> Tensor"'
        raise ForkError(f"{schema}: {reason}; a schema reads like {example}") from None
    if str(found.name) != name:
        raise ForkError(f"{schema}: a schema of {found.name}, and the operator is {name}")
    given = found.arguments
    if given.out or given.tensor_options:
        raise ForkError(f"{schema}: an out argument, or those that make a new tensor: not for this")
    arguments = []
    keywords = [a.name for a in given.pre_tensor_options_kwarg_only]
    for a in given.flat_non_out:
        if str(a.type) not in TYPES or a.annotation:
            takes = ", ".join(TYPES)
            raise ForkError(f"{schema}: {a}: the skeleton takes {takes} only")
        arguments.append(Argument(a.name, str(a.type), a.default, a.name in keywords))
    if not found.returns or any(str(r.type) != "Tensor" or r.annotation for r in found.returns):
        raise ForkError(f"{schema}: a result that is not a new Tensor")
    if not any(a.type == "Tensor" for a in arguments):
        raise ForkError(f"{schema}: takes no Tensor, so there is nothing to differentiate")
    results = tuple(r.name or "" for r in found.returns)
    operator = Operator(name, str(found), tuple(arguments), results)
    for wrong in faults(operator):
        raise ForkError(f"{schema}: {wrong}")
    return operator


def reserved_in(word: str) -> str:
    """Returns the language whose keyword `word` is; an empty text if it is no keyword."""
    if keyword.iskeyword(word):
        return "Python"
    # Pygments is there wherever rich is.
    tokens = list(CppLexer(ensurenl=False).get_tokens(word))
    return "C++" if any(kind in Keyword or kind in Name.Builtin for kind, _ in tokens) else ""


def faults(op: Operator) -> Iterator[str]:
    """Finds what the parser takes, but Python, the compiler or the code generator does not."""
    for a in op.arguments:
        if a.default is not None and not re.fullmatch(TYPES[a.type].default, a.default):
            yield f"{a.type} {a.python}: the default must be {TYPES[a.type].wanted}"
    arguments, results = [a.name for a in op.arguments], [name for name in op.results if name]
    for name in (*arguments, *results):
        if not NAME.fullmatch(name.lower()):
            yield f"'{name}' is not a name: letters, digits, single underscores between them"
        if language := reserved_in(name):
            yield f"{name}: {language} reserves this word"
        if (
            name in GENERATED
            or (name in arguments and NO_ARGUMENT.fullmatch(name))
            or (len(results) > 1 and name in results and name in NO_RESULT)
        ):
            yield f"{name}: PyTorch's code generator has this name for something else"
    for name, times in Counter([*arguments, *results]).items():
        if times > 1:
            yield f"{name}: named twice"
    if {"self", "input"} <= {*arguments}:
        yield "input: Python calls the argument self so"
    if results and len(results) < len(op.results):
        yield "name each result, or none"
    for before, after in pairwise(op.arguments):
        if before.default is not None and after.default is None:
            yield f"{after.name} needs a default, as {before.name} before it has one"
    for at, a in enumerate(op.arguments):
        if a.keyword_only and (at == 0 or a.name in ("self", "input")):
            yield f"{a.name}: must be positional, as OpInfo's samples have it"


def upstream_has(name: str) -> bool:
    """Whether PyTorch has a native function, or anything public, of that name."""
    import torch
    import torchgen

    native = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    declared = re.search(
        rf"^- func: {re.escape(name)}[.(]", native.read_text(encoding="utf-8"), re.M
    )
    return bool(declared) or hasattr(torch, name)


def skeleton(op: Operator) -> dict[str, str]:
    """Returns the text of each file, by its path; of an edit, what it adds."""
    files = {}
    for template in files_under(HERE / "overlay"):
        path = template.removesuffix(".in").replace("NAME", op.name).replace("CAMEL", op.camel)
        files[path] = fill(f"overlay/{template}", op)
    return files


def fill(template: str, op: Operator) -> str:
    """Fills in a file of skeleton/ for this operator."""
    tensors = op.tensors
    shapes = [f"shape_{t}" if len(tensors) > 1 else "shape" for t in tensors]
    values = {a.name: TYPES[a.type].sample for a in op.arguments}
    values |= {t: f"make({shape})" for t, shape in zip(tensors, shapes, strict=True)}
    values |= {a.name: "False" for a in op.arguments if a.default == "True"}
    # The second one, if it differs, has the defaults.
    samples = dict.fromkeys(
        ", ".join((f"{a.name}=" if a.keyword_only else "") + values[a.name] for a in given)
        for given in (op.arguments, [a for a in op.arguments if a.default is None])
    )
    gradients = [f'  {t}: not_implemented("TODO({op.name}) the gradient of {t}")' for t in tensors]
    returns = result = "Tensor"
    if len(op.results) > 1:
        of_each = ", ".join("Tensor" for _ in op.results)
        returns, result = f"std::tuple<{of_each}>", f"({of_each})"
        first = f"grad_{op.results[0]}" if op.results[0] else "grads[0]"
        about = f"  # The gradient of a result that is not used is undefined: {first}.defined()"
        gradients.insert(0, about)
    words = {
        "Camel": op.camel,
        "args": "\n".join(f"    {a.name} ({a.type}): TODO({op.name})" for a in op.arguments),
        "count": str(len(op.results)),
        "gradients": "\n".join(gradients),
        "includes": "#include <optional>\n" if "Tensor?" in {a.type for a in op.arguments} else "",
        "name": op.name,
        "names": str([a.name for a in op.arguments]),
        "parameters": ", ".join(f"{TYPES[a.type].cpp} {a.name}" for a in op.arguments),
        "result": result,
        "returns": returns,
        "samples": "\n".join(f"        yield SampleInput({sample})" for sample in samples),
        "schema": op.schema,
        "shapes": ", ".join(shapes) + ("," if len(shapes) == 1 else ""),
        "signature": op.signature,
        "tensors": ", ".join(tensors),
    }
    return Template((HERE / template).read_text(encoding="utf-8")).substitute(words)


def joined(path: str, old: str, more: str) -> str:
    """Adds the blocks of `more` to an edit file; a place that has a block gets no second one."""
    lines, added = old.splitlines(), more.splitlines()
    blocks = Edit.parse(path, more).blocks
    for block in blocks:
        mark = added[block.line - 1]
        if mark in lines:
            start = lines.index(mark) + 1
            end = next((i for i in range(start, len(lines)) if "@@ " in lines[i]), len(lines))
            while end > start and not lines[end - 1].strip():
                end -= 1
            apart = [""] if "" in lines[start:end] or path in (NATIVE, DERIVATIVES) else []
            lines[end:end] = [*apart, *block.lines]
        else:
            lines += ["", mark, *block.lines]
    return "\n".join(lines) + "\n"


def copy_machinery(root: Path, into: Path, op: Operator) -> None:
    """Copies what a new repository needs to graft, test and send its operators."""
    paths = [name for name in MACHINERY if (root / name).is_file()]
    # The tests are about this project.
    paths += [f"fork/{path}" for path in files_under(root / "fork", {"tests"})]
    files = {path: (root / path).read_bytes() for path in paths}
    ours, theirs = (f'project = "{name}"'.encode() for name in (PROJECT, op.name))
    files[FILE] = files[FILE].replace(ours, theirs)
    files["README.md"] = fill("README.md.in", op).encode()
    write(files, into)
