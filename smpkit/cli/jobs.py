"""`smpkit jobs`: the managed jobs of an account and region, or of a cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from smpkit.cli import _console
from smpkit.cli.options import BackendChoice, backend_options, length

if TYPE_CHECKING:
    from datetime import timedelta

    from smpkit_estimator.status import JobStatus

_STATUSES = ("InProgress", "Completed", "Failed", "Stopping", "Stopped")


@click.command()
@click.option("--status", type=click.Choice(_STATUSES, case_sensitive=False), help="Only jobs in this state.")
@click.option("--name", metavar="TEXT", help="Only jobs with this text in their name.")
@click.option("--since", type=length, metavar="LENGTH", help="Only jobs created in the last `30m`, `12h`, `7d`.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Show at most N.")
@click.option("--json", "as_json", is_flag=True, help="Print the jobs as JSON.")
@backend_options
def jobs(
    status: str | None, name: str | None, since: timedelta | None, limit: int, as_json: bool, chosen: BackendChoice
) -> None:
    """List managed jobs, newest first."""
    from smpkit_estimator.backend import Query

    opened = chosen.open()
    listed = list(opened.list(Query(status, name, since, limit)))
    if as_json:
        click.echo(json.dumps([_plain(item) for item in listed], indent=2))
        return
    if not listed:
        _console.current().note(f"no such jobs on {opened.title}")
    width = max((len(item.name) for item in listed), default=0)
    for item in listed:
        shown = item.phase if item.status in ("InProgress", item.phase) else f"{item.status} ({item.phase})"
        click.echo(f"{item.name:{width}}  {item.created.astimezone():%Y-%m-%d %H:%M}  {shown}")


def _plain(item: JobStatus) -> dict[str, Any]:
    return {
        "name": item.name,
        "arn": item.arn,
        "status": item.status,
        "phase": item.phase,
        "created": item.created.isoformat(),
        "ended": item.ended.isoformat() if item.ended is not None else None,
    }
