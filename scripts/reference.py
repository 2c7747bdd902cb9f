"""Write docs/reference/configuration.md from the models: `scripts/docs`; `scripts/docs --check` says if it is stale."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smpkit.config.schema import json_schema

__all__ = ["PAGE", "reference"]

PAGE = Path(__file__).parents[1] / "docs/reference/configuration.md"

_INTRODUCTION = """\
<!-- Written by `scripts/docs`. Change the docstrings in smpkit/config instead of this file. -->

# Configuration

A job file is YAML (1.2: `no` is text, `1e-3` is a number), or strict JSON if it is called `.json`. Only `entry_point`
is required:

```yaml
entry_point: train.py
distribution:
  smdistributed:
    modelparallel:
      enabled: true
      parameters:
        pipeline_parallel_degree: 2
        microbatches: 4
  torch_distributed:
    enabled: true
    processes_per_host: 4
```

`smpkit validate FILE` reports every problem at once. A file with nothing but the `distribution`, or nothing but the
`parameters`, can be checked too. `smpkit schema` prints what is below as JSON Schema.

Precedence, lowest first: the default, the file, `--set`, which reads its value as YAML.
`smpkit validate --show-origin FILE` tells which one it was. In a script, the keys of `SM_HP_MP_PARAMETERS` overwrite
those of the argument of `smp.init` one by one.
"""

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
    """Render the whole reference as Markdown."""
    schema = json_schema("job")
    definitions = schema["$defs"] | {"JobConfig": schema}
    sections = (_section(title, definitions[name], definitions) for name, title in _TITLES.items())
    return _INTRODUCTION + "".join(sections)


def _section(title: str, definition: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    fields = definition if "properties" in definition else definition["anyOf"][-1]
    required = fields.get("required", ())
    parts = [f"\n## {title}\n\n{definition['description']}\n"]
    for name, field in fields["properties"].items():
        facts = ", ".join(_facts(field, definitions, required=name in required))
        parts.append(f"\n### `{name}`\n\n*{facts}*\n\n{field['description']}\n")
    return "".join(parts)


def _facts(field: Mapping[str, Any], definitions: Mapping[str, Any], *, required: bool) -> Iterator[str]:
    yield _kind(field, definitions)
    if field.get("deprecated"):
        yield "of the past"
    if required:
        yield "required"
    elif field.get("default") not in (None, ""):
        yield f"default {_value(field['default'])}"


def _kind(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Say in words what values a field takes."""
    if "anyOf" in field:
        kinds = [_kind(option, definitions) for option in field["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in field:
        return "mapping"
    if "enum" in field:
        return " or ".join(map(_value, field["enum"]))
    if "const" in field:
        return _value(field["const"])
    return _KINDS.get(field.get("type", ""), "anything") + _bounds(field)


_KINDS = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "mapping",
    "array": "list",
}


def _bounds(field: Mapping[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None and high is not None:
        return f" from {_plain(low)} to {_plain(high)}"
    return f" of at least {_plain(low)}" if low is not None else ""


def _plain(number: float) -> str:
    return f"{number:g}" if number < 1e4 else f"{number:,.0f}".replace(",", " ")


def _value(value: object) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(reference(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != reference():
        sys.exit(f"error: {PAGE} is stale\nhint: run `scripts/docs`")
