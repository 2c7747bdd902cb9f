"""Predict a step of one configuration on one machine: `decide` says what runs, and here it gets times and limits.

A step is the simulated schedule, and what it cannot hide: averaged gradients, gathered parameters, offloaded inputs
that come late, and the optimizer. What each layer keeps is chosen stage by stage with what its rank has left, until the
plan that `decide` makes with these choices fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import ConfigError
from smpkit.plan.decide import Plan, decide
from smpkit.plan.memory import ModelFacts, RankMemory, UnitFacts, half_of, in_dtype
from smpkit.plan.mesh import CommGroup, Mesh
from smpkit.plan.optimizers import OPTIMIZERS
from smpkit.plan.partition.assignment import BYTES_PER_MICROBATCH, PER_MICROBATCH, UnitCost
from smpkit.plan.schedule.recorded_graph import grown
from smpkit.plan.speed import Speed
from smpkit.plan.tune.chain import ChainLayer, ChainLimits, Choice, choose, smallest_bytes
from smpkit.plan.tune.machine import Machine
from smpkit.units import amount

_FRAMEWORK_BYTES: Final = 2**30
"""What a process has on a GPU beside tensors."""
_FRAGMENTS: Final = 0.05
"""Of a GPU's memory, what an allocator cannot use."""
_HOST_SHARE: Final = 0.5
"""Of a host's memory, what may be offloaded to: the other half has data, workers, checkpoints on their way."""
_ROUNDS: Final = 4
"""How often choices are made anew because the partition has changed with them."""
_COLLECTIVES_OF_LAYER: Final = 2
"""In each pass a divided layer sums up, or gathers and scatters, after its attention and after its MLP."""


@dataclass(frozen=True)
class Job:
    """What is to be trained, and where."""

    models: Mapping[int, ModelFacts]
    """By tensor-parallel degree, described in the precision that the configurations have."""
    machine: Machine
    ranks: int
    samples: int
    """In a step, over all ranks."""
    optimizer: str = "adamw"

    @property
    def tokens(self) -> int:
        """In a step, over all ranks."""
        model = next(iter(self.models.values()))
        return round(self.samples * model.tokens / model.samples)

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.machine.ranks_per_host)


@dataclass(frozen=True)
class RuledOut:
    """Why a configuration cannot run."""

    kind: str
    """`memory`, `states` (they alone are too large), `batch` or `partition`."""
    reason: str
    missing_bytes: int = 0
    """How much memory it lacks."""


@dataclass(frozen=True)
class Prediction:
    """What a step of one configuration takes."""

    config: ModelParallelConfig
    job: Job
    plan: Plan
    choices: Mapping[str, Choice]
    """By unit, of those that can be recomputed."""
    parts: Mapping[str, float]
    """What the step is made of, in seconds: `compute` is that of the busiest rank, with recomputation."""
    gap: float
    """By which share another choice for the layers could be faster."""

    @property
    def step_seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.job.tokens / self.step_seconds

    @property
    def samples_per_microbatch(self) -> int:
        return _samples_per_microbatch(self.config, self.job) or 0

    @property
    def binds(self) -> str:
        """What to change first to be faster: the largest part beside plain compute, or compute itself."""
        model = self.plan.model
        assert model is not None
        again = sum(unit.cost.recomputed_flops for unit in model.units)
        share = again / (3 * sum(unit.cost.flops for unit in model.units) + again)
        parts = {**self.parts, "recomputation": share * self.parts["compute"]}
        parts["compute"] -= parts["recomputation"]
        name = max((part for part in parts if part != "compute"), key=lambda part: parts[part])
        if parts[name] < 0.1 * self.step_seconds:
            return "compute"
        return "memory (recomputation)" if name == "recomputation" else name


def usable_bytes(machine: Machine) -> int:
    """Return what tensors of a rank may occupy on its device."""
    if machine.on_host:
        return machine.device_bytes
    return max(0, round((1 - _FRAGMENTS) * machine.device_bytes) - _FRAMEWORK_BYTES)


def _samples_per_microbatch(config: ModelParallelConfig, job: Job) -> int | None:
    """Return how many samples of a step a rank computes at a time; None if they cannot be divided so."""
    mesh = Mesh.of(config, job.ranks)
    # Without `prescaled_batch` tensor-parallel ranks read samples of their own.
    readers = mesh.rdp_size if config.prescaled_batch else mesh.dp_size
    samples, rest = divmod(job.samples, readers * config.microbatches)
    return None if rest or not samples else samples


