"""`smpkit jobs`: the managed jobs of an account and region, of a cluster, or of all back ends together."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from smpkit.cli import _console
from smpkit.cli._backend import BackendChoice, backend_options
from smpkit.cli._time import LENGTH
from smpkit.errors import CloudError, SmpkitError

if TYPE_CHECKING:
    from datetime import timedelta

    from smpkit_estimator.backend import Query
    from smpkit_estimator.status import JobStatus

__all__ = ["jobs"]

_ALL = "all"
_STATUSES = ("InProgress", "Completed", "Failed", "Stopping", "Stopped")


@click.command()
@click.option("--status", type=click.Choice(_STATUSES, case_sensitive=False), help="Only jobs in this state.")
@click.option("--name", metavar="TEXT", help="Only jobs with this text in their name.")
@click.option("--since", type=LENGTH, metavar="LENGTH", help="Only jobs created in the last `30m`, `12h`, `7d`.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=20, show_default=True, help="At most so many.")
@click.option("--json", "as_json", is_flag=True, help="Print the jobs as JSON.")
@backend_options
def jobs(
    status: str | None, name: str | None, since: timedelta | None, limit: int, as_json: bool, chosen: BackendChoice
) -> None:
    """List managed jobs, newest first.

    `--backend all` lists those of every back end; which of them did not answer is said.
    """
    from smpkit_estimator.backend import Query

    query = Query(status, name, since, limit)
    if chosen.name == _ALL:
        _list_all(query, as_json=as_json)
        return
    opened = chosen.open()
    found = list(opened.list(query))
    if as_json:
        click.echo(json.dumps([_plain(item) for item in found], indent=2))
    elif found:
        _table(found)
    else:
        _console.current().note(f"no such jobs on {opened.title}")


def _list_all(query: Query, *, as_json: bool) -> None:
    """List the jobs of every back end that answers.

    Raises:
        CloudError: none does.
    """
    from smpkit_estimator.backend import Access, known_backends, open_backend

    found: list[tuple[str, JobStatus]] = []
    silent: dict[str, SmpkitError] = {}
    names = known_backends()
    for name in names:
        try:
            # A profile and a region mean something else to each of them.
            found += [(name, item) for item in open_backend(name, Access()).list(query)]
        except SmpkitError as error:  # noqa: PERF203 - asking takes longer
            silent[name] = error
    if len(silent) == len(names):
        last = next(iter(silent.values()))
        raise CloudError(f"no back end answered; {names[0]}: {last.message}", hint=last.hint)
    found.sort(key=lambda item: item[1].created, reverse=True)
    shown = found[: query.limit]
    for name, why in silent.items():
        _console.current().note(f"note: without those of `{name}`: {why.message}")
    if as_json:
        click.echo(json.dumps([{"backend": name, **_plain(item)} for name, item in shown], indent=2))
    elif shown:
        _table([item for _, item in shown], [name for name, _ in shown])
    else:
        _console.current().note("no such jobs")


def _plain(item: JobStatus) -> dict[str, Any]:
    return {
        "name": item.name,
        "arn": item.arn,
        "status": item.status,
        "phase": item.phase,
        "created": item.created.isoformat(),
        "ended": item.ended.isoformat() if item.ended is not None else None,
    }


def _table(found: list[JobStatus], backends: list[str] | None = None) -> None:
    from smpkit.cli._show import local_time

    width = max(len(item.name) for item in found)
    places = backends or [""] * len(found)
    widest = max(map(len, places))
    for item, place in zip(found, places, strict=True):
        shown = item.phase if item.status in ("InProgress", item.phase) else f"{item.status} ({item.phase})"
        where = f"{place:{widest}}  " if backends else ""
        click.echo(f"{item.name:{width}}  {where}{local_time(item.created)}  {shown}")
