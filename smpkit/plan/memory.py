"""How many bytes each rank of a pipeline holds, by kind: parameters, gradients, optimizer states, activations.

What is counted is what tensors hold. An allocator's gaps, the framework's own gigabyte on a GPU, and what an operation
needs while it runs come on top.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from smpkit.errors import SmpkitError
from smpkit.plan.mesh import CommGroup, Coordinates, Mesh
from smpkit.plan.partition.assignment import Assignment, UnitCost
from smpkit.plan.schedule.recorded_graph import RecordedGraph

__all__ = [
    "OPTIMIZERS",
    "ModelFacts",
    "RankMemory",
    "Share",
    "TensorFacts",
    "UnitFacts",
    "gathered_bytes",
    "in_dtype",
    "memory_of_ranks",
    "owned",
    "part_of",
    "piece_of",
    "shares_of",
]

OPTIMIZERS: Final[Mapping[str, int]] = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}
"""How many numbers an optimizer keeps per trained one, in the dtype of what it updates, as those of torch.optim do."""

_FORMAT: Final = 1


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
        content = {**asdict(self), "tensors": [asdict(tensor) for tensor in self.tensors.values()]}
        return json.dumps({"format": _FORMAT, **content})

    @classmethod
    def from_json(cls, text: str) -> ModelFacts:
        """Read what `to_json` wrote; raise SmpkitError if it is not that."""
        try:
            content = json.loads(text)
            if content.pop("format") != _FORMAT:
                raise ValueError("another format")
            return cls._of(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SmpkitError(f"not a description of a model: {type(error).__name__}: {error}") from None

    @classmethod
    def _of(cls, content: dict[str, Any]) -> ModelFacts:
        units = tuple(
            UnitFacts(UnitCost(**unit["cost"]), tuple(unit["tensors"]), dict(unit["fixed"]))
            for unit in content["units"]
        )
        tensors = {
            each["name"]: TensorFacts(**{**each, "pieces": tuple(each["pieces"])}) for each in content["tensors"]
        }
        return cls(
            str(content["name"]),
            units,
            tensors,
            tuple(content["loose"]),
            bool(content["traced"]),
            dict(content["places"]),
            tuple(map(tuple, content["blocks"])),
            tuple(content["notes"]),
            int(content["samples"]),
            int(content["tokens"]),
            None if content["recorded"] is None else RecordedGraph.from_plain(content["recorded"]),
        )


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
    """Float32 weights behind those in half precision."""
    step_bytes: int = 0
    """Their gradients, during `optimizer.step()`, when there are no activations."""

    @property
    def total_bytes(self) -> int:
        """The most at a time of all that is known."""
        return sum(self.parts_bytes.values())

    @property
    def parts_bytes(self) -> dict[str, int]:
        """What that is made of; with the optimizer its masters."""
        activations = self.activations_bytes or 0
        in_step = self.step_bytes > self.gathered_bytes + activations
        parts = {
            "parameters": self.parameters_bytes,
            "gathered": 0 if in_step else self.gathered_bytes,
            "gradients": self.gradients_bytes + (self.step_bytes if in_step else 0),
            "reduction": self.reduction_bytes,
            "optimizer": self.masters_bytes + self.optimizer_bytes,
            "activations": 0 if in_step else activations,
        }
        return {kind: num_bytes for kind, num_bytes in parts.items() if num_bytes}


def memory_of_ranks(
    model: ModelFacts,
    assignment: Assignment,
    *,
    live_microbatches: Sequence[float],
    states_per_parameter: int,
    replicated: bool,
    offloaded: Sequence[tuple[int, int]] = (),
    share: Share | None = None,
    persistent: int = 0,
    half: str | None = None,
    only: int | None = None,
) -> tuple[RankMemory, ...]:
    """Return the memory of each pipeline rank at its peak.

    Args:
        live_microbatches: for each rank, how many microbatches it holds at a time; a chunk of one is a part.
        states_per_parameter: numbers that the optimizer keeps per trained one; see OPTIMIZERS.
        replicated: whether other ranks hold the same part of the model, and gradients are averaged with them.
        offloaded: with activation offloading, for each rank the most bytes of checkpointed layers' inputs on its device
            and on its host; empty: all of them stay on the device.
        share: which of the ranks that hold a partition; None: there is one, or they hold the same.
        persistent: with sharded data parallelism, blocks of fewer elements stay gathered.
        half: the dtype that the job computes in, where that is half precision: trained weights of this dtype have
            float32 masters. With sharded data parallelism what is gathered has it, and what is divided are the masters.
        only: the pipeline rank that is asked for; None: all of them.
    """
    share = share or Share()
    pieces_reduced = replicated and (share.rdp[1] > 1 or share.dp[1] == 1)
    places = assignment.partition_of
    held = [_held(model, places, rank) for rank in range(assignment.num_partitions)]
    num_holders = Counter(name for names in held for name in names)
    alone = {name for name in model.tensors if num_holders[name] == 1}
    found = []
    for rank, names in enumerate(held):
        if only not in (None, rank):
            continue
        whole = {name: piece_of(model.tensors[name], share) for name in sorted(names)}
        tensors = [part_of(tensor, share) for tensor in whole.values()]
        trained = [tensor for tensor in tensors if tensor.trainable]
        updated = max(
            (owned(trained, each, names - alone) for each in share.each()),
            key=lambda tensors: _states_bytes(tensors, half, states_per_parameter),
        )
        masters = [in_dtype(tensor, "float32", 4) for tensor in updated if tensor.dtype == half]
        alike = [tensor for tensor in updated if tensor.dtype != half]
        reduced = [
            tensor
            for tensor in trained
            if (pieces_reduced if tensor.over_replicas else replicated) or tensor.name not in alone
        ]
        costs = [unit.cost for unit in model.units if places[unit.cost.name] == rank]
        boundary = sum(cost.boundary_bytes for cost in costs)
        on_device, on_host = offloaded[rank] if offloaded else (round(boundary * live_microbatches[rank]), 0)
        other = round((assignment.loads[rank].activation_bytes - boundary) * live_microbatches[rank])
        activation = other + on_device + max((cost.recomputed_bytes for cost in costs), default=0)
        found.append(
            RankMemory(
                num_parameters=sum(tensor.num_elements for tensor in tensors),
                dtypes=_by_dtype(tensors),
                parameters_bytes=_bytes(tensors),
                gradients_bytes=_bytes(trained),
                reduction_bytes=_bytes(reduced),
                optimizer_bytes=states_per_parameter * _bytes([*masters, *alike]),
                activations_bytes=activation if model.traced else None,
                boundaries_bytes=on_device,
                host_bytes=on_host,
                gathered_bytes=gathered_bytes(whole, model.blocks, share, persistent, half=half is not None),
                masters_bytes=_bytes(masters),
                step_bytes=_bytes(masters),
            )
        )
    return tuple(found)


def _held(model: ModelFacts, places: Mapping[str, int], rank: int) -> set[str]:
    """Return the names of the tensors that a rank holds, each once however many of its units use it."""
    names = set(model.loose)
    for unit in model.units:
        if places[unit.cost.name] == rank:
            names.update(unit.tensors)
    return names


def _bytes(tensors: Iterable[TensorFacts]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def _states_bytes(tensors: Iterable[TensorFacts], half: str | None, states_per_parameter: int) -> int:
    return sum(
        4 * each.num_elements * (1 + states_per_parameter)
        if each.dtype == half
        else each.num_bytes * states_per_parameter
        for each in tensors
    )


def _by_dtype(tensors: Iterable[TensorFacts]) -> dict[str, int]:
    found: dict[str, int] = {}
    for tensor in tensors:
        found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.num_bytes
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Share:
    """Which of the ranks that hold one pipeline partition is meant, and how they share it.

    Args:
        tp_rank: position among the ranks that share distributed modules.
        dp: position among all of them, and how many they are.
        rdp: position among exact replicas, and how many they are.
        shards_states: each optimizer state lies on one of the ranks that average its gradient.
        sharding_degree: over how many replicas parameters, gradients and states are divided.
        positions: both positions of all ranks that are meant, of which the one with most states counts; empty: those of
            `dp` and `rdp`.
    """

    tp_rank: int = 0
    dp: tuple[int, int] = (0, 1)
    rdp: tuple[int, int] = (0, 1)
    shards_states: bool = False
    sharding_degree: int = 1
    positions: tuple[tuple[int, int], ...] = ()

    def each(self) -> Iterator[Share]:
        """Yield the share of each rank that is meant."""
        if not self.positions:
            yield self
        for dp, rdp in self.positions:
            yield replace(self, dp=(dp, self.dp[1]), rdp=(rdp, self.rdp[1]), positions=())


def shares_of(mesh: Mesh, pp_rank: int, *, shards_states: bool, sharding_degree: int) -> list[Share]:
    """Return the shares of all ranks that hold a pipeline partition: one of each tensor rank, whose replicas are alike.

    Where states are sharded, replicas differ in the states that they keep.
    """
    found = []
    for tp in range(mesh.tp_size):
        ranks = [mesh.rank(Coordinates(pp_rank, tp, rdp)) for rdp in range(mesh.rdp_size)] if shards_states else []
        positions = [
            (mesh.index(CommGroup.DP_GROUP, rank), mesh.index(CommGroup.RDP_GROUP, rank)) for rank in sorted(ranks)
        ]
        sizes = (0, mesh.dp_size), (0, mesh.rdp_size)
        found.append(Share(tp, *sizes, shards_states, sharding_degree, tuple(positions)))
    return found


def piece_of(tensor: TensorFacts, share: Share) -> TensorFacts:
    """Return what the rank holds of a tensor that tensor parallelism may have divided."""
    if not tensor.pieces:
        return tensor
    num_bytes = tensor.pieces[share.tp_rank]
    size = max(tensor.num_bytes // max(tensor.num_elements, 1), 1)
    rows = tensor.rows * num_bytes // tensor.num_bytes if tensor.rows_divided else tensor.rows
    return replace(tensor, num_bytes=num_bytes, num_elements=num_bytes // size, rows=rows)


def part_of(tensor: TensorFacts, share: Share) -> TensorFacts:
    """Return what the rank keeps of a parameter that is divided over replicas by its rows, padded to equal parts."""
    degree = share.sharding_degree
    if degree == 1 or not tensor.rows:
        return tensor
    longest = -(-tensor.rows // degree)
    return replace(
        tensor,
        num_bytes=tensor.num_bytes // tensor.rows * longest,
        num_elements=tensor.num_elements // tensor.rows * longest,
    )


def owned(tensors: Iterable[TensorFacts], share: Share, tied: Collection[str]) -> list[TensorFacts]:
    """Return the trained tensors whose optimizer states the rank keeps, dealt out as the runtime does.

    Args:
        tied: names of tensors that other pipeline ranks hold too; they are counted on each of their ranks.
    """
    tensors = list(tensors)
    if not share.shards_states:
        return tensors
    loads = {False: [0] * share.dp[1], True: [0] * share.rdp[1]}
    kept = []
    for each in sorted(tensors, key=lambda each: each.num_bytes, reverse=True):
        if each.name in tied:
            kept.append(each)
            continue
        load = loads[each.over_replicas]
        owner = load.index(min(load))
        load[owner] += each.num_bytes
        if owner == (share.rdp if each.over_replicas else share.dp)[0]:
            kept.append(each)
    return kept


def in_dtype(tensor: TensorFacts, dtype: str, itemsize: int) -> TensorFacts:
    """Return a tensor of as many elements in another dtype."""
    num_bytes = itemsize * tensor.num_elements
    pieces = tuple(each * num_bytes // max(tensor.num_bytes, 1) for each in tensor.pieces)
    return replace(tensor, dtype=dtype, num_bytes=num_bytes, pieces=pieces)


def gathered_bytes(
    tensors: Mapping[str, TensorFacts],
    blocks: Sequence[Sequence[str]],
    share: Share,
    persistent: int,
    *,
    half: bool = False,
) -> int:
    """Return the most that is whole at a time of what is divided over replicas.

    That is what belongs to no block, small blocks, and two others: the one at work and the next.

    Args:
        blocks: names of the tensors that are gathered together.
        persistent: blocks of fewer elements stay whole.
        half: what is gathered has two bytes per element.
    """
    if share.sharding_degree == 1:
        return 0
    inside = {name for block in blocks for name in block}
    size = {name: 2 * each.num_elements if half else each.num_bytes for name, each in tensors.items()}
    rest = sum(size[name] for name, each in tensors.items() if each.rows and name not in inside)
    sizes = []
    for block in blocks:
        parts = [tensors[name] for name in block if name in tensors]
        num_bytes = sum(size[each.name] for each in parts)
        if sum(each.num_elements for each in parts) < persistent:
            rest += num_bytes
        else:
            sizes.append(num_bytes)
    return rest + sum(sorted(sizes, reverse=True)[:2])
