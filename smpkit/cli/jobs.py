"""`smpkit jobs`: the managed jobs of an account and region, or of a cluster."""

from __future__ import annotations

from datetime import timedelta

import click

from smpkit.cli import _console
from smpkit.cli.options import BackendChoice, backend_options, length

_SHOWN = ("name", "arn", "status", "phase", "created", "ended")
"""What lists of jobs know of each."""
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
        _console.print_json([{name: getattr(item, name) for name in _SHOWN} for item in listed])
        return
    if not listed:
        _console.note(f"no such jobs on {opened.title}")
    width = max((len(item.name) for item in listed), default=0)
    for item in listed:
        shown = item.phase if item.status in ("InProgress", item.phase) else f"{item.status} ({item.phase})"
        click.echo(f"{item.name:{width}}  {item.created.astimezone():%Y-%m-%d %H:%M}  {shown}")
