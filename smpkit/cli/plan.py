"""`smpkit plan`: what a job would do, without a GPU and without starting it: ranks, schedule, partition, memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from smpkit.cli import _console
from smpkit.errors import ConfigError, DeadlineError, Problem, SmpkitError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from smpkit.config.modelparallel import ModelParallelConfig
    from smpkit.plan.actions import Schedule
    from smpkit.plan.assignment import Assignment
    from smpkit.plan.memory import ModelFacts, RankMemory
    from smpkit.plan.mesh import Mesh
    from smpkit.plan.simulate import Timeline

__all__ = ["plan"]

_DEADLINE_SECONDS: Final = 600
_DESCRIBE: Final = "smpkit.torch.partitioning.describe"
_GIB: Final = 1024**3
_MIB: Final = 1024**2
_OPTIMIZERS: Final = ("sgd", "momentum", "rmsprop", "adagrad", "adam", "adamw")
"""Those of smpkit.plan.memory, again, so that `--help` imports nothing; a test keeps them equal."""
_MAX_GROUPS: Final = 8


@dataclass(frozen=True)
class _World:
    """Who takes part."""

    name: str
    parameters: ModelParallelConfig
    ranks: int
    hosts: int
    source: Path
    """Where modules of the job are imported from."""

    @property
    def per_host(self) -> int:
        return self.ranks // self.hosts


@dataclass(frozen=True)
class _Plan:
    """Everything that is printed."""

    world: _World
    mesh: Mesh
    timeline: Timeline
    model: ModelFacts | None = None
    assignment: Assignment | None = None
    memory: tuple[RankMemory, ...] = ()
    optimizer: str = ""
    limit_gib: float | None = None

    def fits(self, stage: int) -> bool:
        return self.limit_gib is None or self.memory[stage].total_bytes <= self.limit_gib * _GIB


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a setting of FILE for this call.")
@click.option("--pipeline-parallel-degree", "--pp", type=int, help="Without FILE: ranks that a model is cut over.")
@click.option("--tensor-parallel-degree", "--tp", type=int, help="Without FILE: ranks that layers are split over.")
@click.option("--microbatches", type=int, help="Without FILE: into how many parts a batch is cut.")
@click.option("--ranks", type=int, help="Number of all ranks. Default: what FILE says, or one model.")
@click.option("--hosts", type=int, help="Number of hosts. Default: what FILE says, or 1.")
@click.option("--model", metavar="MODULE:FACTORY", help="What returns the model: also plan its parts and memory.")
@click.option("--optimizer", type=click.Choice(_OPTIMIZERS), default="adamw", help="Whose states to count (adamw).")
@click.option("--memory-gib", type=float, help="Memory of one rank's device: say whether the model fits.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(file: Path | None, overrides: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Show what a job would do: ranks, schedule, parts, memory.

    FILE is a job, a distribution, or modelparallel parameters; without it the degrees are options. Nothing is started
    and no GPU is needed. The schedule is the one that training begins with; after two steps it may become a deeper one,
    from measured times.

    MODULE:FACTORY is imported from the job's `source_dir`, or the current folder. It returns a torch.nn.Module, or a
    pair of it and the arguments for one microbatch; then compute and activations are known too. Its tensors have no
    data, so a model that fits no machine can be planned.
    """
    world = _world(file, overrides, options)
    made = _with_model(_plan_of(world), options) if options["model"] else _plan_of(world)
    if as_json:
        click.echo(json.dumps(_plain(made), indent=2))
    else:
        click.echo("\n".join(_report(made)))
        _advise(made)


# --- who takes part ---------------------------------------------------------------------------------------------------

_DEGREES: Final = ("pipeline_parallel_degree", "tensor_parallel_degree", "microbatches")


def _world(file: Path | None, overrides: Sequence[str], options: dict[str, Any]) -> _World:
    from smpkit.config.modelparallel import ModelParallelConfig

    given = {name: options[name] for name in _DEGREES if options[name] is not None}
    if file is not None:
        if given:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise UsageError(f"`{flag}` cannot be given beside a file", hint="change a setting of it with `--set`")
        return _world_of_file(file, overrides, options)
    if overrides:
        raise UsageError("`--set` changes a setting of a file, and none is given", hint="name a job file")
    if not given:
        raise UsageError("neither a file nor a degree is given", hint="try `smpkit plan job.yaml`, or `--pp 4`")
    if given.get("tensor_parallel_degree", 1) > 1:
        given["ddp"] = True
    parameters, _ = ModelParallelConfig.from_sources(given, None)
    return _sized("", parameters, options, None, None, Path())


