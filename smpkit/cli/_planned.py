"""What `smpkit plan` decides, as the runtime would: one plan, or one for each file and each value of a sweep."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from smpkit.cli._world import World, describe, world_of
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.config.words import printable
from smpkit.errors import ConfigError, Problem, UsageError
from smpkit.plan.decide import Plan, decide
from smpkit.plan.memory import ModelFacts
from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.speed import Speed
from smpkit.plan.tune.chain import Choice
from smpkit.plan.tune.features import Feature, automatic, features, step_of

__all__ = ["Asked", "Planned", "Row", "best_of", "plans_of", "rows_of"]

_GIB: Final = 2**30
_MOST_PLANS: Final = 64
"""Of a sweep: more are for `smpkit tune`."""


@dataclass(frozen=True)
class Asked:
    """The options that hold for each plan."""

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
    ranks: int
    hosts: int
    plan: Plan
    asked: Asked | None = None
    features: tuple[Feature, ...] = ()
    """What features save and cost, if compute and activations are known."""
    automatic: Mapping[str, Choice] | None = None
    """What layers of strategy "auto" would do, if a limit of memory is given and they fit."""

    @property
    def limit_gib(self) -> float | None:
        return None if self.asked is None else self.asked.memory_gib

    def fits(self, stage: int) -> bool:
        return self.limit_gib is None or self.plan.memory[stage].total_bytes <= self.limit_gib * _GIB

    @property
    def all_fit(self) -> bool:
        return all(map(self.fits, range(len(self.plan.memory))))


@dataclass(frozen=True)
class Row:
    """One of several plans."""

    name: str
    values: Mapping[str, str]
    """What it differs in."""
    planned: Planned | None
    refusal: str = ""
    """Why there is none."""

    @property
    def seconds(self) -> float | None:
        """Of the simulated step, for each sample: with fewer replicas a step has fewer; None without a traced model."""
        plan = None if self.planned is None else self.planned.plan
        if plan is None or plan.model is None or not plan.model.traced:
            return None
        samples = plan.model.samples * plan.mesh.rdp_size * plan.timeline.schedule.num_microbatches
        return step_of(plan) / samples if samples else None


def plans_of(worlds: Sequence[World], asked: Asked) -> list[Planned | ConfigError]:
    """Decide as the runtime would; with a model also its partition, its memory and the bubble of its parts."""
    sizes = [_size(world, asked) for world in worlds]
    fine = [(world, size) for world, size in zip(worlds, sizes, strict=True) if not isinstance(size, ConfigError)]
    models = iter(_described(fine, asked.model) if asked.model else [None] * len(fine))
    return [
        size if isinstance(size, ConfigError) else _plan(world, *size, asked, next(models))
        for world, size in zip(worlds, sizes, strict=True)
    ]


def _size(world: World, asked: Asked) -> tuple[int, int] | ConfigError:
    """Return the number of ranks and of hosts; by default the fewest ranks that hold one model."""
    hosts = asked.hosts or world.hosts
    needed = world.parameters.pipeline_parallel_degree * world.parameters.tensor_parallel_degree
    ranks = asked.ranks or hosts * (world.per_host or -(-needed // hosts))
    if ranks % hosts:
        message = f"{ranks} ranks cannot be spread evenly over {hosts} hosts"
        return ConfigError([Problem((), message, "change --ranks or --hosts")], subject="plan")
    problems = world.parameters.world_problems(ranks)
    return ConfigError(problems, subject="plan") if problems else (ranks, hosts)


def _plan(world: World, ranks: int, hosts: int, asked: Asked, model: ModelFacts | None) -> Planned | ConfigError:
    config, speed = world.parameters, asked.speed
    if model is None:
        return Planned(world, ranks, hosts, decide(config, ranks))
    try:
        plan = decide(config, ranks, model, speed, asked.optimizer)
    except ConfigError as error:
        return error
    if not model.traced:
        return Planned(world, ranks, hosts, plan, asked)
    known = tuple(features(config, ranks, model, speed, asked.optimizer, plan))
    limit_gib, choices = config.memory_budget_gib or asked.memory_gib, None
    if limit_gib is not None:
        choices = automatic(config, model, plan, speed, limit_gib * _GIB, on_host=world.computes_on_host)
    return Planned(world, ranks, hosts, plan, asked, known, choices)


def _described(worlds: Sequence[tuple[World, tuple[int, int]]], target: str) -> Iterator[ModelFacts]:
    """Yield the model of each world; those that cut, divide and cast it alike share a description.

    What can be described together is, by one process, since each imports the user's module and torch.
    """
    groups: dict[Any, dict[Any, World]] = {}
    keys = [_keys_of(world, ranks) for world, (ranks, _) in worlds]
    for (world, _), (group, key) in zip(worlds, keys, strict=True):
        groups.setdefault(group, {}).setdefault(key, world)
    known = {}
    for group, members in groups.items():
        folder, ranks, _ = group
        models = describe(target, folder, [world.parameters for world in members.values()], ranks)
        known[group] = dict(zip(members, models, strict=True))
    for group, key in keys:
        yield known[group][key]


def _keys_of(world: World, ranks: int) -> tuple[Any, Any]:
    """Return what worlds have in common that one process can describe, and those that share a description."""
    config = world.parameters
    cut = (config.pipeline_parallel_degree, config.virtual_pipeline_degree)
    kinds = (config.bf16, config.fp16, config.prescaled_batch, config.optimize, config.tensor_parallel_degree)
    group = (world.folder, ranks, () if config.auto_partition else cut)
    return group, (cut, config.memory_weight, kinds, config.sharded_data_parallel_degree > 1)


def rows_of(files: Sequence[Path], sweeps: Sequence[str], overrides: Sequence[str], asked: Asked) -> list[Row]:
    """Plan each file with each combination of values; those that the schema refuses are rows with the reason."""
    axes = [[(key, value) for value in values] for key, values in map(_axis, sweeps)]
    combinations = [(file, changes) for file in files for changes in itertools.product(*axes)]
    if len(combinations) > _MOST_PLANS:
        raise UsageError(f"the sweep has {len(combinations)} plans, more than {_MOST_PLANS}", hint="use `smpkit tune`")
    parameters = set(ModelParallelConfig.keys())
    worlds: list[World | ConfigError] = []
    for file, changes in combinations:
        settings = [f"{'-p ' * (key in parameters)}{key}={value}" for key, value in changes]
        try:
            worlds.append(world_of(file, [*overrides, *settings]))
        except ConfigError as error:
            if not changes:  # a file that is wrong as it is says all that is wrong
                raise
            worlds.append(error)
    plans = iter(plans_of([world for world in worlds if isinstance(world, World)], asked))
    rows = []
    for (file, changes), world in zip(combinations, worlds, strict=True):
        parts = [*[str(file)] * (len(files) > 1), *(f"{key.rpartition('.')[2]} {value}" for key, value in changes)]
        planned = world if isinstance(world, ConfigError) else next(plans)
        name = ", ".join(parts)
        if isinstance(planned, ConfigError):
            problem = planned.problems[0]
            rows.append(Row(name, dict(changes), None, f"{problem.where} {problem.message}".strip()))
        else:
            rows.append(Row(name, dict(changes), planned))
    return rows


def _axis(sweep: str) -> tuple[str, list[str]]:
    """Read `KEY=V1,V2`."""
    key, _, text = sweep.partition("=")
    values = [value.strip() for value in text.split(",") if value.strip()]
    if not key.strip() or not values:
        raise UsageError(f"`--sweep {printable(sweep)}` has no values", hint="write `--sweep microbatches=4,8,16`")
    return key.strip(), values


def best_of(rows: Sequence[Row]) -> Row | None:
    """Return the fastest that fits; without a model the one with the smallest bubble, of several the shallowest.

    None where there is no choice, or where the plans are for different numbers of ranks.
    """
    able = [row for row in rows if row.planned is not None and row.planned.all_fit]
    is_choice = len(able) > 1 and len({row.planned.ranks for row in able if row.planned is not None}) == 1

    def order(row: Row) -> tuple[float, float, int]:
        assert row.planned is not None
        timeline = row.planned.plan.timeline
        return row.seconds or 0.0, timeline.bubble, max(timeline.peak_live_microbatches)

    return min(able, key=order) if is_choice else None
