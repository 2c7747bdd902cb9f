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
    from smpkit.config.load import Loaded, Override


@click.command()
@job_arguments
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--show-origin", is_flag=True, help="Print every setting and where its value came from.")
def validate(file: Path, overrides: list[Override], as_json: bool, show_origin: bool) -> int:
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
        _console.print_json({"valid": False, "problems": [*map(_plain, error.problems)], "warnings": []})
        return error.exit_code
    settings = [
        {"key": Problem(path, "").where, "value": value, "origin": origin} for path, value, origin in loaded.settings()
    ]
    if as_json:
        result = {"valid": True, "kind": loaded.kind, "problems": [], "warnings": [*map(_plain, loaded.notices)]}
        _console.print_json({**result, **({"settings": settings} if show_origin else {})})
        return 0
    written = sum(origin != "default" for origin in loaded.origins.values())
    _console.detail(f"read as a {loaded.kind_name}: {written} settings given, {len(loaded.origins) - written} defaults")
    for notice in loaded.notices:
        _console.warn(notice)
    for setting in settings if show_origin else ():
        click.echo(printable(f"{setting['key']} = {json.dumps(setting['value'])}  ({setting['origin']})"))
    _console.note(f"{printable(str(loaded.path))}: {_console.style('valid', 'green')} ({_summary(loaded)})")
    return 0


def _summary(loaded: Loaded) -> str:
    from smpkit.config.load import LoadedJob

    if not isinstance(loaded, LoadedJob):
        return loaded.kind_name
    job = loaded.config
    hosts, per_host = job.compute.instance_count, job.distribution.processes_per_host
    size = f"{hosts} × {per_host} processes" if per_host else "1 host" if hosts == 1 else f"{hosts} hosts"
    return f"job `{job.name}`: {size}, {job.distribution.degrees(per_host and hosts * per_host)}"


def _plain(problem: Problem) -> dict[str, Any]:
    return {
        "file": problem.source or None,
        "line": problem.line,
        "column": problem.column,
        "path": problem.where,
        "message": problem.message,
        "hint": problem.hint,
    }
