"""How many bytes each rank of a pipeline holds, by kind: parameters, gradients, optimizer states, activations.

What is counted is what tensors hold. An allocator's gaps, the framework's own gigabyte on a GPU, and what an operation
needs while it runs come on top.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from pydantic import TypeAdapter

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.mesh import CommGroup, Mesh
from smpkit.plan.optimizers import OPTIMIZERS
from smpkit.plan.partition.assignment import Assignment, UnitCost
from smpkit.plan.schedule.recorded_graph import RecordedGraph


@dataclass(frozen=True)
class TensorFacts:
    """A parameter or buffer of a model."""

    name: str
    """The first of its names."""
    dtype: str
    num_elements: int
    num_bytes: int
    trainable: bool
    rows: int = 0
    """Of a parameter: the size of its first dimension; 0 of a buffer."""
    pieces: tuple[int, ...] = ()
    """Bytes on each tensor-parallel rank, if it is divided over them; the numbers above are then the first one's."""
    rows_divided: bool = False
    """Tensor parallelism divides its first dimension."""
    over_replicas: bool = False
    """Its gradient is averaged over exact replicas, not over all data-parallel ranks."""


@dataclass(frozen=True)
class UnitFacts:
    """A unit, what it costs, and the tensors it holds."""

    cost: UnitCost
    tensors: tuple[str, ...]
    """Names, as in `ModelFacts.tensors`."""
    fixed: Mapping[str, float] = field(default_factory=dict)
    """By field of the cost, the share that does not grow with the samples of a microbatch, where there is one."""


@dataclass(frozen=True)
class ModelFacts:
    """What planning needs to know of a model."""

    name: str
    units: tuple[UnitFacts, ...]
    """In execution order, or without a trace in that of definition."""
    tensors: Mapping[str, TensorFacts]
    """By name; tied ones once."""
    loose: tuple[str, ...]
    """Tensors of modules that span ranks: every rank has them."""
    traced: bool
    """Whether compute and activations of the units are known."""
    places: Mapping[str, int] = field(default_factory=dict)
    """Where the user put units and modules around them, by name."""
    blocks: tuple[tuple[str, ...], ...] = ()
    """Names of the tensors that sharded data parallelism gathers together."""
    notes: tuple[str, ...] = ()
    """What tensor parallelism divides, and what not and why, in sentences."""
    samples: int = 0
    """In the microbatch that was traced: the first dimension of its first tensor; 0 without a trace."""
    tokens: int = 0
    """Elements of its first tensor of integers, or its samples."""
    recorded: RecordedGraph | None = None
    """What a microbatch sends between ranks under the assignment of the job that was described; None: not known."""

    @property
    def costs(self) -> list[UnitCost]:
        """What the partitioner takes."""
        return [unit.cost for unit in self.units]

    @property
    def has_boundaries(self) -> bool:
        """Whether some layer is checkpointed, so that there is something to offload."""
        return any(unit.cost.boundary_bytes for unit in self.units)

    @property
    def shared_parameters(self) -> list[str]:
        """Names of the parameters that several units hold."""
        return sorted({name for unit in self.units for name in unit.cost.shared})

    def growing_as(self, other: ModelFacts) -> ModelFacts:
        """Return the facts of a model that grows with the samples as in another job, where its layers are divided."""
        fixed = {unit.cost.name: unit.fixed for unit in other.units}
        units = tuple(replace(unit, fixed=fixed.get(unit.cost.name, {})) for unit in self.units)
        recorded, like = self.recorded, other.recorded
        if recorded is not None and like is not None and len(recorded.values) == len(like.values):
            pairs = zip(recorded.values, like.values, strict=True)
            recorded = replace(recorded, values=tuple(replace(one, fixed=two.fixed) for one, two in pairs))
        return replace(self, units=units, recorded=recorded)

    def to_json(self) -> str:
        """Write it as text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelFacts:
        """Read what `to_json` wrote."""
        return TypeAdapter(cls).validate_json(text)


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds."""

    num_parameters: int
    """Elements of parameters and buffers."""
    dtypes: Mapping[str, int]
    """Bytes of parameters and buffers by dtype."""
    parameters_bytes: int
    """Parameters and buffers."""
    gradients_bytes: int
    reduction_bytes: int
    """Buffers in which gradients travel to the ranks that hold the same parameters."""
    optimizer_bytes: int
    """What the optimizer keeps, without the masters that it updates in half precision."""
    activations_bytes: int | None
    """What the live microbatches keep for their backward, and what the largest recomputation of a checkpointed layer
    holds at its peak; None if the model was not traced."""
    boundaries_bytes: int = 0
    """The part of `activations_bytes` that is inputs of checkpointed layers."""
    host_bytes: int = 0
    """Inputs of checkpointed layers that were offloaded to the host, at their peak."""
    gathered_bytes: int = 0
    """With sharded data parallelism, the most that is gathered at a time of parameters that replicas divide."""
    masters_bytes: int = 0
    """Float32 weights behind those in half precision; their gradients take as much, during `optimizer.step()`."""

    @property
    def static_bytes(self) -> int:
        """What it holds beside activations while it computes."""
        states = self.optimizer_bytes + self.masters_bytes
        return self.parameters_bytes + self.gradients_bytes + self.reduction_bytes + states + self.gathered_bytes

    @property
    def total_bytes(self) -> int:
        """The most at a time of all that is known: with activations, or in the optimizer's step."""
        passing = self.gathered_bytes + (self.activations_bytes or 0)
        return self.static_bytes - self.gathered_bytes + max(passing, self.masters_bytes)


