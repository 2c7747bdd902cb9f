"""`smpkit timeline`: a step as it was executed beside the one that was planned, and traces for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smpkit.cli import _console
from smpkit.cli._console import table, width, write_file
from smpkit.cli.options import FILE
from smpkit.config.words import printable
from smpkit.errors import SmpkitError, UsageError
from smpkit.observe.runs import open_run
from smpkit.units import amount, seconds, things

if TYPE_CHECKING:
    from smpkit.observe.executed import ExecutedStep
    from smpkit.observe.merge import Run


@click.command()
@click.argument("name", metavar="[RUN]", required=False)
@click.option("--step", "number", type=int, help="Which step, from 0. Default: the last that trains.")
@click.option("--pipeline", type=int, default=0, help="Which replica of the pipeline, from 0. Default: 0.")
@click.option("--json", "as_json", is_flag=True, help="Print the step as JSON, times in seconds.")
@click.option(
    "--perfetto",
    "trace",
    type=FILE,
    help="Also write a trace of all steps for ui.perfetto.dev; of one step, with --step. Profiles go into it.",
)
@click.option("--svg", "picture", type=FILE, help="Also draw the step as an SVG, planned above executed.")
def timeline(
    name: str | None, number: int | None, pipeline: int, as_json: bool, trace: Path | None, picture: Path | None
) -> None:
    """Show a step as it was executed, beside the planned one.

    RUN is a run's name, its folder, a job's name for the last one of it, or any folder with events; without it, it is
    the last run below this folder. `smpkit run` records some steps, all with `--events`; any other job records them
    where the variable SMPKIT_EVENTS_DIR or SMPKIT_RUN_DIR names a folder on every host. The planned step has the
    actions of the schedule, each as long as measured, over links that cost nothing.
    """
    from smpkit.observe import executed
    from smpkit.observe.events import find_events
    from smpkit.observe.merge import read_run
    from smpkit.observe.trace import chrome_trace, profiles_of

    folder = open_run(name).path
    run = read_run(folder)
    step = executed.executed_step(run, _chosen(run, number, pipeline), pipeline)
    for rank in run.truncated:
        _console.warn(f"the events of rank {rank} break off in a line, which was left out: the process was ended")
    if as_json:
        mesh = {"pipeline": run.mesh.pp_size, "tensor": run.mesh.tp_size, "data": run.mesh.rdp_size}
        more = {"steps": run.steps, "mesh": mesh, "truncated_ranks": run.truncated}
        _console.print_json({**executed.as_json(step), **more})
    else:
        click.echo("\n".join(_report(run, step, pipeline)))
    if trace is not None:
        profiles = profiles_of(find_events(folder)[0].parent)
        write_file(trace, chrome_trace(run, None if number is None else [number], profiles), "trace")
        _console.note(f"trace: {trace}; open it at https://ui.perfetto.dev")
    if picture is not None:
        write_file(picture, step.as_svg(), "picture")
        _console.note(f"picture: {picture}")


def _chosen(run: Run, number: int | None, pipeline: int) -> int:
    if not 0 <= pipeline < len(run.pipelines):
        raise UsageError(f"there is no pipeline {pipeline}", hint=f"use {_range(range(len(run.pipelines)))}")
    if not run.steps:
        raise SmpkitError("no step was finished by all ranks", hint="let the job run at least one step")
    if number is None:
        first = run.pipelines[pipeline][0]
        trains = (step for step in reversed(run.steps) if any(a.kind == "B" for a in run.step(first, step).actions))
        return next(trains, run.steps[-1])
    if number not in run.steps:
        raise UsageError(f"there is no step {number} that all ranks finished", hint=f"use {_range(run.steps)}")
    return number


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _report(run: Run, step: ExecutedStep, pipeline: int) -> Iterator[str]:
    mesh, count = run.mesh, step.executed.schedule.num_microbatches
    replica = f", pipeline {pipeline} of {len(run.pipelines)}" if len(run.pipelines) > 1 else ""
    named = f"step {step.number} of {_range(run.steps)}, `{printable(step.name)}`"
    yield f"{named}: {seconds(step.step_seconds)}, {things(count, 'microbatch')}"
    degrees = f"pipeline {mesh.pp_size} × tensor {mesh.tp_size} × data {mesh.rdp_size}"
    yield f"{things(mesh.size, 'rank')}: {degrees}{replica}"
    yield ""
    yield from _pictures(step)
    yield ""
    yield from _idle_table(step)
    if step.links:
        yield ""
        rows = [
            [f"{e.sender} → {e.receiver}", str(e.num_messages), amount(e.num_bytes), seconds(e.waited_seconds)]
            for e in step.links
        ]
        yield from table([["link", "messages", "bytes", "waited"], *rows], width())


def _pictures(step: ExecutedStep) -> Iterator[str]:
    """Draw both to one scale: a column is the shortest planned action, or more where that is too wide."""
    from smpkit.observe.executed import summary
    from smpkit.plan.schedule.draw import draw

    column = _column_seconds(step)
    if step.planned is not None:
        yield f"planned   {summary(step.planned)}"
        yield from draw(step.planned, column, width()).splitlines()
        yield ""
    remark = ", without a schedule" if step.planned is None else "" if step.follows_plan else ", NOT in planned order"
    yield f"executed  {summary(step.executed)}{remark}"
    yield from draw(step.executed, column, width()).splitlines()
    yield f"(a column is {seconds(column)}; `.` is idle, `--` goes on with the action before it)"


def _column_seconds(step: ExecutedStep) -> float:
    """Choose a scale on which both pictures are as narrow as the terminal, and short actions are still columns."""
    timelines = [timeline for timeline in (step.planned, step.executed) if timeline is not None]
    longest = max(timeline.makespan_seconds for timeline in timelines)
    spans = [span for stage in timelines[0].spans for span in stage]
    shortest = min((span.end_seconds - span.start_seconds for span in spans), default=0.0)
    cell = 1 + max((len(str(span.action)) for span in spans), default=2)
    columns = max(20, (width() - len("stage 00  ")) // cell)
    return max(shortest, longest / columns, 1e-9)


def _idle_table(step: ExecutedStep) -> Iterator[str]:
    from smpkit.plan.schedule.simulate import Cause

    rows = [["stage", "rank", "busy", "idle", *(cause.value for cause in Cause), "other", "live"]]
    makespan = step.executed.makespan_seconds
    for stage, rank in enumerate(step.ranks):
        idle = step.executed.idle_seconds[stage]
        busy = f"{1 - idle / makespan:.1%}" if makespan else "–"
        times = [idle, *step.executed.stall_seconds(stage).values(), step.other_seconds(stage)]
        live = step.executed.schedule.peak_live_microbatches[stage]
        rows.append([str(stage), str(rank), busy, *map(seconds, times), str(live)])
    yield from table(rows, width())
