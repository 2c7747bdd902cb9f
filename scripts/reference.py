"""Write the sections of docs/reference/configuration.md from the models: `scripts/docs`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smpkit.config.schema import json_schema

PAGE = Path(__file__).parents[1] / "docs/reference/configuration.md"

_MARK = "<!-- What follows is written by `scripts/docs`: change the docstrings in smpkit/config instead. -->\n"

_TITLES: Mapping[str, str] = {
    "JobConfig": "The job file",
    "Compute": "`compute`",
    "Channel": "`inputs.<name>`",
    "FileSystem": "`inputs.<name>.file_system`",
    "Checkpoints": "`checkpoints`",
    "Network": "`network`",
    "Encryption": "`encryption`",
    "Container": "`container`",
    "Secret": "`secrets.<name>`",
    "Experiment": "`experiment`",
    "BackendChoice": "`backend`",
    "Slurm": "`backend.slurm`",
    "Kubernetes": "`backend.kubernetes`",
    "Volume": "`backend.kubernetes.volumes`",
    "Toleration": "`backend.kubernetes.tolerations`",
    "Batch": "`backend.batch`",
    "BatchVolume": "`backend.batch.volumes`",
    "Distribution": "`distribution`",
    "SmDistributed": "`distribution.smdistributed`",
    "ModelParallelBlock": "`distribution.smdistributed.modelparallel`",
    "MpiOptions": "`distribution.mpi`",
    "TorchDistributedOptions": "`distribution.torch_distributed`",
    "ModelParallelConfig": "`distribution.smdistributed.modelparallel.parameters`",
}
"""The sections in reading order; each model's name in the schema and its title."""


def reference() -> str:
    """Return the page as it has to be: its introduction, and what the models say."""
    introduction = PAGE.read_text(encoding="utf-8").partition(_MARK)[0]
    schema = json_schema("job")
    definitions = schema["$defs"] | {"JobConfig": schema}
    return introduction + _MARK + "".join(_section(title, definitions[name]) for name, title in _TITLES.items())


def _section(title: str, definition: Mapping[str, Any]) -> str:
    fields = definition if "properties" in definition else definition["anyOf"][-1]
    required = fields.get("required", ())
    lines = [f"\n## {title}\n\n{definition['description']}\n\n"]
    for name, field in fields["properties"].items():
        default = field.get("default")
        key = f"{name}: {_plain_value(default)}" if default not in (None, "") else name
        kind = _kind(field)
        obvious = default is not None and kind in ("integer", "boolean")
        shown = ", ".join(filter(None, ["" if obvious else kind, "required" if name in required else ""]))
        description = " ".join(field["description"].split())
        told = "" if "$ref" in field else f": {description}"  # the section that is linked says it
        lines.append(f"- `{key}`{f' *({shown})*' if shown else ''}{told}\n")
    return "".join(lines)


def _kind(field: Mapping[str, Any]) -> str:
    """Say in words what values a field takes; nothing of a text."""
    if "anyOf" in field:
        kinds = [_kind(option) for option in field["anyOf"] if option.get("type") != "null"]
        return kinds[0] if len(kinds) == 1 else " or ".join(dict.fromkeys(kind or "text" for kind in kinds))
    if "$ref" in field:
        return _linked("mapping", field)
    if "enum" in field:
        *others, last = map(_value, field["enum"])
        return f"{', '.join(others)} or {last}"
    if "const" in field:
        return _value(field["const"])
    kind = field.get("type", "")
    if kind == "array":
        return _linked("list", field["items"])
    if kind == "object":
        return _linked("mapping", field["additionalProperties"])
    if kind == "integer" and "minimum" not in field:
        return "any integer"
    return ("" if kind == "string" else kind) + _bounds(field)


def _linked(kind: str, of: object) -> str:
    """Return the kind, as a link to the section on what is in it."""
    options = of.get("anyOf", [of]) if isinstance(of, Mapping) else []
    names = [option["$ref"].rpartition("/")[2] for option in options if "$ref" in option]
    title = next((_TITLES[name] for name in names if name in _TITLES), None)
    return f"[{kind}](#{re.sub('[^a-z_-]', '', title)})" if title else kind


def _bounds(field: Mapping[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    if low is None or (high is None and low == 1):
        return ""
    return f" ≥ {_plain(low)}" if high is None else f", {_plain(low)} to {_plain(high)}"


def _plain(number: float) -> str:
    return f"{number:g}" if number < 1e4 else f"{number:,.0f}".replace(",", " ")


def _value(value: object) -> str:
    return f"`{_plain_value(value)}`"


def _plain_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
