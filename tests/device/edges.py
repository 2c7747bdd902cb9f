"""Every synchronisation in the runtime, found in its source, and how to leave one out in this process.

An *edge* is an expression by which the runtime orders work of a device, the host and other ranks, or keeps memory until
such work has ended. It is known by the name of what is called, so that a new one is found without being listed
anywhere. `leave_out` replaces the code of the function around it, in a process that has imported the runtime already.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import types
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
RUNTIME: Final = "smpkit/torch"
ELSEWHERE: Final = {
    "smpkit/torch/distributed/": "messages of hosts, which have no streams: tests/faults.yaml",
    "smpkit/torch/checkpoints/agreement.py": "messages of hosts: tests/torch/checkpoints/test_scale.py",
    "smpkit/torch/recording/": "times and sizes, on which no value depends: tests/torch/recording",
    "smpkit/torch/describe.py": "writes to a terminal",
    "smpkit/torch/run_summary.py": "what ranks of hosts tell each other at the end, by a store",
}
"""Where calls of these names order something else."""

_DROPPED = {"_order_after", "order_after", "before_reuse", "end_previous_save", "finish_previous_save", "flush"}
_DROPPED |= {"post", "record_stream", "synchronize", "wait_event", "wait_stream"}
"""Calls that are left out whole, as all are that begin with `wait_for_`."""
_LAST: Final = "last_read"
"""The attribute with the event that comes before host memory is used again."""
_COPIES: Final = {"_copy", "fetch", "send"}
"""Calls of the offload engines whose last argument has the events that a copy waits for."""
_DONE: Final = "__import__('smpkit.torch.offload.link', fromlist=['DONE']).DONE"


@dataclass(frozen=True)
class Edge:
    """One synchronisation.

    Attributes:
        id: the file, the function and the expression; a number tells equal ones apart.
        path: of the file.
        function: its outermost function, by its qualified name.
        index: its place in `_Finder.found`.
        replacement: the expression without the synchronisation.
    """

    id: str
    path: str
    function: str
    index: int
    replacement: str


def edges() -> list[Edge]:
    """Return all edges of the runtime."""
    found = []
    for path in sorted((ROOT / RUNTIME).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if not any(name.startswith(each) for each in ELSEWHERE):
            found += _edges_of(name)
    return found


def _edges_of(path: str) -> list[Edge]:
    names = Counter[str]()
    found = []
    for index, (node, function, replacement) in enumerate(_find(path, _tree(path))):
        text = " ".join(ast.unparse(node).split())
        name = f"{path.removeprefix(RUNTIME + '/')}:{function}: {text}"
        names[name] += 1
        number = f" ({names[name]})" if names[name] > 1 else ""
        found.append(Edge(name + number, path, function, index, replacement))
    return found


def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def _find(path: str, tree: ast.Module) -> list[tuple[ast.expr, str, str]]:
    """Return the expressions to replace, the function of each, and what replaces it."""
    finder = _Finder(path)
    finder.visit(tree)
    return finder.found


class _Finder(ast.NodeVisitor):
    """Collects expressions to replace, in the order of the source."""

    def __init__(self, path: str) -> None:
        self.found: list[tuple[ast.expr, str, str]] = []
        self._path = path
        self._is_offload = path.startswith(f"{RUNTIME}/offload")  # elsewhere `after` is any name
        self._names: list[str] = []
        self._depth = 0

    def _add(self, node: ast.expr, replacement: str) -> None:
        if self._depth and all(node is not each for each, _, _ in self.found):
            self.found.append((node, ".".join(self._names), replacement))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        is_outermost = not self._depth
        self._depth += 1
        if is_outermost:
            self._names.append(node.name)
        for each in node.body:
            self.visit(each)
        if is_outermost:
            self._names.pop()
        self._depth -= 1

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Call):
            name, receiver = _callee(call)
            keeps = name == "append" and self._is_offload and receiver == "after"
            joins = name == "join" and "checkpoints/" in self._path
            if keeps or joins or (name in ("wait", "result") and not receiver.endswith("link")):
                self._add(call, "None")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, receiver = _callee(node)
        if name in _DROPPED or name.lstrip("_").startswith("wait_for_"):
            # What else is called so: a method of any object, and waits of the host for its own threads.
            others = "pipeline/" not in self._path if name in ("post", "flush") else receiver == "self._changed"
            if not others:
                self._add(node, "None")
        elif name == "wait" and receiver.endswith("link"):
            self._add(node.args[0], _DONE)
        elif name == "on_stream":
            self._add(node.args[0], "None")
        elif name == "record_event" and not node.keywords:
            self._add(node, "None")
        elif self._is_offload and name in _COPIES and node.args:
            self._add_all(node.args[-1])
        elif name == "finalize" and ast.unparse(node.args[1]).endswith(("before_free", "finish")):
            self._add(node.args[1], "(lambda: None)")
        elif name == "copy_" and isinstance(node.func, ast.Attribute) and _is_pinned(node.func.value):
            self._add(node, ast.unparse(node.args[0]))  # a copy in memory of our own
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        target, value = node.targets[0], node.value
        if self._is_offload and ast.unparse(target) == "after":
            self._add_all(value)
            if not isinstance(value, ast.Tuple):
                self._add(value, "[]")
        elif self._is_offload and isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, element in zip(target.elts, value.elts, strict=True):
                if isinstance(each, ast.Attribute) and each.attr == _LAST:
                    self._add(element, _DONE)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == _LAST and isinstance(node.ctx, ast.Load):
            self._add(node, _DONE)
        self.generic_visit(node)

    def _add_all(self, node: ast.expr) -> None:
        """Add the events of a list that is written out."""
        for each in node.elts if isinstance(node, (ast.List, ast.Tuple)) else []:
            self._add(each, _DONE)


def _callee(call: ast.Call) -> tuple[str, str]:
    """Return the name of what is called, and of what it is an attribute."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr, ast.unparse(call.func.value)
    return (call.func.id, "") if isinstance(call.func, ast.Name) else ("", "")


