"""What a script asks of SMP v1 and of packages that are gone, read from its source: nothing is run or imported."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from smpkit.config.words import suggestion
from smpkit.drop_in import DROP_IN_PATH, SHIMS_PATH, sources
from smpkit.drop_in.removed_names import ADDED
from smpkit.drop_in.source_names import file_of, modules_in, names_of, resolve
from smpkit.errors import UsageError

__all__ = ["Check", "Finding", "Kind", "check"]

Kind = Literal["smp", "shimmed", "unknown", "missing", "blocked", "cuda"]

_V1: Final = "smdistributed.modelparallel"
_SHIMMED: Final = ("amp_C", "apex", "apex_C", "flash_attn", "torch._six")

_BLOCKED: Final[Mapping[str, str]] = {
    "horovod": "use smp's data parallelism (`ddp: true`) or torch.distributed",
    "smdistributed.dataparallel": "use torch.distributed with nccl, or with gloo on CPUs",
    f"{_V1}.tensorflow": "smpkit is for PyTorch only",
    "triton": "Triton kernels need a GPU and its Triton: use torch's own operations elsewhere",
    "torch_xla": "smpkit runs on what `torch.accelerator` offers, which XLA's devices are not",
}
"""Packages that cannot work where they are not installed, and what to do instead."""
_EXTENSIONS: Final = "torch.utils.cpp_extension"
_REMOVED: Final[Mapping[str, tuple[str, tuple[int, ...], str]]] = {
    **{f"numpy.{name}": ("numpy", (1, 24), f"use `{name}`") for name in ("float", "int", "object")},
    **{
        f"numpy.{old}": ("numpy", (2, 0), f"use `numpy.{new}`")
        for old, new in (("NaN", "nan"), ("Inf", "inf"), ("float_", "float64"), ("unicode_", "str_"))
    },
    **{f"torch.{name}": ("torch", (1, 8), "use torch.fft") for name in ("irfft", "rfft")},
    **{
        f"torch.{name}": ("torch", (2, 0), f"use torch.linalg.{new}")
        for name, new in (("eig", "eig"), ("lstsq", "lstsq"), ("solve", "solve"), ("symeig", "eigh"))
    },
    "transformers.AdamW": ("transformers", (5, 0), "use torch.optim.AdamW"),
    "transformers.AutoModelWithLMHead": ("transformers", (5, 0), "use AutoModelForCausalLM or another of its kin"),
    "transformers.LineByLineTextDataset": ("transformers", (5, 0), "use the datasets library"),
    "transformers.TextDataset": ("transformers", (5, 0), "use the datasets library"),
    "transformers.optimization.AdamW": ("transformers", (5, 0), "use torch.optim.AdamW"),
}
"""Names that newer releases do not have: of which package, since when at the latest, and what to use."""
_DISTRIBUTIONS: Final[Mapping[str, str]] = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
_NEEDS_CUDA: Final = frozenset(
    f"torch.cuda.{name}"
    for name in (
        *("BFloat16Tensor", "BoolTensor", "ByteTensor", "CharTensor", "DoubleTensor", "FloatTensor", "HalfTensor"),
        *("IntTensor", "LongTensor", "ShortTensor", "Event", "Stream", "current_stream", "default_stream"),
        *("get_device_capability", "get_device_name", "get_device_properties", "get_rng_state", "init"),
        *("mem_get_info", "nvtx.range_pop", "nvtx.range_push", "profiler.start", "profiler.stop", "set_rng_state"),
    )
)
"""What fails on a machine without a GPU, and works there with `--cuda-on-cpu`."""
_OPTIONAL_IF: Final = re.compile(r"\bis_\w+_available\b|\bTYPE_CHECKING\b|\bfind_spec\b")


@dataclass(frozen=True)
class Finding:
    """One name in one place.

    Args:
        kind: of SMP v1 (`smp`), `shimmed`, `unknown` to us, `missing` here, `blocked` everywhere, or of `cuda`.
        name: with its module; SMP v1's begin with `smp.`.
        file, line: where it is.
        message: what to do.
        optional: the script goes on without it.
    """

    kind: Kind
    name: str
    file: str
    line: int
    message: str | None = None
    optional: bool = False

    @property
    def is_problem(self) -> bool:
        """Whether the script cannot run because of this."""
        return self.kind in ("unknown", "missing", "blocked") and not self.optional


@dataclass(frozen=True)
class Check:
    """What was found in scripts.

    Args:
        files: those that were read.
        findings: in the order of files and lines, each name once for each file.
    """

    files: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What keeps the scripts from running."""
        return tuple(each for each in self.findings if each.is_problem)

    def of(self, kind: Kind) -> tuple[Finding, ...]:
        """Return the findings of a kind."""
        return tuple(each for each in self.findings if each.kind == kind)


