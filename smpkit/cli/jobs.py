"""`smpkit jobs`: the managed jobs of an account and region."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from smpkit.cli import _console
from smpkit.cli._cloud import CloudChoice, cloud_options
from smpkit.cli._time import LENGTH

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["jobs"]

_STATUSES = ("InProgress", "Completed", "Failed", "Stopping", "Stopped")


@click.command()
@click.option("--status", type=click.Choice(_STATUSES, case_sensitive=False), help="Only jobs in this state.")
@click.option("--name", metavar="TEXT", help="Only jobs with this text in their name.")
@click.option("--since", type=LENGTH, metavar="LENGTH", help="Only jobs created in the last `30m`, `12h`, `7d`.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=20, show_default=True, help="At most so many.")
@click.option("--json", "as_json", is_flag=True, help="Print the jobs as JSON.")
@cloud_options
def jobs(
    status: str | None, name: str | None, since: timedelta | None, limit: int, as_json: bool, cloud: CloudChoice
) -> None:
    """List managed jobs, newest first."""
    opened = cloud.open()
    filters: dict[str, Any] = {"MaxResults": min(limit, 100)}
    if status is not None:
        filters["StatusEquals"] = status
    if name is not None:
        filters["NameContains"] = name
    if since is not None:
        filters["CreationTimeAfter"] = opened.clock.now() - since
    found = list(itertools.islice(opened.jobs(**filters), limit))
    if as_json:
        click.echo(json.dumps([_plain(item) for item in found], indent=2))
    elif found:
        _table(found)
    else:
        _console.current().note(f"no such jobs in {opened.region}")


def _plain(item: Mapping[str, Any]) -> dict[str, Any]:
    end = item.get("TrainingEndTime")
    return {
        "name": item["TrainingJobName"],
        "arn": item["TrainingJobArn"],
        "status": item["TrainingJobStatus"],
        "phase": item.get("SecondaryStatus"),
        "created": item["CreationTime"].isoformat(),
        "ended": end.isoformat() if end is not None else None,
    }


def _table(found: list[dict[str, Any]]) -> None:
    from smpkit.cli._show import local_time

    width = max(len(item["TrainingJobName"]) for item in found)
    for item in found:
        state = item["TrainingJobStatus"]
        phase = item.get("SecondaryStatus", state)
        shown = phase if state in ("InProgress", phase) else f"{state} ({phase})"
        click.echo(f"{item['TrainingJobName']:{width}}  {local_time(item['CreationTime'])}  {shown}")
