"""`smpkit validate`: every problem of a job file at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smpkit.cli import _console
from smpkit.cli.options import job_arguments
from smpkit.config.words import printable
from smpkit.errors import ConfigError, Problem

if TYPE_CHECKING:
    from smpkit.config.job import JobConfig
    from smpkit.config.load import Loaded

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
        click.echo(json.dumps({"valid": False, "problems": [*map(_plain, error.problems)], "warnings": []}, indent=2))
        return error.exit_code
    settings = [
        {"key": Problem(path, "").where, "value": value, "origin": origin} for path, value, origin in loaded.settings()
    ]
    if as_json:
        result = {"valid": True, "kind": loaded.kind, "problems": [], "warnings": [*map(_plain, loaded.notices)]}
        click.echo(json.dumps({**result, **({"settings": settings} if show_origin else {})}, indent=2))
        return 0
    console = _console.current()
    written = sum(origin != "default" for origin in loaded.origins.values())
    console.detail(f"read as a {loaded.kind_name}: {written} settings given, {len(loaded.origins) - written} defaults")
    for notice in loaded.notices:
        console.warn(notice)
    for setting in settings if show_origin else ():
        click.echo(printable(f"{setting['key']} = {json.dumps(setting['value'])}  ({setting['origin']})"))
    console.note(f"{printable(str(loaded.path))}: {_console.style('valid', 'green')} ({_summary(loaded)})")
    return 0


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


def _plain(problem: Problem) -> dict[str, Any]:
    return {
        "file": problem.source or None,
        "line": problem.line,
        "column": problem.column,
        "path": problem.where,
        "message": problem.message,
        "hint": problem.hint,
    }
