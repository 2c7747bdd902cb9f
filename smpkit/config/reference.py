"""Write the reference of the configuration from the models: `python -m smpkit.config.reference [--check] [FILE]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from smpkit.config.load import ENVIRONMENT_PREFIX
from smpkit.config.schema import json_schema

__all__ = ["DEFAULT_PATH", "main", "reference"]

DEFAULT_PATH = Path("docs/reference/configuration.md")

_INTRODUCTION = f"""\
<!-- Written by `python -m smpkit.config.reference`. Change the docstrings in smpkit/config instead of this file. -->

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

Where a value comes from, the later winning: the default, the file, a variable of the environment, `--set`. The variable
`{ENVIRONMENT_PREFIX}COMPUTE__INSTANCE_COUNT=2` means `--set compute.instance_count=2`; both read their values as YAML.
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file, or with `--check` only say whether it is up to date."""
    module = "smpkit.config.reference"
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Write the page from the code.")
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT_PATH, help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is stale")
    options = parser.parse_args(arguments)
    text = reference()
    if not options.check:
        options.file.parent.mkdir(parents=True, exist_ok=True)
        options.file.write_text(text, encoding="utf-8")
        return 0
    if options.file.is_file() and options.file.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"error: {options.file} is stale\nhint: run `python -m {module}`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