def predict(config: ModelParallelConfig, job: Job) -> Prediction | RuledOut:
    """Return what a step takes, or why there is none."""
    samples = _samples_per_microbatch(config, job)
    if samples is None:
        return RuledOut("batch", "the samples of a step cannot be divided over its ranks and microbatches")
    described = job.models[config.tensor_parallel_degree]
    model = as_divided(scaled(described, samples / described.samples), config)
    layers = layers_of(model)
    mesh = Mesh.of(config, job.ranks)
    speed = _speed(config, job.machine, mesh, model, layers)
    room = usable_bytes(job.machine), job.machine.host_bytes * _HOST_SHARE / job.machine.ranks_per_host
    choices: Mapping[str, Choice] = dict.fromkeys(layers, Choice.KEEP)
    gap = 0.0
    for _ in range(_ROUNDS):
        try:
            chosen = with_choices(model, layers, choices, mixed=config.offload_activations == "auto")
            plan = decide(config, job.ranks, chosen, speed, job.optimizer)
        except ConfigError as error:
            return RuledOut("partition", error.problems[0].message)
        if all(memory.total_bytes <= room[0] and memory.host_bytes <= room[1] for memory in plan.memory):
            return Prediction(config, job, plan, choices, _parts(config, job, model, plan, mesh, speed), gap)
        others = choose_layers(config, plan, layers, choices, room, speed, on_host=job.machine.on_host)
        if isinstance(others, RuledOut):
            return others
        if others[0] == choices:
            break
        choices, gap = others
    stage, memory = max(enumerate(plan.memory), key=lambda pair: pair[1].total_bytes)
    missing = memory.total_bytes - room[0]
    return RuledOut("memory", f"stage {stage} needs {amount(memory.total_bytes)}", max(0, missing))


def as_divided(model: ModelFacts, config: ModelParallelConfig) -> ModelFacts:
    """Return the model with what sharded data parallelism divides: in half precision the masters."""
    half = half_of(config)
    if half is None or config.sharded_data_parallel_degree == 1:
        return model
    tensors = {
        name: in_dtype(tensor, "float32", 4) if tensor.dtype == half else tensor
        for name, tensor in model.tensors.items()
    }
    return replace(model, tensors=tensors)


# --- time -------------------------------------------------------------------------------------------------------------


def _speed(
    config: ModelParallelConfig, machine: Machine, mesh: Mesh, model: ModelFacts, layers: Mapping[str, Layer]
) -> Speed:
    pipeline = machine.channel(_hosts(mesh, machine, CommGroup.PP_GROUP))
    return replace(
        machine.speed,
        flops_per_second=machine.flops(half_of(config)),
        message_latency_seconds=pipeline.latency_seconds,
        message_seconds_per_byte=1 / pipeline.bytes_per_second,
        collective_seconds=dict(_tensor_collectives(machine, mesh, model, layers)),
    )


