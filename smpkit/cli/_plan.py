"""What `smpkit plan` decides, as the runtime would, and how it shows that: in tables, as JSON, as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from smpkit.cli import _console
from smpkit.cli._console import fold, table, width, write_file
from smpkit.cli._world import MEMORY_KINDS, World, describe, ranks_per_host, unit_of_table, world_of
from smpkit.config.load import Override, sizes_over_file
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.config.words import printable
from smpkit.errors import ConfigError, UsageError
from smpkit.plan.decide import Plan, decide
from smpkit.plan.mesh import CommGroup
from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.schedule.draw import draw
from smpkit.plan.schedule.recorded_graph import RecordedGraph
from smpkit.plan.speed import Speed
from smpkit.plan.svg import svg
from smpkit.plan.tune.features import Feature, features, remedy
from smpkit.units import amount, magnitude, seconds, things

_GIB: Final = 2**30
_MAX_GROUPS: Final = 8
_WORTH: Final = 1e-3
"""A stall of a smaller share of the step is not worth a hint."""
_INDENT: Final = " " * len("schedule  ")


def run(
    file: Path | None,
    degrees: dict[str, Any],
    *,
    overrides: Sequence[Override],
    svg: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Plan, print it, and return the exit code: 1 if it does not fit; arguments as of the command."""
    asked = Asked(**options)
    sizes = sizes_over_file(asked.hosts, asked.ranks)
    world = _world_of_degrees(degrees, overrides) if file is None else world_of(file, [*overrides, *sizes])
    planned = _planned(_sized(world, asked), asked)
    if as_json:
        _console.print_json(as_plain(planned))
    else:
        click.echo("\n".join(_report(planned)))
        _advise(planned)
    if svg is not None:
        _draw(svg, planned)
    return int(not planned.all_fit)


def _world_of_degrees(degrees: dict[str, Any], overrides: Sequence[Override]) -> World:
    if overrides:
        raise UsageError("`--set`, `-p` and `-H` change settings of a file, and none is given", hint="name a job file")
    if not degrees:
        raise UsageError("neither a file nor a degree is given", hint="try `smpkit plan job.yaml`, or `--pp 4`")
    if degrees.get("tensor_parallel_degree", 1) > 1:
        degrees["ddp"] = True
    parameters, _ = ModelParallelConfig.from_sources(degrees, None)
    return World(parameters)


# --- what is planned -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """The options beside those of a file."""

    model: str | None
    ranks: int | None
    hosts: int | None
    optimizer: str
    memory_gib: float | None
    tflops: float
    link_gbs: float

    @property
    def speed(self) -> Speed:
        link = self.link_gbs * 1e9
        return Speed(self.tflops * 1e12, LinkSpeed(link, link))


@dataclass(frozen=True)
class Planned:
    """A plan, and what it is of."""

    world: World
    plan: Plan
    asked: Asked | None = None
    features: tuple[Feature, ...] = ()
    """What features save and cost, if compute and activations are known."""

    @property
    def ranks(self) -> int:
        return self.plan.mesh.size

    @property
    def limit_gib(self) -> float | None:
        return None if self.asked is None else self.asked.memory_gib

    def fits(self, stage: int) -> bool:
        return self.limit_gib is None or self.plan.memory[stage].total_bytes <= self.limit_gib * _GIB

    @property
    def all_fit(self) -> bool:
        return all(map(self.fits, range(len(self.plan.memory))))


