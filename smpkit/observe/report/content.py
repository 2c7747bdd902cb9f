"""Everything that a report shows of a run, as plain data: what `--json` prints, and what the page is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from smpkit.errors import SmpkitError
from smpkit.observe.report import figures
from smpkit.observe.report.folder import Curve, LogTail, Material, Warned
from smpkit.observe.report.settings import Setting
from smpkit.observe.summary import KindBytes, RankSummary, RunSummary

__all__ = ["Content", "StepView", "content_of", "plain"]

_MOST_PIPELINES: Final = 8
_MOST_RANKS: Final = 32
"""Of how many ranks the memory over a step is in the file; those with the highest peaks."""
_MOST_POINTS: Final = 2000


@dataclass(frozen=True)
class StepView:
    """One step in detail."""

    number: int
    why: str
    """`typical`, `slowest` or `first`."""
    pipelines: tuple[figures.PipelineView, ...]
    memory: tuple[figures.RankMemoryView, ...]


@dataclass(frozen=True)
class Content:
    """A run, ready to be shown."""

    name: str
    folder: str
    summary: RunSummary | None
    curves: tuple[Curve, ...]
    times: tuple[figures.StepTimes, ...]
    main: figures.StepTimes | None
    steps: tuple[StepView, ...]
    matrix: figures.Matrix | None
    """Of the typical step."""
    stalls: tuple[figures.LayerStall, ...]
    planned: tuple[KindBytes | None, ...]
    """By rank."""
    stages: tuple[KindBytes | None, ...]
    """What was planned, by stage."""
    settings: tuple[Setting, ...]
    environment: dict[str, str]
    warnings: tuple[Warned, ...]
    logs: tuple[LogTail, ...]
    missing: dict[str, str] = field(default_factory=dict)


def content_of(material: Material) -> Content:
    """Work out what is shown of a run."""
    missing = dict(material.missing)
    run = material.events
    summary = material.summary
    times: tuple[figures.StepTimes, ...] = ()
    main: figures.StepTimes | None = None
    steps: tuple[StepView, ...] = ()
    matrix: figures.Matrix | None = None
    stalls: tuple[figures.LayerStall, ...] = ()
    if run is not None:
        times = figures.step_times(run)
        main = figures.main_step(times)
        stalls = figures.layer_stalls(run)
        if main is None:
            missing["events"] = "No step was finished by all ranks."
        else:
            try:
                steps = _step_views(material, main)
                matrix = figures.matrix(run, [steps[0].number])
                summary = _summary(summary, figures.summary_of_events(run, material.name))
            except SmpkitError as error:
                missing["events"] = f"The events cannot be used: {error.message}."
            if steps and not any(step.memory for step in steps):
                missing["memory"] = "These events are without memory by kind: an older smpkit has written them."
    return Content(
        name=material.name,
        folder=material.folder,
        summary=summary,
        curves=tuple(map(_thinned, material.curves)),
        times=times,
        main=main,
        steps=steps,
        matrix=matrix,
        stalls=stalls,
        planned=_planned(material, summary),
        stages=_stages(material),
        settings=material.settings,
        environment=material.environment,
        warnings=material.warnings,
        logs=material.logs,
        missing=missing,
    )


def _summary(told: RunSummary | None, seen: RunSummary) -> RunSummary:
    """Return what ranks have told at their end; where they came to none, what events show, and how the run ended."""
    if told is None or told.ranks:
        return told or seen
    return replace(seen, started=told.started, seconds=told.seconds, exit_reason=told.exit_reason, notes=told.notes)


def _step_views(material: Material, main: figures.StepTimes) -> tuple[StepView, ...]:
    run = material.events
    assert run is not None
    by_peak = sorted(range(run.mesh.size), key=lambda rank: -_peak(figures.peaks(run, rank)))
    shown = sorted(by_peak[:_MOST_RANKS])
    found = []
    for chosen in figures.chosen_steps(main):
        pipelines = range(min(len(run.pipelines), _MOST_PIPELINES))
        views = tuple(figures.pipeline_view(run, chosen.number, pipeline) for pipeline in pipelines)
        memory = [figures.memory_view(run, chosen.number, rank) for rank in shown]
        found.append(StepView(chosen.number, chosen.why, views, tuple(each for each in memory if each is not None)))
    return tuple(found)


def _peak(found: tuple[KindBytes, int] | None) -> int:
    return 0 if found is None else found[1]


def _thinned(curve: Curve) -> Curve:
    """Leave out points of a long curve, but never a lowest or a highest one."""
    length = len(curve.steps)
    if length <= _MOST_POINTS:
        return curve
    size = -(-length // (_MOST_POINTS // 2))
    kept: set[int] = set()
    for start in range(0, length, size):
        some = range(start, min(start + size, length))
        group = [(value, at) for at in some if (value := curve.values[at]) is not None]
        kept.update((min(group)[1], max(group)[1]) if group else (start,))
    chosen = sorted(kept | {0, length - 1})
    return replace(
        curve, steps=tuple(curve.steps[at] for at in chosen), values=tuple(curve.values[at] for at in chosen)
    )


def _planned(material: Material, summary: RunSummary | None) -> tuple[KindBytes | None, ...]:
    """Return what was planned for each rank: by the summary, or by the stages of a plan that knows the model."""
    ranks: Sequence[RankSummary] = () if summary is None else summary.ranks
    by_stage = _stages(material)
    run = material.events
    found = []
    for rank in ranks:
        planned = rank.planned
        if planned is None and by_stage and run is not None and rank.rank < run.mesh.size:
            planned = by_stage[run.mesh.coordinates(rank.rank).pp % len(by_stage)]
        found.append(planned)
    return tuple(found)


def _stages(material: Material) -> tuple[KindBytes | None, ...]:
    """Return the memory of each stage, by a plan that knows the model."""
    stages = (material.plan or {}).get("stages")
    return tuple(map(_of_stage, stages)) if isinstance(stages, list) else ()


def _of_stage(stage: Any) -> KindBytes | None:
    """Return the memory of a stage as `smpkit plan --json` has it."""
    if not isinstance(stage, dict):
        return None

    def size(*names: str) -> int:
        return sum(value for name in names if isinstance(value := stage.get(name), int))

    return KindBytes(
        weights=size("parameters_bytes", "gathered_bytes"),
        gradients=size("gradients_bytes", "reduction_bytes"),
        states=size("optimizer_bytes", "masters_bytes"),
        activations=size("activations_bytes"),
        offloaded=size("host_bytes"),
    )


def plain(content: Content) -> dict[str, Any]:
    """Return the content as JSON has it."""
    return asdict(content)