def _hosts(mesh: Mesh, machine: Machine, kind: CommGroup) -> int:
    """Return over how many hosts the ranks of a group lie."""
    return len({rank // machine.ranks_per_host for rank in mesh.group(kind, 0)})


def _tensor_collectives(
    machine: Machine, mesh: Mesh, model: ModelFacts, layers: Mapping[str, Layer]
) -> Iterator[tuple[str, float]]:
    """Yield what each unit spends on collectives of tensor parallelism in its forward."""
    hosts = _hosts(mesh, machine, CommGroup.TP_GROUP)
    divided = {name for name, tensor in model.tensors.items() if tensor.pieces and mesh.tp_size > 1}
    for unit in model.units:
        if divided.isdisjoint(unit.tensors):
            continue
        layer = layers.get(unit.cost.name)
        times = 1 if layer is None else _COLLECTIVES_OF_LAYER
        size = unit.cost.output_bytes if layer is None else layer.input_bytes
        yield unit.cost.name, times * machine.collective_seconds("all_reduce", size, mesh.tp_size, hosts)


def _parts(
    config: ModelParallelConfig, job: Job, model: ModelFacts, plan: Plan, mesh: Mesh, speed: Speed
) -> dict[str, float]:
    """Return what a step is made of, in seconds."""
    assert plan.assignment is not None
    timeline, machine = plan.timeline, job.machine
    busy = [timeline.makespan_seconds - idle for idle in timeline.idle_seconds]
    slowest = max(range(len(busy)), key=lambda stage: busy[stage])
    units = plan.assignment.names(slowest)
    waited = 2 * config.microbatches * sum(speed.collective_seconds.get(name, 0.0) for name in units)
    # Ranks of a host that share cores need together at least this long: each computes more slowly.
    shared = mesh.size / len(busy) / job.hosts * sum(busy) / machine.parallel_ranks
    return {
        "compute": busy[slowest] - waited + max(0.0, shared - timeline.makespan_seconds),
        "bubble": timeline.makespan_seconds - busy[slowest],
        "communication": waited + _exposed_seconds(config, machine, model, plan, mesh, busy),
        "stall": max((forecast.stall_seconds for forecast in plan.forecasts), default=0.0),
        "optimizer": max(_num_updated(memory, job.optimizer) for memory in plan.memory) / machine.updates_per_second,
    }


def _exposed_seconds(
    config: ModelParallelConfig, machine: Machine, model: ModelFacts, plan: Plan, mesh: Mesh, busy: Sequence[float]
) -> float:
    """Return what communication between replicas adds: what the passes beside it do not hide."""
    rounds, hosts = config.microbatches, _hosts(mesh, machine, CommGroup.RDP_GROUP)
    degree = config.sharded_data_parallel_degree
    if degree > 1:
        half = half_of(config) is not None
        whole = sum(2 * tensor.num_elements if half else tensor.num_bytes for tensor in model.tensors.values())
        gather = machine.collective_seconds("all_gather", whole, degree, hosts)
        scatter = machine.collective_seconds("reduce_scatter", whole, degree, hosts)
        return max(0.0, rounds * (2 * gather + scatter) - busy[0])
    exposed = 0.0
    for stage, memory in enumerate(plan.memory):
        reduction = machine.collective_seconds("all_reduce", memory.reduction_bytes, mesh.rdp_size, hosts)
        # Buckets are averaged as they fill in the last backward, about two thirds of a microbatch's work.
        exposed = max(exposed, reduction - 2 / 3 * busy[stage] / rounds, 0.1 * reduction)
    return exposed


def _num_updated(memory: RankMemory, optimizer: str) -> float:
    states = OPTIMIZERS[optimizer]
    if memory.masters_bytes:
        return memory.masters_bytes / 4
    return memory.optimizer_bytes / (4 * states) if states else memory.gradients_bytes / 4


# --- what layers keep -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A unit that can be recomputed, for one microbatch."""

    saved_bytes: int
    input_bytes: int
    cost: UnitCost


def layers_of(model: ModelFacts) -> dict[str, Layer]:
    """Return the units that can be recomputed: the repeated blocks, each with what the unit before hands to it."""
    blocks = {name for block in model.blocks for name in block}
    layers: dict[str, Layer] = {}
    before = 0
    for unit in model.units:
        cost = unit.cost
        if before and unit.tensors and blocks.issuperset(name for name in unit.tensors if model.tensors[name].rows):
            # What a recomputation makes is an upper bound of what a layer keeps, where that is not known.
            saved = cost.activation_bytes - cost.boundary_bytes + (cost.spared_bytes or cost.recomputed_bytes)
            layers[cost.name] = Layer(saved, cost.boundary_bytes or before, cost)
        before = cost.output_bytes
    return layers


def choose_layers(
    config: ModelParallelConfig,
    plan: Plan,
    layers: Mapping[str, Layer],
    present: Mapping[str, Choice],
    room: tuple[float, float],
    speed: Speed,
    *,
    on_host: bool,
) -> tuple[dict[str, Choice], float] | RuledOut:
    """Choose for the layers of each stage, as the runtime does with strategy "auto".

    Args:
        plan: has cut the model, with the layers as in `present`.
        room: bytes of a rank, on its device and on the host.

    Returns:
        The choices, and by which share others could be faster; or why nothing fits.
    """
    assert plan.assignment is not None
    choices, gaps = dict(present), [0.0]
    allowed = _allowed_choices(config, on_host=on_host)
    for stage, memory in enumerate(plan.memory):
        units = [name for name in plan.assignment.names(stage) if name in layers]
        live = _live(config, plan, stage)
        kept = sum(
            layers[name].saved_bytes if present[name] is Choice.KEEP else layers[name].input_bytes for name in units
        )
        others = live * (plan.assignment.activation_bytes[stage] - kept)
        fixed = memory.static_bytes
        limits = ChainLimits(live, room[0] - fixed - others, room[1], speed.link, allowed=allowed)
        chain = [_chain_layer(layers[name], speed) for name in units]
        best = choose(chain, limits)
        if best is None:
            needed = fixed + others + smallest_bytes(chain, limits)
            missing = needed - room[0]
            what = "nothing kept" if units else "no layer that could be recomputed"
            reason = f"stage {stage} needs {amount(needed)} with {what}, of which {amount(fixed)} are no activations"
            return RuledOut("memory", reason, max(1, round(missing)) if missing < inf else 0)
        choices.update(zip(units, best.choices, strict=True))
        gaps.append(best.gap)
    return choices, max(gaps)


def _live(config: ModelParallelConfig, plan: Plan, stage: int) -> float:
    """Return how many microbatches a stage holds at its peak, a chunk of one counting as a part."""
    if config.virtual_pipeline_degree == 1:
        # The peak of a split backward is more than of whole microbatches: see `peaks`.
        splits = 1.0 + plan.timeline.schedule.splits_backward
        return min(plan.timeline.schedule.peak_live_microbatches[stage] * splits, 2.0 * config.microbatches)
    return plan.timeline.schedule.peak_live_segments[stage] / config.virtual_pipeline_degree


def _chain_layer(layer: Layer, speed: Speed) -> ChainLayer:
    seconds = speed.forward_seconds(layer.cost)
    return ChainLayer(seconds, 2 * seconds, layer.saved_bytes, layer.input_bytes)


def _allowed_choices(config: ModelParallelConfig, *, on_host: bool) -> frozenset[Choice]:
    """Return what the runtime chooses among for layers of strategy "auto"; on a CPU "auto" offloads nothing."""
    if config.offload_activations is True:
        return frozenset({Choice.KEEP, Choice.OFFLOAD})
    both = frozenset({Choice.KEEP, Choice.RECOMPUTE})
    return both | {Choice.OFFLOAD} if config.offload_activations == "auto" and not on_host else both


def with_choices(
    model: ModelFacts, layers: Mapping[str, Layer], choices: Mapping[str, Choice], *, mixed: bool = False
) -> ModelFacts:
    """Return the model in which layers are recomputed, unless they are kept.

    Args:
        mixed: some inputs are offloaded and others are not; else `offload_activations` says it for all of them.
    """
    units = []
    for unit in model.units:
        layer = layers.get(unit.cost.name)
        if layer is None:
            units.append(unit)
            continue
        recomputed = choices[unit.cost.name] is not Choice.KEEP
        stays = mixed and choices[unit.cost.name] is Choice.RECOMPUTE
        cost = replace(
            unit.cost,
            activation_bytes=layer.input_bytes if recomputed else layer.saved_bytes,
            boundary_bytes=layer.input_bytes if recomputed and not stays else 0,
            recomputed_bytes=unit.cost.recomputed_bytes or unit.cost.working_bytes or layer.saved_bytes
            if recomputed
            else 0,
            recomputed_flops=layer.cost.flops if recomputed else 0.0,
        )
        units.append(UnitFacts(cost, unit.tensors, unit.fixed))
    return replace(model, units=tuple(units))


def scaled(model: ModelFacts, factor: float) -> ModelFacts:
    """Return the model with microbatches of `factor` times the samples.

    Compute grows with them, and so do bytes, but for what is known to stay as it is.
    """
    if factor == 1:
        return model
    units = tuple(_scaled(unit, factor) for unit in model.units)
    recorded = None if model.recorded is None else model.recorded.with_samples(factor)
    return replace(model, units=units, recorded=recorded)


def _scaled(unit: UnitFacts, factor: float) -> UnitFacts:
    sizes = {name: grown(factor, unit.fixed.get(name, 0.0)) for name in PER_MICROBATCH}
    changes: dict[str, Any] = {name: size * getattr(unit.cost, name) for name, size in sizes.items()}
    changes |= {name: round(changes[name]) for name in BYTES_PER_MICROBATCH}
    fixed = {name: share / sizes[name] for name, share in unit.fixed.items()}
    return UnitFacts(replace(unit.cost, **changes), unit.tensors, fixed)
