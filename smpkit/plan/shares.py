"""What one of several data-parallel ranks holds of the tensors of its pipeline partition."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smpkit.plan.mesh import CommGroup, Mesh

if TYPE_CHECKING:
    from smpkit.plan.memory import TensorFacts

__all__ = ["Share", "gathered_bytes", "in_dtype", "owned", "part_of", "piece_of", "shares_of"]


@dataclass(frozen=True)
class Share:
    """Which of the ranks that hold one pipeline partition is meant, and how they share it.

    Args:
        tp_rank: position among the ranks that share distributed modules.
        dp: position among all of them, and how many they are.
        rdp: position among exact replicas, and how many they are.
        shards_states: each optimizer state lies on one of the ranks that average its gradient.
        sharding_degree: over how many replicas parameters, gradients and states are divided.
    """

    tp_rank: int = 0
    dp: tuple[int, int] = (0, 1)
    rdp: tuple[int, int] = (0, 1)
    shards_states: bool = False
    sharding_degree: int = 1


def shares_of(mesh: Mesh, pp_rank: int, *, shards_states: bool, sharding_degree: int) -> list[Share]:
    """Return the shares of all ranks that hold a pipeline partition."""
    every = range(mesh.pp_size * mesh.tp_size * mesh.rdp_size)
    ranks = [rank for rank in every if mesh.coordinates(rank).pp == pp_rank]
    return [
        Share(
            mesh.coordinates(rank).tp,
            (mesh.index(CommGroup.DP_GROUP, rank), mesh.dp_size),
            (mesh.index(CommGroup.RDP_GROUP, rank), mesh.rdp_size),
            shards_states,
            sharding_degree,
        )
        for rank in ranks
    ]


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
