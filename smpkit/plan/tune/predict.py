"""Predict a step of one configuration on one machine: `decide` says what runs, and here it gets times and limits.

A step is the simulated schedule, and what it cannot hide: averaged gradients, gathered parameters, offloaded inputs
that come late, and the optimizer. What each layer keeps is chosen stage by stage with what its rank has left, until the
plan that `decide` makes with these choices fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import ConfigError
from smpkit.plan.decide import Plan, decide
from smpkit.plan.memory import OPTIMIZERS, ModelFacts, RankMemory, UnitFacts, in_dtype
from smpkit.plan.mesh import CommGroup, Mesh
from smpkit.plan.partition.assignment import BYTES_PER_MICROBATCH, PER_MICROBATCH, UnitCost
from smpkit.plan.schedule.actions import Schedule
from smpkit.plan.schedule.recorded_graph import grown
from smpkit.plan.speed import Speed
from smpkit.plan.tune.chain import ChainLayer, ChainLimits, Choice, choose, smallest_bytes
from smpkit.plan.tune.machine import Machine

__all__ = [
    "Job",
    "Layer",
    "Prediction",
    "RuledOut",
    "allowed_choices",
    "choose_layers",
    "half_of",
    "in_precision",
    "layers_of",
    "predict",
    "samples_per_microbatch",
    "scaled",
    "usable_bytes",
    "with_choices",
]

_FRAMEWORK_BYTES: Final = 2**30
"""What a process has on a GPU beside tensors."""
_FRAGMENTS: Final = 0.05
"""Of a GPU's memory, what an allocator cannot use."""
_ROUNDS: Final = 4
"""How often choices are made anew because the partition has changed with them."""
_COLLECTIVES_OF_LAYER: Final = 2
"""In each pass a divided layer sums up, or gathers and scatters, after its attention and after its MLP."""


