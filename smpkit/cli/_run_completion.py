"""What the shell completes: names of runs, modelparallel parameters, and the hyperparameters of a job file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

__all__ = ["complete_hyperparameter", "complete_parameter", "complete_run"]


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Complete the name of a run, the newest first."""
    from smpkit.observe.runs import find_runs

    return [CompletionItem(run.label) for run in reversed(find_runs(Path.cwd())) if run.label.startswith(incomplete)]


def complete_parameter(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Complete `key=value` for a modelparallel parameter, from its schema."""
    from smpkit.config.modelparallel import ModelParallelConfig

    properties = ModelParallelConfig.model_json_schema()["properties"]
    name, equals, value = incomplete.partition("=")
    if not equals:
        return _items((f"{key}=" for key in properties), incomplete)
    return _items((f"{name}={choice}" for choice in _choices(properties.get(name, {}))), f"{name}={value}")


def complete_hyperparameter(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Complete `key=value` for a hyperparameter: the names in the job file, and the value that stands there."""
    import yaml

    try:
        content = yaml.safe_load(_job_file().read_text(encoding="utf-8"))
        known = dict(content["hyperparameters"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return []
    name, equals, _ = incomplete.partition("=")
    if not equals:
        return _items((f"{key}=" for key in known), incomplete)
    return _items([f"{name}={known[name]}"] if name in known else [], incomplete)


def _job_file() -> Path:
    """Return the job file on the command line so far; click's parser has given up at the option without a value."""
    words = os.environ.get("COMP_WORDS", "").split()
    files = (Path(word) for word in words if word.endswith((".yaml", ".yml", ".json")))
    return next((file for file in files if file.is_file()), Path())


def _items(texts: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(text) for text in texts if text.startswith(incomplete)]


def _choices(schema: object) -> list[str]:
    """Return the values that a parameter's schema names, wherever it does."""
    if not isinstance(schema, dict):
        return []
    found = [str(each) for each in schema.get("enum", [])]
    if schema.get("type") == "boolean":
        found += ["true", "false"]
    if "const" in schema:
        found.append(str(schema["const"]))
    for other in schema.get("anyOf", []):
        found += _choices(other)
    return list(dict.fromkeys(found))
