"""Tell which lines of the runtime's device path the tests run on the simulated device.

Coverage tools see the threads of Python only. The backward of a device runs in a thread of autograd, and with it most
hooks of the product. So a probe is put before each statement of a function when its file is imported, by a
`sitecustomize` that all processes of the run find. They note lines in one file that all of them have mapped, so what a
killed rank has done counts as well. A line counts once the process has the simulated device.

What needs a vendor's driver is listed here by name (`NEEDS_A_DRIVER`), printed, and left out of the shares.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import mmap
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
RUNTIME: Final = "smpkit/torch"
FILES: Final = (
    "core/devices/__init__.py",
    "core/devices/backends.py",
    "offload/accelerator.py",
    "offload/link.py",
    "offload/engine.py",
    "offload/hooks.py",
    "offload/prefetch.py",
    "offload/arena.py",
    "offload/saved_storage.py",
    "pipeline/transport.py",
    "pipeline/channels.py",
    "pipeline/message_order.py",
    "data_parallel/reducer.py",
    "offload_model/counted_link.py",
)
NEEDS_A_DRIVER: Final[dict[str, tuple[str, ...]]] = {
    "core/devices/__init__.py": (
        "_clear_last_error",
        "_register_with_cuda",
        "cannot_use_cuda",
        "host_registration: runtime = module.cudart()",
        "host_registration: return HostRegistration(lambda *memory: _register_with_cuda(",
    ),
    "core/devices/backends.py": (
        "nccl_version",
        "channel_options: options",
        "channel_options: return options",
        # Variables of nccl.
        "prepare: handling",
        "prepare: if launcher",
        "prepare: del os.environ[handling]",
        "prepare: if 'NCCL_ASYNC_ERROR_HANDLING'",
        "prepare: os.environ.setdefault(",
        "prepare: if os.environ.get(SHARED_GPU_NCCL)",
    ),
}
"""Functions, or `function: how a statement begins`, that only CUDA, nccl or another vendor's library can run."""
_BYTES: Final = 1 << 16
_PROBE: Final = "_sim_coverage_hit"
_HITS: Final = "SIM_COVERAGE_HITS"


@dataclass(frozen=True)
class Line:
    """A line of a function, where a statement begins.

    Attributes:
        number: of the line.
        function: the qualified name of the function around it.
        text: of the statement, as `ast.unparse` writes it, its first line.
    """

    number: int
    function: str
    text: str


# --- the lines and their probes ---------------------------------------------------------------------------------------


