"""What `smpkit plan` shows: who takes part, in which order they work, who holds what."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from smpkit.cli import _console, _plan_offload
from smpkit.errors import ConfigError, DeadlineError, Problem, SmpkitError, UsageError
from smpkit.modules import module_command

if TYPE_CHECKING:
    from smpkit.config.modelparallel import ModelParallelConfig
    from smpkit.plan.memory import ModelFacts, RankMemory, Share
    from smpkit.plan.mesh import Mesh
    from smpkit.plan.offload.forecast import Forecast, Speed
    from smpkit.plan.partition.assignment import Assignment, UnitCost
    from smpkit.plan.schedule.actions import Costs, Schedule
    from smpkit.plan.schedule.graph import Segment, SegmentGraph
    from smpkit.plan.schedule.simulate import Timeline

__all__ = ["Plan", "World", "describe", "plan_of", "speed_of", "with_model", "world_of"]

_DEADLINE_SECONDS: Final = 600
_DESCRIBE: Final = "smpkit.torch.describe"
GIB: Final = 1024**3


@dataclass(frozen=True)
class World:
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
class Plan:
    """Everything that is printed."""

    world: World
    mesh: Mesh
    timeline: Timeline
    model: ModelFacts | None = None
    assignment: Assignment | None = None
    memory: tuple[RankMemory, ...] = ()
    optimizer: str = ""
    limit_gib: float | None = None
    speed: Speed | None = None
    forecasts: tuple[Forecast, ...] = ()
    """What activation offloading does on each stage, where it is on and something is checkpointed."""

    def fits(self, stage: int) -> bool:
        return self.limit_gib is None or self.memory[stage].total_bytes <= self.limit_gib * GIB


# --- who takes part ---------------------------------------------------------------------------------------------------

_DEGREES: Final = ("pipeline_parallel_degree", "tensor_parallel_degree", "microbatches")


def world_of(file: Path | None, overrides: Sequence[str], options: dict[str, Any]) -> World:
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


def _world_of_file(file: Path, overrides: Sequence[str], options: dict[str, Any]) -> World:
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
        return _sized(job.name, parameters, options, job.num_rank_hosts, per_host, source)
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
) -> World:
    """Decide the number of ranks and of hosts; by default the fewest ranks that hold one model."""
    hosts = options["hosts"] or hosts or 1
    needed = parameters.pipeline_parallel_degree * parameters.tensor_parallel_degree
    ranks = options["ranks"] or (hosts * per_host if per_host else -(-needed // hosts) * hosts)
    if min(ranks, hosts) < 1 or ranks % hosts:
        problem = Problem((), f"{ranks} ranks cannot be spread evenly over {hosts} hosts", "change --ranks or --hosts")
        raise ConfigError([problem], subject="plan")
    if problems := parameters.world_problems(ranks):
        raise ConfigError(problems, subject="plan")
    return World(name, parameters, ranks, hosts, source)


# --- the plan ---------------------------------------------------------------------------------------------------------


def plan_of(world: World) -> Plan:
    """Plan for a model in which every part hands on to the next one."""
    from smpkit.plan.mesh import Mesh
    from smpkit.plan.schedule.actions import Costs
    from smpkit.plan.schedule.graph import SegmentGraph
    from smpkit.plan.schedule.simulate import simulate

    cfg = world.parameters
    mesh = Mesh.from_world(
        world.ranks, cfg.pipeline_parallel_degree, cfg.tensor_parallel_degree, cfg.placement_strategy
    )
    num_chunks = cfg.virtual_pipeline_degree if cfg.pipeline_parallel_degree > 1 else 1
    graph = SegmentGraph.loop(cfg.pipeline_parallel_degree, num_chunks, cfg.pipeline != "_only_forward")
    costs = Costs(1 / num_chunks, 2 / num_chunks)
    return Plan(world, mesh, simulate(_schedule(cfg, graph), costs))


def _schedule(cfg: ModelParallelConfig, graph: SegmentGraph) -> Schedule:
    """Choose the order as the runtime does."""
    from smpkit.plan.schedule.search import interleaved, simple

    if cfg.pipeline in ("interleaved", "zero_bubble"):
        split = cfg.pipeline == "zero_bubble"
        return interleaved(graph, cfg.microbatches, cfg.active_microbatches, split_backward=split)
    return simple(graph, cfg.microbatches)


def with_model(made: Plan, options: dict[str, Any]) -> Plan:
    """Add the partition assignment that the runtime would choose, the memory, and the bubble of these parts."""
    from smpkit.plan.memory import OPTIMIZERS, memory_of_ranks
    from smpkit.plan.offload.forecast import forecast
    from smpkit.plan.schedule.linear_graph import linear_graph, peak_live_shares, runs_of
    from smpkit.plan.schedule.simulate import simulate

    cfg = made.world.parameters
    model = describe(options["model"], made.world.source, cfg, made.world.ranks)
    assignment = _assignment(cfg, model)
    speed = speed_of(options)
    runs = runs_of(model.costs, assignment)
    schedule = _schedule(cfg, linear_graph(runs, cfg.pipeline_parallel_degree, cfg.pipeline != "_only_forward"))
    timeline = simulate(schedule, _costs(schedule, runs, speed))
    forecasts: tuple[Forecast, ...] = ()
    if cfg.offload_activations and _plan_offload.has_boundaries(model):
        forecasts = forecast(model, assignment, timeline, cfg.activation_loading_horizon, speed)
    live = peak_live_shares(schedule, runs)
    half = None
    if cfg.fp16:
        half = "float16"
    elif cfg.bf16:
        half = "bfloat16"

    def memory_with(share: Share) -> tuple[RankMemory, ...]:
        return memory_of_ranks(
            model,
            assignment,
            live_microbatches=live,
            states_per_parameter=OPTIMIZERS[options["optimizer"]],
            replicated=cfg.ddp and made.mesh.dp_size > 1,
            offloaded=[(each.device_bytes, each.host_bytes) for each in forecasts],
            share=share,
            persistent=cfg.sdp_param_persistence_threshold,
            half=half,
        )

    memory = tuple(_largest(made, stage, memory_with) for stage in range(assignment.num_partitions))
    return replace(
        made,
        timeline=timeline,
        model=model,
        assignment=assignment,
        memory=memory,
        optimizer=options["optimizer"],
        limit_gib=options["memory_gib"],
        speed=speed,
        forecasts=forecasts,
    )


def _largest(made: Plan, stage: int, memory_with: Callable[[Share], tuple[RankMemory, ...]]) -> RankMemory:
    """Return the memory of the rank of a stage that holds most."""
    from smpkit.plan.memory import shares_of

    cfg = made.world.parameters
    shares = shares_of(
        made.mesh,
        stage,
        shards_states=cfg.shard_optimizer_state,
        sharding_degree=cfg.sharded_data_parallel_degree,
    )
    return max((memory_with(share)[stage] for share in shares), key=lambda memory: memory.total_bytes)


def _costs(schedule: Schedule, runs: Mapping[Segment, Sequence[UnitCost]], speed: Speed) -> Costs:
    """Return what the parts take, a backward twice a forward and what is computed again; untraced ranks count alike."""
    from smpkit.plan.schedule.actions import Costs

    forward = {segment: sum(unit.flops for unit in run) / speed.flops_per_second for segment, run in runs.items()}
    if not any(forward.values()):
        forward = {segment: 1 / schedule.graph.counts[segment.rank] for segment in runs}
    again = {segment: sum(unit.recomputed_flops for unit in run) for segment, run in runs.items()}
    backward = {each: 2 * forward[each] + again[each] / speed.flops_per_second for each in runs}
    weight = {each: 0.0 if again[each] else forward[each] for each in runs}  # what is computed again is not split
    return Costs(forward, backward, weight)


def speed_of(options: dict[str, Any]) -> Speed:
    """Return the speed of a device and of its link, as the options say."""
    from smpkit.plan.offload.forecast import Speed
    from smpkit.plan.offload.work import LinkSpeed

    for flag in ("tflops", "link_gbs"):
        if options[flag] <= 0:
            raise UsageError(f"`--{flag.replace('_', '-')}` is {options[flag]:g}", hint="give more than 0")
    return Speed(options["tflops"] * 1e12, LinkSpeed(options["link_gbs"] * 1e9, options["link_gbs"] * 1e9))


def _assignment(cfg: ModelParallelConfig, model: ModelFacts) -> Assignment:
    from smpkit.plan.partition.search import assign, partition

    degree, num_chunks = cfg.pipeline_parallel_degree, cfg.virtual_pipeline_degree
    if cfg.auto_partition:
        return partition(model.costs, degree, cfg.memory_weight, num_chunks=num_chunks)
    return assign(model.costs, degree, model.places, cfg.default_partition, num_chunks)


def describe(target: str, source: Path, cfg: ModelParallelConfig | None = None, ranks: int = 1) -> ModelFacts:
    """Ask a process that imports torch and the user's module; this one does neither.

    Args:
        target: `module:factory`.
        source: the folder where the module is found.
        cfg: says how many places there are, whether the model's own choice of them counts, and what is divided.
        ranks: how many the job has.
    """
    from smpkit.plan.memory import ModelFacts

    num_places = 1 if cfg is None else cfg.pipeline_parallel_degree * cfg.virtual_pipeline_degree
    places = f"--places={num_places}" if cfg is None or cfg.auto_partition else f"--by-hand={num_places}"
    job = [] if cfg is None else [f"--job={ranks}:{cfg.model_dump_json(by_alias=True)}"]
    command = [*module_command(_DESCRIBE), places, *job, target, str(source.absolute())]
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