def _is_pinned(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and any(each.arg == "pin_memory" for each in node.keywords)


# --- changing the code of a process -----------------------------------------------------------------------------------


class _Replacer(ast.NodeTransformer):
    def __init__(self, replacements: dict[int, ast.expr]) -> None:
        self._replacements = replacements

    def visit(self, node: ast.AST) -> Any:
        known = self._replacements.pop(id(node), None)
        if known is None:
            return self.generic_visit(node)
        if isinstance(known, ast.BoolOp):  # what `watch` makes contains the node itself
            self.generic_visit(node)
        return ast.copy_location(known, node)


def leave_out(edge: Edge) -> None:
    """Leave out an edge in this process, for good."""
    tree = _tree(edge.path)
    node = _find(edge.path, tree)[edge.index][0]
    _apply(edge.path, tree, {id(node): _expression(edge.replacement)}, {edge.function})


def watch(found: list[Edge]) -> set[str]:
    """Return a set to which edges add their ids when this process comes to them."""
    hits: set[str] = set()
    builtins.__dict__["_smpkit_hit"] = hits.add
    by_path = defaultdict[str, list[Edge]](list)
    for edge in found:
        by_path[edge.path].append(edge)
    for path, of_path in by_path.items():
        tree = _tree(path)
        nodes = _find(path, tree)
        replacements: dict[int, ast.expr] = {}
        for edge in of_path:
            node = nodes[edge.index][0]
            # `add` returns None, so the value is that of the node.
            replacements[id(node)] = ast.BoolOp(ast.Or(), [_expression(f"_smpkit_hit({edge.id!r})"), node])
        _apply(path, tree, replacements, {edge.function for edge in of_path})
    return hits


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _apply(path: str, tree: ast.Module, replacements: dict[int, ast.expr], functions: set[str]) -> None:
    module = importlib.import_module(path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
    changed = ast.fix_missing_locations(_Replacer(replacements).visit(tree))
    code = compile(changed, str(ROOT / path), "exec")
    for name in functions:
        _function(module, name).__code__ = _code(code, name)


def _function(module: types.ModuleType, name: str) -> types.FunctionType:
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    while not isinstance(found, types.FunctionType) or hasattr(found, "__wrapped__"):
        inside = {property: "fget", functools.cached_property: "func"}.get(type(found), "__wrapped__")
        found = getattr(found, inside)
    return found


def _code(code: types.CodeType, name: str) -> types.CodeType:
    for part in name.split("."):
        code = next(each for each in code.co_consts if isinstance(each, types.CodeType) and each.co_name == part)
    return code