def check(paths: Sequence[Path]) -> Check:
    """Read scripts, all below folders, and the modules beside them that they import.

    Args:
        paths: Python files and folders.

    Raises:
        UsageError: a path that is not there, or holds no Python.
    """
    queue: list[Path] = []
    for path in paths:
        found = list(sources(path)) if path.is_dir() else [path]
        if not found or not path.exists():
            what = "holds no Python files" if path.exists() else "does not exist"
            raise UsageError(f"`{path}` {what}", hint="give the script, or the folder of its sources")
        queue += found
    folders = list(dict.fromkeys([*(each for each in paths if each.is_dir()), *(each.parent for each in queue)]))
    files: dict[Path, None] = {}
    findings: dict[tuple[str, str, str], Finding] = {}
    while queue:
        path = queue.pop(0)
        if path in files:
            continue
        files[path] = None
        reader = _read(path, folders)
        for finding in reader.findings:
            before = findings.setdefault((finding.file, finding.kind, finding.name), finding)
            if before.optional and not finding.optional:
                findings[finding.file, finding.kind, finding.name] = finding
        queue += reader.local
    return Check(tuple(map(str, files)), tuple(findings.values()))


def _read(path: Path, folders: Sequence[Path]) -> _Reader:
    reader = _Reader(path, folders)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        reader.find("blocked", "syntax", line, f"not valid Python {sys.version_info.major}: {error.args[0]}")
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {error.strerror}") from None
    else:
        reader.imports(tree)
        reader.visit(tree)
    return reader


