"""`smpkit validate`: every problem of a job file at once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smpkit.cli import _console
from smpkit.cli._job import job_arguments
from smpkit.errors import ConfigError, Problem

if TYPE_CHECKING:
    from smpkit.config.job import JobConfig
    from smpkit.config.load import Loaded
    from smpkit.config.section import KeyPath

__all__ = ["validate"]


@click.command()
@job_arguments
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--show-origin", is_flag=True, help="Print every setting and where its value came from.")
def validate(file: Path, overrides: tuple[str, ...], as_json: bool, show_origin: bool) -> int:
    """Check a job file and report every problem, with its line.

    FILE may also hold a distribution, or modelparallel parameters, alone. Settings come from the defaults, FILE, and
    `--set`; later ones win.
    """
    from smpkit.config.load import load

    try:
        loaded = load(file, overrides)
    except ConfigError as error:
        if not as_json:
            raise
        click.echo(_json(valid=False, problems=error.problems))
        return error.exit_code
    if as_json:
        origins = _settings(loaded) if show_origin else None
        click.echo(_json(valid=True, kind=loaded.kind, warnings=loaded.notices, settings=origins))
    else:
        _talk(loaded, show_origin)
    return 0


def _talk(loaded: Loaded, show_origin: bool) -> None:
    from smpkit.config.words import printable

    console = _console.current()
    written = sum(origin != "default" for origin in loaded.origins.values())
    console.detail(f"read as a {loaded.kind_name}: {written} settings given, {len(loaded.origins) - written} defaults")
    for notice in loaded.notices:
        console.warn(notice)
    if show_origin:
        for setting in _settings(loaded):
            click.echo(printable(f"{setting['key']} = {json.dumps(setting['value'])}  ({setting['origin']})"))
    console.note(f"{printable(str(loaded.path))}: {_console.style('valid', 'green')} ({_summary(loaded)})")


def _summary(loaded: Loaded) -> str:
    from smpkit.config.load import LoadedJob

    if not isinstance(loaded, LoadedJob):
        return loaded.kind_name
    return f"job `{loaded.config.name}`: {_processes(loaded.config)}"


def _processes(config: JobConfig) -> str:
    hosts, per_host = config.compute.instance_count, config.distribution.processes_per_host
    if per_host:
        size = f"{hosts} × {per_host} processes"
    else:
        size = "1 host" if hosts == 1 else f"{hosts} hosts"
    parameters = config.distribution.model_parallel
    if parameters is None:
        return f"{size}, no model parallelism"
    pipeline, tensor = parameters.pipeline_parallel_degree, parameters.tensor_parallel_degree
    degrees = f"{size}, pipeline {pipeline} × tensor {tensor}"
    return f"{degrees} × data {hosts * per_host // (pipeline * tensor)}" if per_host else degrees


def _settings(loaded: Loaded) -> list[dict[str, Any]]:
    values = loaded.config.model_dump()
    return [
        {"key": Problem(path, "").where, "value": _shown(path, _at(values, path)), "origin": origin}
        for path, origin in loaded.origins.items()
    ]


def _shown(path: KeyPath, value: Any) -> Any:
    """Keep what is probably a secret out of terminals and logs."""
    from smpkit.config.confidential import masked

    return masked(str(path[-1]), value) if path[0] in ("environment", "hyperparameters") else value


def _at(value: Any, path: Iterable[str | int]) -> Any:
    for part in path:
        value = value[part]
    return value


def _json(
    *,
    valid: bool,
    kind: str | None = None,
    problems: Iterable[Problem] = (),
    warnings: Iterable[Problem] = (),
    settings: list[dict[str, Any]] | None = None,
) -> str:
    result: dict[str, Any] = {"valid": valid}
    if kind is not None:
        result["kind"] = kind
    result["problems"] = [_plain(problem) for problem in problems]
    result["warnings"] = [_plain(warning) for warning in warnings]
    if settings is not None:
        result["settings"] = settings
    return json.dumps(result, indent=2)


def _plain(problem: Problem) -> dict[str, Any]:
    return {
        "file": problem.source or None,
        "line": problem.line,
        "column": problem.column,
        "path": problem.where,
        "message": problem.message,
        "hint": problem.hint,
    }