def memory_of_rank(
    model: ModelFacts,
    assignment: Assignment,
    config: ModelParallelConfig,
    mesh: Mesh,
    replicas: Sequence[int],
    live_microbatches: float,
    optimizer: str,
    offloaded: tuple[int, int] | None = None,
) -> RankMemory:
    """Return the memory of a rank at its peak.

    Args:
        replicas: global ranks that hold the same parameters. They differ at most in the optimizer states that they
            keep; the one with most of them counts.
        live_microbatches: how many it holds at a time; a chunk of one is a part.
        optimizer: a name of `smpkit.plan.optimizers.OPTIMIZERS`.
        offloaded: with activation offloading, the most bytes of checkpointed layers' inputs on its device and on its
            host; None: all of them stay on the device.
    """
    replicated = config.ddp and mesh.dp_size > 1
    degree = config.sharded_data_parallel_degree
    place = mesh.coordinates(replicas[0])
    places = assignment.partition_of
    held = [
        {*model.loose}.union(*(unit.tensors for unit in model.units if places[unit.cost.name] == stage))
        for stage in range(assignment.num_partitions)
    ]
    num_holders = Counter(name for names in held for name in names)
    alone = {name for name in model.tensors if num_holders[name] == 1}
    whole = {name: _piece_of(model.tensors[name], place.tp) for name in sorted(held[place.pp])}
    tensors = [_part_of(tensor, degree) for tensor in whole.values()]
    trained = [tensor for tensor in tensors if tensor.trainable]
    updated = _dealt(trained, mesh, replicas, held[place.pp] - alone) if config.shard_optimizer_state else [trained]
    # Trained weights in half precision have float32 masters. With sharded data parallelism what is gathered is in half
    # precision, and what is divided are the masters.
    half, states = half_of(config), []
    for kept in updated:
        masters = sum(4 * tensor.num_elements for tensor in kept if tensor.dtype == half)
        others = _bytes(tensor for tensor in kept if tensor.dtype != half)
        states.append((masters, OPTIMIZERS[optimizer] * (masters + others)))
    masters_bytes, optimizer_bytes = max(states, key=sum)
    reduced = [
        tensor
        for tensor in trained
        if (replicated and (mesh.rdp_size > 1 or not tensor.over_replicas)) or tensor.name not in alone
    ]
    costs = [unit.cost for unit in model.units if places[unit.cost.name] == place.pp]
    boundary = sum(cost.boundary_bytes for cost in costs)
    on_device, on_host = offloaded or (round(boundary * live_microbatches), 0)
    other = round((assignment.activation_bytes[place.pp] - boundary) * live_microbatches)
    activation = other + on_device + max((cost.recomputed_bytes for cost in costs), default=0)
    return RankMemory(
        num_parameters=sum(tensor.num_elements for tensor in tensors),
        dtypes={
            dtype: _bytes(tensor for tensor in tensors if tensor.dtype == dtype)
            for dtype in sorted({tensor.dtype for tensor in tensors})
        },
        parameters_bytes=_bytes(tensors),
        gradients_bytes=_bytes(trained),
        reduction_bytes=_bytes(reduced),
        optimizer_bytes=optimizer_bytes,
        activations_bytes=activation if model.traced else None,
        boundaries_bytes=on_device,
        host_bytes=on_host,
        gathered_bytes=0 if degree == 1 else _gathered_bytes(whole, model.blocks, config),
        masters_bytes=masters_bytes,
    )


