"""`smpkit timeline`: a step as it was executed beside the one that was planned, and traces for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smpkit.cli import _console
from smpkit.cli._files import write_file
from smpkit.cli._layout import table, width
from smpkit.cli._run_completion import complete_run
from smpkit.errors import SmpkitError, UsageError
from smpkit.units import amount, seconds

if TYPE_CHECKING:
    from smpkit.observe.executed import ExecutedStep
    from smpkit.observe.merge import Run
    from smpkit.plan.schedule.simulate import Timeline

__all__ = ["timeline"]


@click.command()
@click.argument("name", metavar="[RUN]", required=False, shell_complete=complete_run)
@click.option("--step", "number", type=int, help="Which step, from 0. Default: the last that trains.")
@click.option("--pipeline", "pipeline", type=int, default=0, help="Which replica of the pipeline, from 0. Default: 0.")
@click.option("--json", "as_json", is_flag=True, help="Print the step as JSON, times in seconds.")
@click.option(
    "--perfetto",
    "trace",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write a trace of all steps for ui.perfetto.dev; of one step, with --step. Profiles go into it.",
)
@click.option(
    "--svg",
    "picture",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also draw the step as an SVG, planned above executed.",
)
def timeline(
    name: str | None, number: int | None, pipeline: int, as_json: bool, trace: Path | None, picture: Path | None
) -> None:
    """Show a step as it was executed, beside the planned one.

    RUN is a run's name, its folder, a job's name for the last one of it, or any folder with events; without it, it is
    the last run below this folder. `smpkit run` records some steps, all with `--events`; any other job records them
    where the variable SMPKIT_EVENTS_DIR or SMPKIT_RUN_DIR names a folder on every host. The planned step has the
    actions of the schedule, each as long as measured, over links that cost nothing.
    """
    from smpkit.observe.executed import executed_step
    from smpkit.observe.merge import read_run
    from smpkit.observe.runs import open_run

    folder = open_run(name).path
    run = read_run(folder)
    chosen = _chosen(run, number, pipeline)
    console = _console.current()
    for rank in run.truncated:
        console.warn(f"the events of rank {rank} break off in a line, which was left out: the process was ended")
    step = executed_step(run, chosen, pipeline)
    if as_json:
        click.echo(json.dumps(_plain(run, step), indent=2))
    else:
        click.echo("\n".join(_report(run, step, pipeline)))
    if trace is not None:
        _write_trace(run, folder, trace, None if number is None else [number])
        console.note(f"trace: {trace}; open it at https://ui.perfetto.dev")
    if picture is not None:
        write_file(picture, _svg(step), "picture")
        console.note(f"picture: {picture}")


def _chosen(run: Run, number: int | None, pipeline: int) -> int:
    if not 0 <= pipeline < len(run.pipelines):
        raise UsageError(f"there is no pipeline {pipeline}", hint=f"use {_range(range(len(run.pipelines)))}")
    if not run.steps:
        raise SmpkitError("no step was finished by all ranks", hint="let the job run at least one step")
    if number is not None and number not in run.steps:
        raise UsageError(f"there is no step {number} that all ranks finished", hint=f"use {_range(run.steps)}")
    if number is not None:
        return number
    trains = (each for each in reversed(run.steps) if _has_backward(run, each, pipeline))
    return next(trains, run.steps[-1])


def _has_backward(run: Run, number: int, pipeline: int) -> bool:
    return any(action.kind == "B" for action in run.step(run.pipelines[pipeline][0], number).actions)


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _write_trace(run: Run, folder: Path, path: Path, numbers: Sequence[int] | None) -> None:
    from smpkit.observe.chrome_trace import chrome_trace
    from smpkit.observe.events import find_events
    from smpkit.observe.profiles import profiles_of

    write_file(path, chrome_trace(run, numbers, profiles_of(find_events(folder)[0].parent)), "trace")


def _svg(step: ExecutedStep) -> str:
    from smpkit.plan.svg import Drawing, svg

    timelines = {"planned": step.planned, "executed": step.executed}
    return svg([Drawing(f"{name}: {_summary(each)}", each) for name, each in timelines.items() if each is not None])


# --- for eyes ---------------------------------------------------------------------------------------------------------


def _report(run: Run, step: ExecutedStep, pipeline: int) -> Iterator[str]:
    from smpkit.config.words import printable

    mesh = run.mesh
    replica = f", pipeline {pipeline} of {len(run.pipelines)}" if len(run.pipelines) > 1 else ""
    yield (
        f"step {step.number} of {_range(run.steps)}, `{printable(step.name)}`: {seconds(step.step_seconds)}, "
        f"{step.executed.schedule.num_microbatches} microbatches"
    )
    yield f"{mesh.size} ranks: pipeline {mesh.pp_size} × tensor {mesh.tp_size} × data {mesh.rdp_size}{replica}"
    yield ""
    yield from _pictures(step)
    yield ""
    yield from _idle_table(step)
    if step.links:
        yield ""
        yield from _link_table(step)


def _pictures(step: ExecutedStep) -> Iterator[str]:
    """Draw both to one scale: a column is the shortest planned action, or more where that is too wide."""
    from smpkit.plan.schedule.draw import draw

    column = _column_seconds(step)
    if step.planned is not None:
        yield f"planned   {_summary(step.planned)}"
        yield from draw(step.planned, column, width()).splitlines()
        yield ""
    remark = ""
    if not step.follows_plan:
        remark = ", without a schedule" if step.planned is None else ", NOT in planned order"
    yield f"executed  {_summary(step.executed)}{remark}"
    yield from draw(step.executed, column, width()).splitlines()
    yield f"(a column is {seconds(column)}; `.` is idle, `--` goes on with the action before it)"


def _summary(what: Timeline) -> str:
    return f"{seconds(what.makespan_seconds)}, bubble {what.bubble:.1%}"


def _column_seconds(step: ExecutedStep) -> float:
    """Choose a scale on which both pictures are as narrow as the terminal, and short actions are still columns."""
    timelines = [each for each in (step.planned, step.executed) if each is not None]
    longest = max(each.makespan_seconds for each in timelines)
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
        stalls = step.executed.stall_seconds(stage)
        causes = [seconds(stalls[cause]) for cause in Cause]
        live = str(step.executed.peak_live_microbatches[stage])
        busy = f"{1 - idle / makespan:.1%}" if makespan else "–"
        rows.append([str(stage), str(rank), busy, seconds(idle), *causes, seconds(step.other_seconds(stage)), live])
    yield from table(rows, width())


def _link_table(step: ExecutedStep) -> Iterator[str]:
    rows = [["link", "messages", "bytes", "waited"]]
    for link in step.links:
        name = f"{link.sender} → {link.receiver}"
        rows.append([name, str(link.num_messages), amount(link.num_bytes), seconds(link.waited_seconds)])
    yield from table(rows, width())


# --- for programs -----------------------------------------------------------------------------------------------------


def _plain(run: Run, step: ExecutedStep) -> dict[str, Any]:
    return {
        "step": step.number,
        "steps": list(run.steps),
        "name": step.name,
        "mesh": {"pipeline": run.mesh.pp_size, "tensor": run.mesh.tp_size, "data": run.mesh.rdp_size},
        "ranks": list(step.ranks),
        "step_seconds": step.step_seconds,
        "follows_plan": step.follows_plan,
        "planned": None if step.planned is None else _plain_timeline(step.planned),
        "executed": {
            **_plain_timeline(step.executed),
            "other_seconds": [step.other_seconds(stage) for stage in range(len(step.ranks))],
        },
        "links": [vars(link) for link in step.links],
        "truncated_ranks": list(run.truncated),
    }


def _plain_timeline(what: Timeline) -> dict[str, Any]:
    stages = range(len(what.spans))
    return {
        "makespan_seconds": what.makespan_seconds,
        "bubble": what.bubble,
        "idle_seconds": list(what.idle_seconds),
        "stall_seconds": [{cause.value: s for cause, s in what.stall_seconds(stage).items()} for stage in stages],
        "peak_live_microbatches": list(what.peak_live_microbatches),
        "spans": [[[str(s.action), s.start_seconds, s.end_seconds] for s in stage] for stage in what.spans],
    }
