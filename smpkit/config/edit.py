"""Change values of a YAML or JSON configuration in its text: everything else, comments too, stays as it is.

The text is composed into nodes with their places. A value that is there is replaced in its place; a new one is written
after the last one of its mapping, indented alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smpkit.config.documents import parse_yaml, read_document
from smpkit.config.section import KeyPath
from smpkit.errors import UsageError

__all__ = ["edited", "file_of_parameters"]


def edited(text: str, name: str, path: KeyPath, values: Mapping[str, Any], remove: frozenset[str] = frozenset()) -> str:
    """Return the text in which the mapping at `path` has `values`, and none of the keys in `remove`.

    Args:
        name: what messages call the text; it is JSON if this ends with `.json`.

    Raises:
        ConfigError: the text cannot be read.
        UsageError: it has something else than a mapping there, or says it in a way that cannot be changed in place.
    """
    if name.lower().endswith(".json"):
        return _edited_json(text, name, path, values, remove)
    for key in remove:
        text = _without(text, name, (*path, key))
    for key, value in values.items():
        text = _with(text, name, (*path, key), value)
    return text


def file_of_parameters(file: Path) -> tuple[Path, KeyPath]:
    """Return the file that holds the modelparallel parameters of a job, a distribution or parameters, and where.

    The path is that of the short form if the file has it.
    """
    value = read_document(file).value
    if not isinstance(value, dict):
        return file, ()
    if "entry_point" in value or "distribution" in value:
        root: KeyPath = ("distribution",)
        value = value.get("distribution") or {}
    elif "smdistributed" in value or "parameters" in value:
        root = ()
    else:
        return file, ()
    short = isinstance(value, dict) and "parameters" in value
    path: KeyPath = (*root, "parameters") if short else (*root, "smdistributed", "modelparallel", "parameters")
    for part in path[len(root) :]:
        value = value.get(part) if isinstance(value, dict) else None
    return (file.parent / value, ()) if isinstance(value, str) else (file, path)


def _edited_json(text: str, name: str, path: KeyPath, values: Mapping[str, Any], remove: frozenset[str]) -> str:
    parse_yaml(text, name)  # refuses what is no document; JSON is YAML
    whole = json.loads(text)
    target = whole
    for part in path:
        target = target.setdefault(str(part), {})
        if not isinstance(target, dict):
            raise UsageError(f"`{name}` has no mapping at `{'.'.join(map(str, path))}`")
    for key in remove:
        target.pop(key, None)
    target.update(values)
    second = text.split("\n", 2)[1] if "\n" in text else ""
    indent = len(second) - len(second.lstrip(" "))
    return json.dumps(whole, indent=indent or None, ensure_ascii=False) + "\n" * text.endswith("\n")


# --- YAML -------------------------------------------------------------------------------------------------------------


def _compose(text: str, name: str) -> Any:
    import yaml

    parse_yaml(text, name)
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _pair(node: Any, key: str) -> tuple[Any, Any] | None:
    return next(((one, other) for one, other in node.value if one.value == key), None)


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) or not value.isidentifier() else value


def _with(text: str, name: str, path: KeyPath, value: Any) -> str:
    node = _compose(text, name)
    if node is None:
        return text + _block(path, value, "")
    for depth, part in enumerate(path):
        if node.id != "mapping":
            raise UsageError(f"`{name}` has no mapping at `{'.'.join(map(str, path[:depth]))}`")
        pair = _pair(node, str(part))
        if pair is None:
            return _inserted(text, node, path[depth:], value)
        if _is_alias(text, pair):
            where = ".".join(map(str, path[: depth + 1]))
            raise UsageError(f"`{name}` repeats another value at `{where}`", hint="write it out, then try again")
        node = pair[1]
    if node.id == "scalar" and not node.value and node.start_mark.index == node.end_mark.index:
        return text[: node.start_mark.index] + f" {_scalar(value)}" + text[node.end_mark.index :]
    return text[: node.start_mark.index] + _scalar(value) + text[node.end_mark.index :]


def _is_alias(text: str, pair: tuple[Any, Any]) -> bool:
    """Return whether the value is written elsewhere, so that its place is not behind its key."""
    after = text[pair[0].end_mark.index :].split("\n", 1)[0].lstrip(": ")
    return after.startswith("*")


def _inserted(text: str, mapping: Any, path: KeyPath, value: Any) -> str:
    if mapping.flow_style:
        end = mapping.end_mark.index - 1
        before = text[mapping.start_mark.index + 1 : end]
        separator = ", " if before.strip().rstrip(",") else ""
        return text[: mapping.start_mark.index + 1] + before.rstrip() + separator + _flow(path, value) + text[end:]
    if not mapping.value:
        raise UsageError("an empty block cannot be extended", hint="remove its key, then try again")
    last_key, last = mapping.value[-1]
    indent = " " * mapping.value[0][0].start_mark.column
    end = last.end_mark.index if last.id == "scalar" or last.flow_style else _end_of_block(text, last)
    end = max(end, last_key.end_mark.index)
    line_end = text.find("\n", end)
    if line_end < 0:
        return f"{text}\n{_block(path, value, indent)}"
    return text[: line_end + 1] + _block(path, value, indent) + text[line_end + 1 :]


def _end_of_block(text: str, node: Any) -> int:
    """Return where the last value in a block ends: its own mark lies behind the comments that follow."""
    while node.id != "scalar" and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if node.id == "mapping" else last
    return int(node.end_mark.index) if node.id == "scalar" or node.flow_style else len(text)


def _block(path: KeyPath, value: Any, indent: str) -> str:
    lines = [f"{indent}{'  ' * depth}{part}:" for depth, part in enumerate(path)]
    lines[-1] += f" {_scalar(value)}"
    return "\n".join(lines) + "\n"


def _flow(path: KeyPath, value: Any) -> str:
    return "".join(f"{part}: {{" for part in path[:-1]) + f"{path[-1]}: {_scalar(value)}" + "}" * (len(path) - 1)


def _without(text: str, name: str, path: KeyPath) -> str:
    node = _compose(text, name)
    for part in path[:-1]:
        pair = _pair(node, str(part)) if node is not None and node.id == "mapping" else None
        if pair is None:
            return text
        node = pair[1]
    pair = _pair(node, str(path[-1])) if node is not None and node.id == "mapping" else None
    if pair is None:
        return text
    start, end = pair[0].start_mark.index, pair[1].end_mark.index
    if node.flow_style:
        after = text[end:]
        stripped = after.lstrip()
        if stripped.startswith(","):
            return text[:start] + stripped[1:].lstrip()
        before = text[:start].rstrip()
        return before.removesuffix(",") + after
    line_start, line_end = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    return text[:line_start] + (text[line_end + 1 :] if line_end >= 0 else "")