def _bytes(tensors: Iterable[TensorFacts]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def _piece_of(tensor: TensorFacts, tp_rank: int) -> TensorFacts:
    """Return what a rank holds of a tensor that tensor parallelism may have divided."""
    if not tensor.pieces:
        return tensor
    num_bytes = tensor.pieces[tp_rank]
    size = max(tensor.num_bytes // max(tensor.num_elements, 1), 1)
    rows = tensor.rows * num_bytes // tensor.num_bytes if tensor.rows_divided else tensor.rows
    return replace(tensor, num_bytes=num_bytes, num_elements=num_bytes // size, rows=rows)


def _part_of(tensor: TensorFacts, degree: int) -> TensorFacts:
    """Return what the rank keeps of a parameter that is divided over replicas by its rows, padded to equal parts."""
    if degree == 1 or not tensor.rows:
        return tensor
    longest = -(-tensor.rows // degree)
    return replace(
        tensor,
        num_bytes=tensor.num_bytes // tensor.rows * longest,
        num_elements=tensor.num_elements // tensor.rows * longest,
    )


def _dealt(
    trained: Sequence[TensorFacts], mesh: Mesh, replicas: Sequence[int], tied: Collection[str]
) -> list[list[TensorFacts]]:
    """Return for each replica the trained tensors whose optimizer states it keeps, dealt out as the runtime does.

    Args:
        tied: names of tensors that other pipeline ranks hold too; they are counted on each of their ranks.
    """
    everywhere = [tensor for tensor in trained if tensor.name in tied]
    loads = {False: [0] * mesh.dp_size, True: [0] * mesh.rdp_size}
    dealt: defaultdict[tuple[bool, int], list[TensorFacts]] = defaultdict(list)
    for tensor in sorted(trained, key=lambda tensor: tensor.num_bytes, reverse=True):
        if tensor.name not in tied:
            load = loads[tensor.over_replicas]
            owner = load.index(min(load))
            load[owner] += tensor.num_bytes
            dealt[tensor.over_replicas, owner].append(tensor)
    positions = [(mesh.index(CommGroup.DP_GROUP, rank), mesh.index(CommGroup.RDP_GROUP, rank)) for rank in replicas]
    return [[*everywhere, *dealt[False, dp], *dealt[True, rdp]] for dp, rdp in positions]


def half_of(config: ModelParallelConfig) -> str | None:
    """Return the half precision that a job computes in."""
    return "float16" if config.fp16 else "bfloat16" if config.bf16 else None


def in_dtype(tensor: TensorFacts, dtype: str, itemsize: int) -> TensorFacts:
    """Return a tensor of as many elements in another dtype."""
    num_bytes = itemsize * tensor.num_elements
    pieces = tuple(piece * num_bytes // max(tensor.num_bytes, 1) for piece in tensor.pieces)
    return replace(tensor, dtype=dtype, num_bytes=num_bytes, pieces=pieces)


def _gathered_bytes(
    tensors: Mapping[str, TensorFacts], blocks: Sequence[Sequence[str]], config: ModelParallelConfig
) -> int:
    """Return the most that is whole at a time of what is divided over replicas.

    That is what belongs to no block, small blocks, and two others: the one at work and the next.
    """
    inside = {name for block in blocks for name in block}
    size = {name: 2 * tensor.num_elements if half_of(config) else tensor.num_bytes for name, tensor in tensors.items()}
    rest = sum(size[name] for name, tensor in tensors.items() if tensor.rows and name not in inside)
    sizes = []
    for block in blocks:
        parts = [tensors[name] for name in block if name in tensors]
        num_bytes = sum(size[tensor.name] for tensor in parts)
        if sum(tensor.num_elements for tensor in parts) < config.sdp_param_persistence_threshold:
            rest += num_bytes
        else:
            sizes.append(num_bytes)
    return rest + sum(sorted(sizes, reverse=True)[:2])