def _sized(world: World, asked: Asked) -> World:
    """Return a world with all its ranks and hosts; by default the fewest ranks that hold one model."""
    hosts = asked.hosts or world.hosts
    needed = world.parameters.pipeline_parallel_degree * world.parameters.tensor_parallel_degree
    ranks = asked.ranks or hosts * (world.per_host or -(-needed // hosts))
    ranks_per_host(ranks, hosts)
    if problems := world.parameters.world_problems(ranks):
        raise ConfigError(problems, subject="plan")
    return replace(world, hosts=hosts, ranks=ranks)


def _planned(world: World, asked: Asked) -> Planned:
    """Decide as the runtime would; with a model also its partition, its memory and the bubble of its parts."""
    config, ranks, speed = world.parameters, world.ranks, asked.speed
    if asked.model is None:
        return Planned(world, decide(config, ranks))
    [model] = describe(asked.model, world.folder, [config], ranks)
    plan = decide(config, ranks, model, speed, asked.optimizer)
    if not model.traced:
        return Planned(world, plan, asked)
    return Planned(world, plan, asked, tuple(features(config, ranks, model, speed, asked.optimizer, plan)))


# --- for programs -----------------------------------------------------------------------------------------------------


def as_plain(planned: Planned) -> dict[str, Any]:
    """Return what is shown, as JSON has it."""
    plan, mesh, schedule = planned.plan, planned.plan.mesh, planned.plan.timeline.schedule
    content: dict[str, Any] = {
        "name": planned.world.name or None,
        "ranks": planned.ranks,
        "hosts": planned.world.hosts,
        "mesh": {"pipeline": mesh.pp_size, "tensor": mesh.tp_size, "data": mesh.rdp_size, "placement": mesh.strategy},
        "groups": {
            kind.value.removesuffix("_GROUP").lower(): [list(group) for group in mesh.groups(kind)]
            for kind in (CommGroup.MP_GROUP, CommGroup.DP_GROUP, CommGroup.TP_GROUP, CommGroup.PP_GROUP)
        },
        "schedule": {
            "name": schedule.name,
            "microbatches": schedule.num_microbatches,
            "bubble": plan.timeline.bubble,
            "peak_live_microbatches": list(schedule.peak_live_microbatches),
            "actions": [" ".join(map(str, actions)) for actions in schedule.actions],
        },
    }
    if plan.model is None or plan.assignment is None or planned.asked is None:
        return content
    stages = []
    for stage, memory in enumerate(plan.memory):
        fits = None if planned.limit_gib is None else planned.fits(stage)
        units = list(plan.assignment.names(stage))
        stages.append({"units": units, **asdict(memory), "total_bytes": memory.total_bytes, "fits": fits})
    return {
        **content,
        "model": plan.model.name,
        "traced": plan.model.traced,
        "optimizer": planned.asked.optimizer,
        "memory_gib": planned.limit_gib,
        "compute_imbalance": plan.assignment.compute_imbalance,
        "shared_parameters": plan.model.shared_parameters,
        "stages": stages,
        "graph": None if plan.recorded is None else asdict(plan.recorded),
        "offload": [asdict(forecast) for forecast in plan.forecasts],
        "features": [asdict(feature) for feature in planned.features],
    }


# --- in words and tables ----------------------------------------------------------------------------------------------


def _report(planned: Planned) -> Iterator[str]:
    plan, asked, world = planned.plan, planned.asked, planned.world
    name = f"{world.name}: " if world.name else ""
    yield f"{name}{things(planned.ranks, 'rank')} on {things(world.hosts, 'host')}"
    parts = [_mesh(planned), _groups(planned), _schedule(planned)]
    if plan.model is not None and asked is not None:
        parts += [_partition(plan), _values(plan.recorded), _memory(planned, asked)]
        parts += [_offloading(planned, asked), _features(planned.features)]
    for part in parts:
        if lines := list(part):
            yield ""
            yield from lines


def _mesh(planned: Planned) -> Iterator[str]:
    mesh = planned.plan.mesh
    yield f"mesh      pipeline {mesh.pp_size} × tensor {mesh.tp_size} × data {mesh.rdp_size}, {mesh.strategy}"
    if (sharding := planned.world.parameters.sharded_data_parallel_degree) > 1:
        yield f"sharding  parameters, gradients and optimizer states are divided over {sharding} data-parallel ranks"
    yield from (f"{_INDENT}{line}".rstrip() for line in mesh.draw(width() - len(_INDENT)).splitlines())


def _groups(planned: Planned) -> Iterator[str]:
    per_host = planned.ranks // planned.world.hosts
    hosts = [range(host * per_host, (host + 1) * per_host) for host in range(planned.world.hosts)]
    yield from fold("hosts     ", _listed([tuple(ranks) for ranks in hosts]), width())
    for name, kind in (("mp", CommGroup.MP_GROUP), ("dp", CommGroup.DP_GROUP), ("tp", CommGroup.TP_GROUP)):
        groups = planned.plan.mesh.groups(kind)
        if len(groups[0]) > 1:
            yield from fold(f"{name} groups ", _listed(groups), width())


def _listed(groups: Sequence[Sequence[int]]) -> list[str]:
    more = [f"and {len(groups) - _MAX_GROUPS} more"] if len(groups) > _MAX_GROUPS else []
    return [_span(group) for group in groups[:_MAX_GROUPS]] + more


def _span(ranks: Sequence[int]) -> str:
    """Write ranks as `0–3` or, with equal steps, `0,2–6`."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])):
        return f"{ranks[0]},{ranks[1]}–{ranks[-1]}"
    return ",".join(map(str, ranks))


def _schedule(planned: Planned) -> Iterator[str]:
    timeline, schedule = planned.plan.timeline, planned.plan.timeline.schedule
    active = planned.world.parameters.active_microbatches
    count = f"{things(schedule.num_microbatches, 'microbatch')}, at most {active} active"
    name = f"{schedule.name} (1F1B)" if schedule.name == "interleaved" else schedule.name
    yield f"schedule  {name}, {count}, predicted bubble {timeline.bubble:.1%}"
    yield from draw(schedule, width=width()).splitlines()
    held = [*map(str, schedule.peak_live_microbatches), " (microbatches that each stage holds at its peak)"]
    yield from fold("held      ", held, width())


def _partition(plan: Plan) -> Iterator[str]:
    model, assignment = plan.model, plan.assignment
    assert model is not None
    assert assignment is not None
    how = "by traced compute and memory" if model.traced else "by parameter sizes (as with skip_tracing)"
    most = f"the slowest stage does {assignment.compute_imbalance:.2f} × the average work"
    yield f"parts     of {model.name}, {how}; {most}"
    for stage, memory in enumerate(plan.memory):
        names = assignment.names(stage)
        head = f"stage {stage}   {magnitude(memory.num_parameters):>8} parameters in {len(names)} units: "
        yield from fold(head, _shortened(names), width(), " ")
    if model.shared_parameters:
        yield from fold("shared    ", _shortened(model.shared_parameters), width(), " ")


def _shortened(names: Sequence[str]) -> list[str]:
    """Return the first names and the last, each but the last with its comma."""
    shown = [printable(name) for name in names]
    chosen = shown if len(shown) <= 4 else [shown[0], shown[1], f"… {shown[-1]}"]
    return [*(f"{name}," for name in chosen[:-1]), *chosen[-1:]]


def _values(recorded: RecordedGraph | None) -> Iterator[str]:
    """Yield what one microbatch sends, and, where it comes back to a stage, what each visit runs."""
    if recorded is None:
        return
    forward = sum(value.num_bytes for value in recorded.values)
    back = sum(value.num_bytes for value in recorded.values if value.differentiable)
    count = things(len(recorded.values), "value")
    yield f"values    a microbatch sends {count}, {amount(forward)}, and {amount(back)} of gradients back"
    visits = Counter(segment.rank for segment, _ in recorded.segments)
    for segment, names in recorded.segments:
        if visits[segment.rank] > 1:
            number = f".{segment.index}" if segment.index else ""  # as the drawing of the schedule has it
            shown = _shortened(list(dict.fromkeys(names)) or ["no unit, only operations between them"])
            yield from fold(f"stage {segment.rank}{number}: ", shown, width(), " ")


def _memory(planned: Planned, asked: Asked) -> Iterator[str]:
    memories = planned.plan.memory
    unit, size = unit_of_table(memory.total_bytes for memory in memories)
    kinds = {asked.optimizer if kind == "states" else kind: name for kind, name in MEMORY_KINDS.items()}
    for kind in ("gathered", "masters", "host"):
        if kind == "host" or not any(getattr(memory, kinds[kind]) for memory in memories):
            del kinds[kind]
    kinds["total"] = "total_bytes"
    limited = [f"of {asked.memory_gib:g} GiB"] if asked.memory_gib is not None else []
    rows = [[unit, *kinds, *limited]]
    for stage, memory in enumerate(memories):
        sizes = [getattr(memory, field) for field in kinds.values()]
        cells = ["unknown" if num_bytes is None else f"{num_bytes / size:.1f}" for num_bytes in sizes]
        fits = ["fits" if planned.fits(stage) else "does not fit"] if limited else []
        rows.append([f"stage {stage}", *cells, *fits])
    yield from table(rows, width())
    dtypes = sorted({dtype for memory in memories for dtype in memory.dtypes})
    peak = "at the peak of live microbatches"
    if any(memory.masters_bytes > memory.gathered_bytes + (memory.activations_bytes or 0) for memory in memories):
        peak = "in optimizer.step(), where the masters have gradients, instead of activations"
    yield f"(parameters and buffers in {', '.join(dtypes)}; {peak})"


def _offloading(planned: Planned, asked: Asked) -> Iterator[str]:
    """Yield what activation offloading moves, saves and costs on each stage."""
    if not planned.plan.forecasts:
        return
    horizon = planned.world.parameters.activation_loading_horizon
    speeds = f"over a link of {asked.link_gbs:g} GB/s each way, by devices of {asked.tflops:g} TFLOP/s"
    yield f"offload   at horizon {horizon}, {speeds}"
    unit, size = unit_of_table(max(forecast.resident_bytes, forecast.out_bytes) for forecast in planned.plan.forecasts)
    rows = [[unit, "boundaries", "on device", "on host", "out", "back", "stalls", "of a step of"]]
    for stage, forecast in enumerate(planned.plan.forecasts):
        sizes = (
            forecast.resident_bytes,
            forecast.device_bytes,
            forecast.host_bytes,
            forecast.out_bytes,
            forecast.back_bytes,
        )
        cells = [f"{num_bytes / size:.2f}" for num_bytes in sizes]
        rows.append([f"stage {stage}", *cells, seconds(forecast.stall_seconds), seconds(forecast.step_seconds)])
    yield from table(rows, width())


def _features(known: Sequence[Feature]) -> Iterator[str]:
    """Yield what each feature saves and costs here, by the simulated schedule; those that are on have a mark."""
    if not known:
        return
    rows = [["features", "saved on the fullest rank", "on the host", "time per sample"]]
    for saving in known:
        host = f"+{amount(saving.host_bytes)}" if saving.host_bytes else ""
        rows.append(
            [f"{saving.setting}{' (on)' * saving.is_on}", amount(saving.saved_bytes), host, f"{saving.cost:+.1%}"]
        )
    yield from table(rows, width())


def _draw(path: Path, planned: Planned) -> None:
    timeline, schedule = planned.plan.timeline, planned.plan.timeline.schedule
    title = f"{schedule.name}, {things(schedule.num_microbatches, 'microbatch')}, bubble {timeline.bubble:.1%}"
    write_file(path, svg({title: timeline}), "picture")
    _console.note(f"picture: {path}")


# --- what to change ---------------------------------------------------------------------------------------------------


def _advise(planned: Planned) -> None:
    model = planned.plan.model
    if model is None:
        return
    too_large = [str(stage) for stage in range(len(planned.plan.memory)) if not planned.fits(stage)]
    if too_large:
        _console.warn(f"does not fit {planned.limit_gib:g} GiB: stage {', '.join(too_large)}")
        _console.hint(_remedy(planned))
    if planned.world.parameters.offload_activations:
        _advise_offloading(planned)
    for note in model.notes:
        _console.note(f"note: {note.strip()}")
    if not model.samples:
        _console.note("note: for compute and activations, let the factory return (model, arguments of one microbatch)")


def _remedy(planned: Planned) -> str:
    """Return the one change by which the model fits, or what saves most."""
    change = remedy(list(planned.features), (planned.limit_gib or 0.0) * _GIB)
    if change is not None:
        peak = f"{amount(change.peak_bytes)} on the fullest rank"
        return f"`{change.setting}` makes it fit: {peak}, and a sample takes {change.cost:+.1%}"
    useful = [feature for feature in planned.features if not feature.is_on and feature.saved_bytes > 0]
    if not useful:
        return "raise `pipeline_parallel_degree`, or lower `active_microbatches`"
    most = useful[0].setting
    return f"no single change makes it fit; `{most}` saves most, and `smpkit tune` searches for several"


def _advise_offloading(planned: Planned) -> None:
    """Say when offloading does nothing, when a longer horizon removes its stalls, and when only a faster link would."""
    model = planned.plan.model
    assert model is not None
    if model.traced and not model.has_boundaries:
        _console.warn("`offload_activations` has nothing to offload: no layer of the model is checkpointed")
        _console.hint("let the factory call `smp.set_activation_checkpointing` on the layers, as the script does")
    slow = [forecast for forecast in planned.plan.forecasts if forecast.stall_seconds > _WORTH * forecast.step_seconds]
    if not slow:
        return
    enough = max(forecast.sufficient_horizon for forecast in slow)
    horizon = planned.world.parameters.activation_loading_horizon
    if horizon != "auto" and enough > horizon:
        _console.hint(f"`activation_loading_horizon: {enough}` stalls less")
    else:
        rate = max(forecast.needed_bytes_per_second for forecast in slow)
        _console.hint(f"copies take longer than the forward of their layer; a link of {rate / 1e9:.1f} GB/s hides them")
