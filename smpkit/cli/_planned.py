"""What `smpkit plan` shows: who takes part, in which order they work, who holds what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from smpkit.cli import _console
from smpkit.cli._with_torch import ask
from smpkit.errors import ConfigError, Problem, UsageError

if TYPE_CHECKING:
    from smpkit.config.modelparallel import ModelParallelConfig
    from smpkit.plan.decide import Plan
    from smpkit.plan.memory import ModelFacts
    from smpkit.plan.speed import Speed
    from smpkit.plan.tune.chain import Choice
    from smpkit.plan.tune.features import Feature

__all__ = ["Planned", "World", "describe", "describe_each", "plan_of", "speed_of", "world_of"]

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
class Planned:
    """Everything that is printed."""

    world: World
    plan: Plan
    optimizer: str = ""
    limit_gib: float | None = None
    speed: Speed | None = None
    features: tuple[Feature, ...] = ()
    """What features save and cost, if compute and activations are known."""
    automatic: Mapping[str, Choice] | None = None
    """What layers of strategy "auto" would do, if a limit of memory is given and they fit."""

    def fits(self, stage: int) -> bool:
        return self.limit_gib is None or self.plan.memory[stage].total_bytes <= self.limit_gib * GIB


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


def plan_of(world: World, options: dict[str, Any], model: ModelFacts | None = None) -> Planned:
    """Decide as the runtime would; with a model also its partition, its memory and the bubble of its parts.

    Args:
        model: of this world, if it has been described already.
    """
    from smpkit.plan.decide import decide

    if not options["model"]:
        return Planned(world, decide(world.parameters, world.ranks))
    if model is None:
        model = describe(options["model"], world.source, world.parameters, world.ranks)
    speed, optimizer = speed_of(options), options["optimizer"]
    plan = decide(world.parameters, world.ranks, model, speed, optimizer)
    found: list[Feature] = []
    chosen: Mapping[str, Choice] | None = None
    if model.traced:
        from smpkit.plan.tune.features import automatic, features

        found = features(world.parameters, world.ranks, model, speed, optimizer, plan)
        limit_gib = world.parameters.memory_budget_gib or options["memory_gib"]
        if limit_gib is not None:
            chosen = automatic(world.parameters, model, plan, speed, limit_gib * GIB)
    return Planned(world, plan, optimizer, options["memory_gib"], speed, tuple(found), chosen)


def speed_of(options: dict[str, Any]) -> Speed:
    """Return the speed of a device and of its link, as the options say."""
    from smpkit.plan.offload.work import LinkSpeed
    from smpkit.plan.speed import Speed

    for flag in ("tflops", "link_gbs"):
        if options[flag] <= 0:
            raise UsageError(f"`--{flag.replace('_', '-')}` is {options[flag]:g}", hint="give more than 0")
    return Speed(options["tflops"] * 1e12, LinkSpeed(options["link_gbs"] * 1e9, options["link_gbs"] * 1e9))


def describe(target: str, source: Path, cfg: ModelParallelConfig | None = None, ranks: int = 1) -> ModelFacts:
    """Ask a process that imports torch and the user's module; this one does neither.

    Args:
        target: `module:factory`.
        source: the folder where the module is found.
        cfg: says how many places there are, whether the model's own choice of them counts, and what is divided.
        ranks: how many the job has.
    """
    return describe_each(target, source, [] if cfg is None else [cfg], ranks)[0]


def describe_each(
    target: str, source: Path, configs: Sequence[ModelParallelConfig], ranks: int = 1, *, other_sizes: bool = False
) -> list[ModelFacts]:
    """Describe a model for several jobs, in one process; without any for one job with default parameters.

    Args:
        other_sizes: microbatches of other sizes will be planned, too.
    """
    from smpkit.plan.memory import ModelFacts

    num_places = max((each.pipeline_parallel_degree * each.virtual_pipeline_degree for each in configs), default=1)
    by_hand = any(not each.auto_partition for each in configs)
    places = f"--by-hand={num_places}" if by_hand else f"--places={num_places}"
    jobs = [f"--job={ranks}:{each.model_dump_json(by_alias=True)}" for each in configs]
    sizes = ["--other-sizes"] if other_sizes else []
    arguments = [places, *sizes, *jobs, target, str(source.absolute())]
    what = f"`{target}` could not be described"
    said = ask(_DESCRIBE, arguments, what, "planning a model", _DEADLINE_SECONDS)
    return [ModelFacts.from_json(line) for line in said.splitlines()]
