"""The names that modules of ours have, read from their sources: `__all__` and the top level. Nothing is imported.

Importing would take torch, which the command line does without.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

__all__ = ["file_of", "modules_in", "names_of", "resolve"]

_PACKAGES: Final = Path(__file__).parents[2]


def file_of(name: str, folders: Sequence[Path]) -> list[Path]:
    """Return the file of a module below one of the folders, or nothing."""
    for folder in folders:
        place = folder.joinpath(*name.split("."))
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file():
                return [file]
    return []


def resolve(full: str, folder: Path) -> tuple[Path, str | None, str | None]:
    """Return the module that holds a name, the name in it (None for the module), and why it cannot be imported."""
    place, file = folder, folder
    for part in full.split("."):
        found = file_of(part, [place])
        if not found and not (place / part).is_dir():
            return file, part, None
        place = place / part
        file = found[0] if found else file
        if found and (why := _refusal(file)) is not None:
            return file, None, why
    return file, None, None


@functools.cache
def names_of(file: Path) -> frozenset[str]:
    """Return the names that a module of ours has, as its source says.

    Args:
        file: of the module; a folder, which stands for a package without a source, has none.
    """
    return frozenset(_names_in(ast.parse(file.read_bytes()))) if file.is_file() else frozenset()


def modules_in(file: Path) -> set[str]:
    """Return the names of the modules beside the source of a package."""
    folder = file.parent if file.name == "__init__.py" else file
    return {each.stem for each in folder.iterdir()} if folder.is_dir() else set()


def _refusal(file: Path) -> str | None:
    """Return the message with which a module of ours refuses to be imported, or None."""
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            return str(ast.literal_eval(node.exc.args[0]))
    return None


def _names_in(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for each in node.names:
                yield (each.asname or each.name).partition(".")[0]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
            yield from _names_from(node.value, targets)


def _names_from(value: ast.expr | None, targets: Sequence[ast.expr]) -> Iterator[str]:
    """Yield names that an assignment says: in a list of `__all__`, or of another module that is mirrored."""
    if value is None or "__all__" not in ast.unparse(ast.Tuple(list(targets))):
        return
    if isinstance(value, ast.List):
        yield from ast.literal_eval(value)
    for each in ast.walk(value):
        source: str | None = None
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "mirror":
            source = str(ast.literal_eval(each.args[0]))
        elif isinstance(each, ast.Attribute) and each.attr == "__all__":
            source = ast.unparse(each.value)
        if source is not None:
            for file in file_of(source, [_PACKAGES]):
                yield from names_of(file)