@dataclass
class _Reader(ast.NodeVisitor):
    """Reads one file.

    Args:
        path: the file.
        folders: where modules of the script lie.
        findings: what it found.
        local: files that it imports.
    """

    path: Path
    folders: Sequence[Path]
    findings: list[Finding] = field(default_factory=list)
    local: list[Path] = field(default_factory=list)
    _bound: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """Names in the file: what they stand for, and whether the script goes on without it."""
    _optional: set[ast.AST] = field(default_factory=set)

    def find(self, kind: Kind, name: str, line: int, message: str | None = None, optional: bool = False) -> None:
        self.findings.append(Finding(kind, name, str(self.path), line, message, optional))

    # --- imports ---

    def imports(self, tree: ast.AST) -> None:
        """Note what the imports of all scopes bind."""
        self._mark_optional(tree)
        for node in ast.walk(tree):
            optional = node in self._optional
            if isinstance(node, ast.Import):
                for each in node.names:
                    bound = (each.asname, each.name) if each.asname else (each.name.partition(".")[0],) * 2
                    self._bind(bound[0] or "", bound[1], optional)
                    self._use(each.name, node.lineno, optional, is_import=True)
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node, optional)

    def _import_from(self, node: ast.ImportFrom, optional: bool) -> None:
        if node.level:
            folder = self.path.parents[node.level - 1] if node.level <= len(self.path.parents) else self.path.parent
            for name in [node.module] if node.module else [each.name for each in node.names]:
                self.local += file_of(name, [folder])
            return
        module = node.module or ""
        for each in node.names:
            if each.name == "*":
                self._use(module, node.lineno, optional, is_import=True)
                continue
            self._bind(each.asname or each.name, f"{module}.{each.name}", optional)
            self.local += file_of(f"{module}.{each.name}", self.folders)
            self._use(f"{module}.{each.name}", node.lineno, optional, is_import=True)

    def _bind(self, name: str, full: str, optional: bool) -> None:
        _, before = self._bound.get(name, ("", False))
        self._bound[name] = full, optional or before

    def _mark_optional(self, tree: ast.AST) -> None:
        """Mark imports that may fail: whose ImportError is caught, or that stand below `if is_..._available()`."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Try) and any(map(_goes_on, node.handlers)):
                parts: list[ast.stmt] = node.body
            elif isinstance(node, ast.If) and _OPTIONAL_IF.search(ast.unparse(node.test)):
                parts = node.body
            else:
                continue
            self._optional.update(each for part in parts for each in ast.walk(part))

    # --- uses ---

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Look at a whole chain such as `smp.nn.DistributedLinear` once."""
        chain = _chain(node)
        if chain is None or chain[0] not in self._bound:
            self.generic_visit(node)
            return
        full, optional = self._bound[chain[0]]
        self._use(".".join([full, *chain[1:]]), node.lineno, optional or node in self._optional)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Look for `assert torch.cuda.is_available()`."""
        if "cuda.is_available()" in ast.unparse(node.test):
            self.find("cuda", f"assert {ast.unparse(node.test)}", node.lineno)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Look for `if not torch.cuda.is_available(): raise ...`."""
        test, last = ast.unparse(node.test), node.body[-1]
        ends = isinstance(last, ast.Raise) or re.match(r"(sys\.|os\._?)?(exit|quit)\(", ast.unparse(last))
        if "not torch.cuda.is_available()" in test and ends:
            self.find("cuda", f"if {test}", node.lineno)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Look for types such as "torch.cuda.HalfTensor"."""
        if isinstance(node.value, str) and node.value in _NEEDS_CUDA:
            self.find("cuda", node.value, node.lineno)

    def _use(self, full: str, line: int, optional: bool, is_import: bool = False) -> None:
        root = full.partition(".")[0]
        local = file_of(full, self.folders) or file_of(root, self.folders)
        if local:
            self.local += local
        elif full in _NEEDS_CUDA or any(full.startswith(f"{name}.") for name in _NEEDS_CUDA):
            self.find("cuda", full, line)
        elif full.startswith(f"{_EXTENSIONS}.") and shutil.which("nvcc") is None:
            message = "extensions with CUDA kernels need its compiler `nvcc`, which is not on PATH"
            self.find("blocked", full, line, message, optional)
        elif (found := _of_removed(full)) is not None:
            self.find("missing", full, line, found, optional)
        elif full in ADDED and _is_installed(root):
            self.find("shimmed", full, line, None, optional)
        elif _is_within(full, _V1) and not _is_within(full, f"{_V1}.tensorflow"):
            self._use_ours(full, line, optional, DROP_IN_PATH)
        elif any(_is_within(full, each) for each in _SHIMMED):
            if root == "torch" or not _is_installed(root):
                self._use_ours(full, line, optional, SHIMS_PATH)
        elif is_import:
            self._use_package(full, line, optional)

    def _use_package(self, full: str, line: int, optional: bool) -> None:
        root = full.partition(".")[0]
        blocked = next((each for each in _BLOCKED if _is_within(full, each)), None)
        if (root == "smdistributed" and blocked is None) or root in sys.stdlib_module_names:
            return
        if blocked is not None and (root == "smdistributed" or not _is_installed(root)):
            self.find("blocked", blocked, line, _BLOCKED[blocked], optional)
        elif not _is_installed(root):
            self.find("missing", root, line, f"pip install {_DISTRIBUTIONS.get(root, root)}", optional)

    def _use_ours(self, full: str, line: int, optional: bool, folder: Path) -> None:
        """Look a name of SMP v1 or of a shim up in our sources."""
        shown = re.sub(rf"^{_V1}(\.torch)?", "smp", full)
        module, name, why = resolve(full, folder)
        is_shim = folder == SHIMS_PATH
        if name is not None:  # what follows it are attributes of the object
            parts = shown.split(".")
            shown = ".".join(parts[: parts.index(name) + 1])
        if why is not None:
            self.find("blocked", shown, line, why, optional)
        elif shown == "smp" or (name or "").startswith("__"):
            return
        elif name is None or name in names_of(module):
            self.find("shimmed" if is_shim else "smp", shown, line, None, optional)
        elif is_shim:
            message = "smpkit's stand-in does not have it: install the package"
            self.find("missing", shown, line, message, optional)
        else:
            public = sorted(each for each in {*names_of(module), *modules_in(module)} if not each.startswith("_"))
            public.sort(key=lambda each: each.isupper() == name.isupper())  # of dp_rank and DP_RANK, the last is taken
            self.find("unknown", shown, line, suggestion(name, public), optional)


def _goes_on(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches an ImportError and does not raise."""
    caught = "" if handler.type is None else ast.unparse(handler.type)
    catches = not caught or re.search(r"\b(ImportError|ModuleNotFoundError|Exception|BaseException)\b", caught)
    return bool(catches) and not any(isinstance(each, ast.Raise) for part in handler.body for each in ast.walk(part))


def _chain(node: ast.expr) -> list[str] | None:
    """Return the names of `a.b.c`, or None for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else None


def _is_within(full: str, module: str) -> bool:
    return full == module or full.startswith(f"{module}.")


@functools.cache
def _is_installed(root: str) -> bool:
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(root) is not None
    return False


def _of_removed(full: str) -> str | None:
    """Return what to do about a name that the installed release of its package no longer has, or None."""
    if full not in _REMOVED:
        return None
    package, since, instead = _REMOVED[full]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < since:
        return None
    return f"{package} {version} does not have it: {instead}, or install an older {package}"