@dataclass(frozen=True)
class Job:
    """What is to be trained, and where."""

    models: Mapping[int, ModelFacts]
    """By tensor-parallel degree."""
    machine: Machine
    ranks: int
    samples: int
    """In a step, over all ranks."""
    optimizer: str = "adamw"
    half: str | None = None
    """The half precision that `models` are described in; None: single."""

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
    """Why a configuration is none."""

    kind: str
    """Such as `memory`; those of one kind are counted together."""
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
    compute_seconds: float
    """Of the busiest rank, recomputation included."""
    bubble_seconds: float
    communication_seconds: float
    stall_seconds: float
    optimizer_seconds: float
    gap: float
    """By which share another choice for the layers could be faster."""

    @property
    def step_seconds(self) -> float:
        return sum(seconds for _, seconds in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """What the step is made of, in seconds."""
        return (
            ("compute", self.compute_seconds),
            ("bubble", self.bubble_seconds),
            ("communication", self.communication_seconds),
            ("stall", self.stall_seconds),
            ("optimizer", self.optimizer_seconds),
        )

    @property
    def tokens_per_second(self) -> float:
        return self.job.tokens / self.step_seconds

    @property
    def samples_per_microbatch(self) -> int:
        return samples_per_microbatch(self.config, self.job) or 0

    @cached_property
    def fullest(self) -> tuple[int, RankMemory]:
        """The stage that holds most, and what it holds."""
        return max(enumerate(self.plan.memory), key=lambda pair: pair[1].total_bytes)

    @property
    def binds(self) -> str:
        """What to change first to be faster: the largest part beside plain compute, or compute itself."""
        model = self.plan.model
        assert model is not None
        again = sum(unit.cost.recomputed_flops for unit in model.units)
        share = again / (3 * sum(unit.cost.flops for unit in model.units) + again)
        parts = {**dict(self.parts), "recomputation": share * self.compute_seconds}
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


def samples_per_microbatch(config: ModelParallelConfig, job: Job) -> int | None:
    """Return how many samples of a step a rank computes at a time; None if they cannot be divided so."""
    mesh = Mesh.from_world(job.ranks, config.pipeline_parallel_degree, config.tensor_parallel_degree)
    # Without `prescaled_batch` tensor-parallel ranks read samples of their own.
    readers = mesh.rdp_size if config.prescaled_batch else mesh.dp_size
    samples, rest = divmod(job.samples, readers * config.microbatches)
    return None if rest or not samples else samples


def predict(config: ModelParallelConfig, job: Job, *, schedule: Schedule | None = None) -> Prediction | RuledOut:
    """Return what a step takes, or why there is none.

    Args:
        schedule: see `decide`.
    """
    samples = samples_per_microbatch(config, job)
    if samples is None:
        return RuledOut("batch", "the samples of a step cannot be divided over its ranks and microbatches")
    model = job.models[config.tensor_parallel_degree]
    scale = samples / model.samples
    return _Predicting(config, job, in_precision(scaled(model, scale), job.half, config), schedule).run()


def half_of(config: ModelParallelConfig) -> str | None:
    """Return the half precision that a job computes in."""
    return "float16" if config.fp16 else "bfloat16" if config.bf16 else None


def in_precision(model: ModelFacts, described: str | None, config: ModelParallelConfig) -> ModelFacts:
    """Return the model as `config` has it: in its precision, or for sharded data parallelism with what is divided."""
    half = half_of(config)
    if half != described:
        size, factor = (2, 0.5) if half is not None else (4, 2.0)
        if half is not None and described is not None:
            factor = 1.0
        old, new = described or "float32", half or "float32"
        model = replace(
            _in_dtype(model, old, new, size),
            units=tuple(replace(unit, cost=_resized(unit.cost, factor)) for unit in model.units),
            recorded=None if model.recorded is None else model.recorded.in_precision(factor),
        )
    if half is not None and config.sharded_data_parallel_degree > 1:
        model = _in_dtype(model, half, "float32", 4)  # masters are divided, and cast for computing
    return model


def _in_dtype(model: ModelFacts, old: str, new: str, itemsize: int) -> ModelFacts:
    tensors = {
        name: in_dtype(each, new, itemsize) if each.dtype == old else each for name, each in model.tensors.items()
    }
    return replace(model, tensors=tensors)


class _Predicting:
    """One configuration."""

    def __init__(
        self,
        config: ModelParallelConfig,
        job: Job,
        model: ModelFacts,
        schedule: Schedule | None,
    ) -> None:
        self._config, self._job, self._model = config, job, model
        self._schedule = schedule
        self._machine = job.machine
        self._layers = layers_of(model)
        self._mesh = Mesh.from_world(
            job.ranks, config.pipeline_parallel_degree, config.tensor_parallel_degree, config.placement_strategy
        )
        pipeline = self._machine.channel(self._hosts(CommGroup.PP_GROUP))
        self._collectives = dict(self._tensor_collectives())
        self._speed = Speed(
            self._machine.flops(half_of(config)),
            self._machine.link,
            pipeline.latency_seconds,
            1 / pipeline.bytes_per_second,
            self._machine.action_seconds,
            self._collectives,
            self._machine.operation_seconds,
            self._machine.moved_bytes_per_second,
            self._machine.is_asynchronous,
            split_seconds=self._machine.split_seconds,
        )

    def run(self) -> Prediction | RuledOut:
        choices: dict[str, Choice] = dict.fromkeys(self._layers, Choice.KEEP)
        gap = 0.0
        for _ in range(_ROUNDS):
            try:
                plan = decide(
                    self._config,
                    self._job.ranks,
                    with_choices(self._model, self._layers, choices, mixed=self._config.offload_activations == "auto"),
                    self._speed,
                    self._job.optimizer,
                    schedule=self._schedule,
                )
            except ConfigError as error:
                return RuledOut("partition", error.problems[0].message)
            if self._fits(plan):
                return self._prediction(plan, choices, gap)
            found = self._choose(plan, choices)
            if isinstance(found, RuledOut):
                return found
            again, gap = found
            if again == choices:
                break
            choices = again
        return self._too_large(plan)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _fits(self, plan: Plan) -> bool:
        limit = usable_bytes(self._machine)
        return all(each.total_bytes <= limit for each in plan.memory) and self._host_bytes(plan) <= self._host_limit

    @property
    def _host_limit(self) -> float:
        return self._machine.host_bytes / 2  # the other half: data, workers, checkpoints on their way

    def _host_bytes(self, plan: Plan) -> float:
        """Return what the fullest host holds: its ranks could be of the stage that offloads most."""
        return self._machine.ranks_per_host * max((each.host_bytes for each in plan.memory), default=0)

    def _too_large(self, plan: Plan) -> RuledOut:
        stage, memory = max(enumerate(plan.memory), key=lambda pair: pair[1].total_bytes)
        missing = memory.total_bytes - usable_bytes(self._machine)
        return RuledOut("memory", f"stage {stage} needs {_gib(memory.total_bytes)}", max(0, missing))

    def _choose(self, plan: Plan, present: Mapping[str, Choice]) -> tuple[dict[str, Choice], float] | RuledOut:
        """Choose for the layers of each stage, as `plan` has cut the model."""
        machine = self._machine
        room = usable_bytes(machine), self._host_limit / machine.ranks_per_host
        return choose_layers(self._config, plan, self._layers, present, room, self._speed, on_host=machine.on_host)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _prediction(self, plan: Plan, choices: Mapping[str, Choice], gap: float) -> Prediction:
        timeline = plan.timeline
        rounds = self._config.microbatches
        assert plan.assignment is not None
        busy = [timeline.makespan_seconds - idle for idle in timeline.idle_seconds]
        collectives = [
            2 * rounds * sum(self._collectives.get(name, 0.0) for name in plan.assignment.names(stage))
            for stage in range(len(plan.memory))
        ]
        slowest = max(range(len(busy)), key=lambda stage: busy[stage])
        waited = collectives[slowest] if collectives else 0.0
        whole = max(timeline.makespan_seconds, self._shared_seconds(busy))
        compute = busy[slowest] - waited
        return Prediction(
            self._config,
            self._job,
            plan,
            dict(choices),
            compute_seconds=compute,
            bubble_seconds=whole - busy[slowest],
            communication_seconds=waited + self._exposed_seconds(plan, busy),
            stall_seconds=max((each.stall_seconds for each in plan.forecasts), default=0.0),
            optimizer_seconds=max(self._updated(each) for each in plan.memory) / self._machine.updates_per_second,
            gap=gap,
        )

    def _shared_seconds(self, busy: Sequence[float]) -> float:
        """Return how long the ranks of a host need for all their work if they share cores."""
        replicas = self._mesh.size / len(busy) / self._job.hosts
        return replicas * sum(busy) / self._machine.parallel_ranks

    def _hosts(self, kind: CommGroup) -> int:
        return len({rank // self._machine.ranks_per_host for rank in self._mesh.group(kind, 0)})

    def _tensor_collectives(self) -> list[tuple[str, float]]:
        """Return what each unit spends on collectives of tensor parallelism in its forward."""
        degree = self._mesh.tp_size
        if degree == 1:
            return []
        hosts = self._hosts(CommGroup.TP_GROUP)
        divided = {name for name, tensor in self._model.tensors.items() if tensor.pieces}
        found = []
        for unit in self._model.units:
            if divided.isdisjoint(unit.tensors):
                continue
            times = _COLLECTIVES_OF_LAYER if unit.cost.name in self._layers else 1
            size = (
                self._layers[unit.cost.name].input_bytes if unit.cost.name in self._layers else unit.cost.output_bytes
            )
            seconds = self._machine.collective_seconds("all_reduce", size, degree, hosts)
            found.append((unit.cost.name, times * seconds))
        return found

    def _exposed_seconds(self, plan: Plan, busy: Sequence[float]) -> float:
        """Return what communication between replicas adds: what the passes beside it do not hide."""
        config, rounds = self._config, self._config.microbatches
        if config.sharded_data_parallel_degree > 1:
            hosts = self._hosts(CommGroup.RDP_GROUP)
            whole = self._gathered_per_pass()
            degree = config.sharded_data_parallel_degree
            gather = self._machine.collective_seconds("all_gather", whole, degree, hosts)
            scatter = self._machine.collective_seconds("reduce_scatter", whole, degree, hosts)
            return max(0.0, rounds * (2 * gather + scatter) - busy[0])
        exposed = 0.0
        size, hosts = self._mesh.rdp_size, self._hosts(CommGroup.RDP_GROUP)
        for stage, memory in enumerate(plan.memory):
            seconds = self._machine.collective_seconds("all_reduce", memory.reduction_bytes, size, hosts)
            # Buckets are averaged as they fill in the last backward, about two thirds of a microbatch's work.
            exposed = max(exposed, seconds - 2 / 3 * busy[stage] / rounds, 0.1 * seconds)
        return exposed

    def _gathered_per_pass(self) -> int:
        half = self._config.fp16 or self._config.bf16
        return sum(2 * each.num_elements if half else each.num_bytes for each in self._model.tensors.values())

    def _updated(self, memory: RankMemory) -> float:
        """Return how many parameters a rank updates."""
        states = OPTIMIZERS[self._job.optimizer]
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
    found: dict[str, Layer] = {}
    before = 0
    for unit in model.units:
        cost = unit.cost
        if before and unit.tensors and blocks.issuperset(name for name in unit.tensors if model.tensors[name].rows):
            # What a recomputation makes is an upper bound of what a layer keeps, where that is not known.
            saved = cost.activation_bytes - cost.boundary_bytes + (cost.spared_bytes or cost.recomputed_bytes)
            found[cost.name] = Layer(saved, cost.boundary_bytes or before, cost)
        before = cost.output_bytes
    return found


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
        on_host: ranks compute on the host.

    Returns:
        The choices, and by which share others could be faster; or why nothing fits.
    """
    assert plan.assignment is not None
    choices, gaps = dict(present), [0.0]
    allowed = allowed_choices(config, on_host=on_host)
    for stage, memory in enumerate(plan.memory):
        units = [each for each in plan.assignment.names(stage) if each in layers]
        live = _live(config, plan, stage)
        kept = plan.assignment.loads[stage].activation_bytes
        others = kept - sum(_activation(layers[each], present[each]) for each in units)
        fixed = _static_bytes(memory)
        limits = ChainLimits(live, room[0] - fixed - others * live, room[1], speed.link, allowed=allowed)
        chain = [_chain_layer(layers[each], speed) for each in units]
        found = choose(chain, limits)
        if found is None:
            needed = fixed + others * live + smallest_bytes(chain, limits)
            missing = needed - room[0]
            what = "nothing kept" if units else "no layer that could be recomputed"
            reason = f"stage {stage} needs {_gib(needed)} with {what}, of which {_gib(fixed)} are no activations"
            return RuledOut("memory", reason, max(1, round(missing)) if missing < 1e18 else 0)
        choices.update(zip(units, found.choices, strict=True))
        gaps.append(found.gap)
    return choices, max(gaps)


def _live(config: ModelParallelConfig, plan: Plan, stage: int) -> float:
    """Return how many microbatches a stage holds at its peak, a chunk of one counting as a part."""
    if config.virtual_pipeline_degree == 1:
        # The peak of a split backward is more than of whole microbatches: see `peaks`.
        splits = 1.0 + plan.timeline.schedule.splits_backward
        return min(plan.timeline.peak_live_microbatches[stage] * splits, 2.0 * config.microbatches)
    return plan.timeline.schedule.peak_live_segments[stage] / config.virtual_pipeline_degree


def _activation(layer: Layer, choice: Choice) -> int:
    return layer.saved_bytes if choice is Choice.KEEP else layer.input_bytes


def _chain_layer(layer: Layer, speed: Speed) -> ChainLayer:
    seconds = speed.forward_seconds(layer.cost)
    return ChainLayer(seconds, 2 * seconds, layer.saved_bytes, layer.input_bytes)


def allowed_choices(config: ModelParallelConfig, *, on_host: bool) -> frozenset[Choice]:
    """Return what the runtime chooses among for layers of strategy "auto".

    Args:
        on_host: ranks compute on the host, where `offload_activations: auto` offloads nothing.
    """
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


def _resized(cost: UnitCost, factor: float) -> UnitCost:
    """Return the cost with activations of another size."""
    return replace(cost, **{name: round(factor * getattr(cost, name)) for name in BYTES_PER_MICROBATCH})


def _static_bytes(memory: RankMemory) -> int:
    """Return what a rank holds beside activations."""
    known = memory.parameters_bytes + memory.gradients_bytes + memory.reduction_bytes
    return known + memory.optimizer_bytes + memory.masters_bytes + memory.gathered_bytes


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.1f} MiB"