def _world_of_file(file: Path, overrides: Sequence[str], options: dict[str, Any]) -> _World:
    from smpkit.config.distribution import Distribution
    from smpkit.config.load import LoadedJob, load
    from smpkit.config.modelparallel import ModelParallelConfig

    loaded = load(file, overrides)
    for notice in loaded.notices:
        _console.current().warn(notice)
    if isinstance(loaded, LoadedJob):
        job = loaded.config
        place = loaded.locate(job.source_dir)
        source = place if isinstance(place, Path) else file.parent
        parameters = job.distribution.model_parallel or ModelParallelConfig()
        per_host = job.distribution.processes_per_host
        return _sized(job.name, parameters, options, job.compute.instance_count, per_host, source)
    config = loaded.config
    if isinstance(config, Distribution):
        parameters = config.model_parallel or ModelParallelConfig()
        return _sized("", parameters, options, None, config.processes_per_host, file.parent)
    assert isinstance(config, ModelParallelConfig)
    return _sized("", config, options, None, None, file.parent)


def _sized(
    name: str,
    parameters: ModelParallelConfig,
    options: dict[str, Any],
    hosts: int | None,
    per_host: int | None,
    source: Path,
) -> _World:
    """Decide how many ranks there are, on how many hosts; what nobody said is the least that holds one model."""
    hosts = options["hosts"] or hosts or 1
    needed = parameters.pipeline_parallel_degree * parameters.tensor_parallel_degree
    ranks = options["ranks"] or (hosts * per_host if per_host else -(-needed // hosts) * hosts)
    if min(ranks, hosts) < 1 or ranks % hosts:
        problem = Problem((), f"{ranks} ranks cannot be spread evenly over {hosts} hosts", "change --ranks or --hosts")
        raise ConfigError([problem], subject="plan")
    if problems := parameters.world_problems(ranks):
        raise ConfigError(problems, subject="plan")
    return _World(name, parameters, ranks, hosts, source)


# --- the plan ---------------------------------------------------------------------------------------------------------


def _plan_of(world: _World) -> _Plan:
    from smpkit.plan.mesh import Mesh
    from smpkit.plan.simulate import simulate

    cfg = world.parameters
    mesh = Mesh.from_world(
        world.ranks, cfg.pipeline_parallel_degree, cfg.tensor_parallel_degree, cfg.placement_strategy
    )
    return _Plan(world, mesh, simulate(_schedule(cfg)))


def _schedule(cfg: ModelParallelConfig) -> Schedule:
    """Choose the order as the runtime does, for a model in which every rank hands on to the next."""
    from smpkit.plan.schedule import SegmentGraph, interleaved, simple

    graph = SegmentGraph.chain(cfg.pipeline_parallel_degree, cfg.pipeline != "_only_forward")
    if cfg.pipeline == "interleaved":
        return interleaved(graph, cfg.microbatches, cfg.active_microbatches)
    return simple(graph, cfg.microbatches)


def _with_model(made: _Plan, options: dict[str, Any]) -> _Plan:
    """Add the partition assignment that the runtime would choose, the memory, and the bubble of these parts."""
    from smpkit.plan.actions import Costs
    from smpkit.plan.memory import OPTIMIZERS, memory_of_ranks
    from smpkit.plan.partition import partition
    from smpkit.plan.segments import Segment
    from smpkit.plan.simulate import simulate

    cfg = made.world.parameters
    if not cfg.auto_partition:
        message = "with `auto_partition: false` the script itself places modules (`smp.partition`), which is not known"
        raise UnsupportedError(message, hint="plan without `--model`, or with `--set` auto_partition back to true")
    model = _describe(options["model"], made.world.source)
    assignment = partition(model.costs, cfg.pipeline_parallel_degree, cfg.memory_weight)
    seconds = {Segment(rank, 0): load.flops for rank, load in enumerate(assignment.loads)}
    if any(seconds.values()):
        costs = Costs(seconds, {segment: 2 * flops for segment, flops in seconds.items()})
        made = replace(made, timeline=simulate(made.timeline.schedule, costs))
    memory = memory_of_ranks(
        model,
        assignment,
        live_microbatches=made.timeline.peak_live_microbatches,
        states_per_parameter=OPTIMIZERS[options["optimizer"]],
        replicated=cfg.ddp and made.mesh.dp_size > 1,
    )
    limit = options["memory_gib"]
    return replace(
        made, model=model, assignment=assignment, memory=memory, optimizer=options["optimizer"], limit_gib=limit
    )


def _describe(target: str, source: Path) -> ModelFacts:
    """Ask a process that imports torch and the user's module; this one does neither."""
    from smpkit.plan.memory import ModelFacts

    safe = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe, "-m", _DESCRIBE, target, str(source.absolute())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"`{target}` did not return within {_DEADLINE_SECONDS} s") from None
    if done.stderr:
        _console.current().detail(done.stderr.rstrip())
    if done.returncode == 0:
        return ModelFacts.from_json(done.stdout)
    raise _failure(target, done)


def _failure(target: str, done: subprocess.CompletedProcess[str]) -> SmpkitError:
    from smpkit.config.words import printable

    try:
        said = json.loads(done.stdout)
        return UsageError(printable(said["error"]), hint=said["hint"])
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        what = f"`{target}` could not be described (exit code {done.returncode}): {printable(last)}"
        return SmpkitError(what, hint="`-v` shows all it said; planning a model needs `pip install smpkit[torch]`")


# --- for eyes ---------------------------------------------------------------------------------------------------------


def _report(made: _Plan) -> Iterator[str]:
    world, mesh = made.world, made.mesh
    hosts = f"{world.hosts} host{'s' * (world.hosts != 1)}"
    ranks = f"{world.ranks} rank{'s' * (world.ranks != 1)}"
    yield f"{f'{world.name}: ' if world.name else ''}{ranks} on {hosts}"
    yield ""
    yield f"mesh      pipeline {mesh.pp_size} × tensor {mesh.tp_size} × data {mesh.rdp_size}, {mesh.strategy}"
    yield from _indented(mesh.draw())
    yield ""
    yield from _groups(made)
    yield ""
    yield from _picture(made)
    if made.model is not None:
        yield ""
        yield from _partition(made)
        yield ""
        yield from _memory(made)


def _indented(text: str) -> Iterator[str]:
    yield from (f"          {line}".rstrip() for line in text.splitlines())


def _groups(made: _Plan) -> Iterator[str]:
    from smpkit.plan.mesh import CommGroup

    per_host = made.world.per_host
    hosts = [range(host * per_host, (host + 1) * per_host) for host in range(made.world.hosts)]
    yield f"hosts     {_listed([tuple(ranks) for ranks in hosts])}"
    for name, kind in (("mp", CommGroup.MP_GROUP), ("dp", CommGroup.DP_GROUP), ("tp", CommGroup.TP_GROUP)):
        yield f"{name} groups {_listed(made.mesh.groups(kind))}"


def _listed(groups: Sequence[Sequence[int]]) -> str:
    shown = [_span(group) for group in groups[:_MAX_GROUPS]]
    more = [f"and {len(groups) - _MAX_GROUPS} more"] if len(groups) > _MAX_GROUPS else []
    return "  ".join(shown + more)


def _span(ranks: Sequence[int]) -> str:
    """Write ranks as `0–3` or, with equal steps, `0,2–6`."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])):
        return f"{ranks[0]},{ranks[1]}–{ranks[-1]}"
    return ",".join(map(str, ranks))


def _picture(made: _Plan) -> Iterator[str]:
    from smpkit.plan.draw import draw

    cfg, schedule = made.world.parameters, made.timeline.schedule
    count = f"{schedule.num_microbatches} microbatches, at most {cfg.active_microbatches} active"
    yield f"schedule  {schedule.name}, {count}, predicted bubble {made.timeline.bubble:.1%}"
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    for line in draw(schedule).splitlines():
        yield line if len(line) <= width else f"{line[: width - 1]}…"
    live = "  ".join(map(str, made.timeline.peak_live_microbatches))
    yield f"live      {live}   (microbatches that each stage holds at its peak)"


def _partition(made: _Plan) -> Iterator[str]:
    assert made.assignment is not None
    assert made.model is not None
    how = "by traced compute and memory" if made.model.traced else "by parameter sizes (as with skip_tracing)"
    yield f"parts     of {made.model.name}, {how}; the busiest has {made.assignment.compute_imbalance:.2f} × the mean"
    for stage, memory in enumerate(made.memory):
        names = made.assignment.names(stage)
        count = _count(memory.num_parameters)
        yield f"stage {stage}   {count:>8} parameters in {len(names)} units: {_shortened(names)}"
    shared = sorted({name for unit in made.model.units for name in unit.cost.shared})
    if shared:
        yield f"shared    {_shortened(shared)}"


def _shortened(names: Sequence[str]) -> str:
    from smpkit.config.words import printable

    shown = [printable(name) for name in names]
    return ", ".join(shown) if len(shown) <= 4 else f"{shown[0]}, {shown[1]}, … {shown[-1]}"


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _memory(made: _Plan) -> Iterator[str]:
    unit, size = ("GiB", _GIB) if max(memory.total_bytes for memory in made.memory) >= _GIB else ("MiB", _MIB)
    head = [unit, "parameters", "gradients", "reduction", made.optimizer, "activations", "total"]
    rows = [head if made.limit_gib is None else [*head, f"of {made.limit_gib:g} GiB"]]
    for stage, memory in enumerate(made.memory):
        known = (memory.parameters_bytes, memory.gradients_bytes, memory.reduction_bytes, memory.optimizer_bytes)
        cells = [f"{num_bytes / size:.1f}" for num_bytes in known]
        cells.append("unknown" if memory.activations_bytes is None else f"{memory.activations_bytes / size:.1f}")
        cells.append(f"{memory.total_bytes / size:.1f}")
        fits = [] if made.limit_gib is None else ["fits" if made.fits(stage) else "does not fit"]
        rows.append([f"stage {stage}", *cells, *fits])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
    dtypes = sorted({dtype for memory in made.memory for dtype in memory.dtypes})
    yield f"(parameters and buffers in {', '.join(dtypes)}; at the peak of live microbatches)"


def _advise(made: _Plan) -> None:
    console = _console.current()
    too_big = [str(stage) for stage in range(len(made.memory)) if not made.fits(stage)]
    if too_big:
        console.warn(f"does not fit {made.limit_gib:g} GiB: stage {', '.join(too_big)}")
        console.hint("raise `pipeline_parallel_degree`, or lower `active_microbatches`")
    if made.model is not None and not made.model.traced:
        console.note("note: for compute and activations, let the factory return (model, arguments of one microbatch)")


# --- for programs -----------------------------------------------------------------------------------------------------


def _plain(made: _Plan) -> dict[str, Any]:
    from smpkit.plan.mesh import CommGroup

    mesh, schedule = made.mesh, made.timeline.schedule
    result: dict[str, Any] = {
        "name": made.world.name or None,
        "ranks": made.world.ranks,
        "hosts": made.world.hosts,
        "mesh": {"pipeline": mesh.pp_size, "tensor": mesh.tp_size, "data": mesh.rdp_size, "placement": mesh.strategy},
        "groups": {
            kind.value.removesuffix("_GROUP").lower(): [list(group) for group in mesh.groups(kind)]
            for kind in (CommGroup.MP_GROUP, CommGroup.DP_GROUP, CommGroup.TP_GROUP, CommGroup.PP_GROUP)
        },
        "schedule": {
            "name": schedule.name,
            "microbatches": schedule.num_microbatches,
            "bubble": made.timeline.bubble,
            "peak_live_microbatches": list(made.timeline.peak_live_microbatches),
            "actions": [" ".join(map(str, actions)) for actions in schedule.actions],
        },
    }
    return result if made.model is None else {**result, **_plain_model(made)}


def _plain_model(made: _Plan) -> dict[str, Any]:
    assert made.assignment is not None
    assert made.model is not None
    stages = [
        {
            "units": list(made.assignment.names(stage)),
            **{name: getattr(memory, name) for name in memory.__dataclass_fields__},
            "total_bytes": memory.total_bytes,
            "fits": None if made.limit_gib is None else made.fits(stage),
        }
        for stage, memory in enumerate(made.memory)
    ]
    shared = sorted({name for unit in made.model.units for name in unit.cost.shared})
    return {
        "model": made.model.name,
        "traced": made.model.traced,
        "optimizer": made.optimizer,
        "memory_gib": made.limit_gib,
        "compute_imbalance": made.assignment.compute_imbalance,
        "shared_parameters": shared,
        "stages": stages,
    }