class _Prober(ast.NodeTransformer):
    """Collects the statements of functions, and puts a probe before each."""

    def __init__(self, first: int) -> None:
        self.lines: list[Line] = []
        self._first = first
        self._names: list[str] = []
        self._depth = 0

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._inside(node, 0)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._inside(node, 1)

    def _inside(self, node: ast.ClassDef | ast.FunctionDef, is_function: int) -> ast.AST:
        self._names.append(node.name)
        self._depth += is_function
        node.body = self._probed(node.body)
        self._depth -= is_function
        self._names.pop()
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and all(isinstance(each, ast.stmt) for each in value):
                setattr(node, name, self._probed(value))
            elif isinstance(value, list):
                for each in value:
                    if isinstance(each, (ast.ExceptHandler, ast.match_case)):
                        self.generic_visit(each)
        return node

    def _probed(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for each in statements:
            is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            if self._depth and not is_text and not isinstance(each, (ast.Global, ast.Nonlocal)):
                call = ast.parse(f"{_PROBE}({self._first + len(self.lines)})").body[0]
                for part in ast.walk(call):
                    ast.copy_location(part, each)
                found.append(call)
                text = ast.unparse(each).splitlines()[0]
                self.lines.append(Line(each.lineno, ".".join(self._names), text))
            found.append(self.visit(each))
        return found


def _all_lines() -> Iterator[tuple[str, int, ast.Module, list[Line]]]:
    """Yield each file with the number of its first line's probe, its code with probes, and its lines."""
    first = 0
    for file in FILES:
        prober = _Prober(first)
        tree = ast.fix_missing_locations(prober.visit(ast.parse((ROOT / RUNTIME / file).read_text())))
        yield file, first, tree, prober.lines
        first += len(prober.lines)
    assert first <= _BYTES


# --- in each process of the run ---------------------------------------------------------------------------------------


def install() -> None:
    """Put probes into the files when this process, or a fork of it, imports them; `sitecustomize` calls this."""
    path = os.environ.get(_HITS)
    if path is None:
        return
    with Path(path).open("r+b") as file:
        hits = mmap.mmap(file.fileno(), _BYTES)

    def hit(number: int) -> None:
        if not hits[number] and _has_device():
            hits[number] = 1

    sys.meta_path.insert(0, _Finder(hit))


def _has_device() -> bool:
    name: str = sys.modules["torch"]._C._get_privateuse1_backend_name()
    return name == "sim"


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, hit: Any) -> None:
        self._hit = hit
        self._known: dict[str, tuple[str, ast.Module]] = {}

    def find_spec(self, fullname: str, *_others: object) -> importlib.machinery.ModuleSpec | None:
        """Return how a file with probes is loaded; None for all others."""
        if not fullname.startswith(RUNTIME.replace("/", ".")):
            return None
        if not self._known:
            for file, _, tree, _ in _all_lines():
                name = f"{RUNTIME}/{file}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                self._known[name] = (str(ROOT / RUNTIME / file), tree)
        if fullname not in self._known:
            return None
        file, tree = self._known[fullname]
        loader = _Loader(fullname, file, tree, self._hit)
        folders = [str(Path(file).parent)] if file.endswith("__init__.py") else None
        return importlib.util.spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=folders)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, tree: ast.Module, hit: Any) -> None:
        super().__init__(name, path)
        self._tree, self._hit = tree, hit

    def get_code(self, *_: object) -> types.CodeType:
        """Return the code with probes, which never becomes a `.pyc`."""
        return compile(self._tree, self.path, "exec")

    def exec_module(self, module: types.ModuleType) -> None:
        """Give the module what its probes call."""
        setattr(module, _PROBE, self._hit)
        super().exec_module(module)


# --- the run and its result -------------------------------------------------------------------------------------------


def main() -> int:
    """Do what the command line says; return pytest's status."""
    parser = argparse.ArgumentParser(prog="scripts/sim_coverage", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--keep", type=Path, metavar="FILE", help="what was reached is kept there, and added to")
    parser.add_argument("--report", action="store_true", help="run nothing; print what --keep's FILE has")
    parser.add_argument("tests", nargs=argparse.REMAINDER, help="given to pytest, as are options; default: tests/sim")
    arguments = parser.parse_args()
    if arguments.report and arguments.keep is None:
        parser.error("--report needs --keep FILE")
    with tempfile.TemporaryDirectory() as folder:
        kept: Path = (arguments.keep or Path(folder, "hits")).resolve()
        if not kept.exists():
            kept.write_bytes(bytes(_BYTES))
        status = 0 if arguments.report else _run(arguments.tests or ["tests/sim"], folder, kept)
        _print(kept.read_bytes())
    return status


def _run(tests: Sequence[str], folder: str, hits: Path) -> int:
    Path(folder, "sitecustomize.py").write_text("from scripts.sim_coverage import install\n\ninstall()\n")
    path = os.pathsep.join([folder, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow and not docker", *tests]
    environment = {**os.environ, "PYTHONPATH": path, _HITS: str(hits)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _print(hits: bytes) -> None:
    reached = total = 0
    gaps = []
    for file, first, _, lines in _all_lines():
        counted = [(line, hits[first + index]) for index, line in enumerate(lines) if not _needs_a_driver(file, line)]
        number = sum(1 for _, hit in counted if hit)
        reached, total = reached + number, total + len(counted)
        left_out = f", and {len(lines) - len(counted)} that need a driver" if len(lines) > len(counted) else ""
        print(f"{100 * number / len(counted):6.1f} % of {len(counted):3} lines  {file}{left_out}")
        gaps += [f"{RUNTIME}/{file}:{line.number}: {line.function}: {line.text}" for line, hit in counted if not hit]
    print(f"{100 * reached / total:6.1f} % of {total:3} lines\n\nNot reached:", *gaps, sep="\n")


def _needs_a_driver(file: str, line: Line) -> bool:
    return any(
        f"{line.function}: {line.text}".startswith(name if ": " in name else f"{name}: ")
        for name in NEEDS_A_DRIVER.get(file, ())
    )


if __name__ == "__main__":
    sys.exit(main())
