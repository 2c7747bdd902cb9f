"""`smpkit status`: what a managed job is doing, or why it failed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from smpkit.cli import _console
from smpkit.cli._backend import BackendChoice, backend_options
from smpkit.config.words import printable

if TYPE_CHECKING:
    from rich.console import Console

    from smpkit_estimator.backend import Clock
    from smpkit_estimator.job import Job
    from smpkit_estimator.status import JobStatus

__all__ = ["can_repaint", "live", "status"]


@click.command()
@click.argument("job")
@click.option("-w", "--watch", is_flag=True, help="Keep the state up to date until the job is over.")
@click.option("--json", "as_json", is_flag=True, help="Print the state as JSON; with --watch one line for each phase.")
@backend_options
def status(job: str, watch: bool, as_json: bool, chosen: BackendChoice) -> int:
    """Show what a job is doing, or why it failed.

    Phase, time and billable time so far; after a failure the first failing rank's exception.

    --watch repaints it in place on a terminal; elsewhere each phase is a line. Then the exit code is 0 if the job
    completed, and 1 if it failed or was stopped.
    """
    from smpkit.cli._show import echo_all, hint_of, status_json, status_lines
    from smpkit_estimator.job import Job

    opened = chosen.open()
    handle = Job(job, opened)
    try:
        state = _watched(handle, opened.clock, as_json) if watch else handle.status()
    except KeyboardInterrupt:
        _console.current().note(f"\n`{job}` goes on; `smpkit stop {job}` stops it")
        return 130
    if not as_json:
        echo_all(status_lines(state))
        hint_of(state)
    elif not watch:
        click.echo(json.dumps(status_json(state), indent=2))
    return 1 if watch and not state.succeeded else 0


def _watched(job: Job, clock: Clock, as_json: bool) -> JobStatus:
    """Show the state until the job is over, and return how it ended."""
    if as_json:
        return job.wait(on_change=_print_json)
    return _repainted(job, clock) if can_repaint() else job.wait(on_change=_say_phase)


def _print_json(state: JobStatus) -> None:
    from smpkit.cli._show import status_json

    click.echo(json.dumps(status_json(state)))


def _say_phase(state: JobStatus) -> None:
    from smpkit.config.words import duration

    if not state.over:
        _console.current().note(f"{duration(state.seconds):>9}  {state.phase}: {state.message}")


def _repainted(job: Job, clock: Clock) -> JobStatus:
    """Repaint the state in place; between two requests its elapsed times are counted on here."""
    from smpkit.cli._show import status_lines

    latest = job.status()

    def changed(state: JobStatus) -> None:
        nonlocal latest
        latest = state

    def lines() -> Iterator[str]:
        yield from status_lines(replace(latest, seen=clock.now()))
        if latest.message and not latest.over:
            yield f"now         {printable(latest.message)}"

    with live(lines):
        return job.wait(on_change=changed)


def can_repaint() -> bool:
    """Tell whether stdout is a terminal with cursor control, and the user has not switched colours or animation off."""
    unwanted = os.environ.get("NO_COLOR") or os.environ.get("SMPKIT_NO_PROGRESS")
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not unwanted


@contextmanager
def live(lines: Callable[[], Iterable[str]], console: Console | None = None) -> Iterator[None]:
    """Show what `lines` returns, asked again each second, until the block ends; then take it off the screen.

    Args:
        lines: may have colours; long ones are wrapped, so that a narrow terminal is repainted as well.
        console: another than stdout.
    """
    import rich.console
    import rich.live
    import rich.text

    def frame() -> rich.text.Text:
        return rich.text.Text.from_ansi("\n".join(lines()))

    shown = console or rich.console.Console(file=sys.stdout)
    with rich.live.Live(get_renderable=frame, console=shown, refresh_per_second=1, transient=True):
        yield
