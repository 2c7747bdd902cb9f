"""Make data-parallel replicas equal: check that they are the same model, copy the first one's values, compare later."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.distributed.objects import gather_objects
from smpkit.torch.placement.placement import ParameterPlacement, Placement

Source = tuple[dist.ProcessGroup, int]
"""A group, and the index in it of the rank whose values all get."""

_MESSAGE_BYTES: Final = 25 * 1024 * 1024


def check_same_model(module: nn.Module, placement: Placement) -> None:
    """Raise on every data-parallel rank if their models differ in names, shapes, dtypes or trainability.

    Pieces of tensor-parallel parameters are compared among the ranks that hold the same piece. Without this check the
    first differing tensor would end in a hang or in silently mixed weights.
    """
    pieces, whole = _describe(module, placement)
    subject, noun, hint = "the model differs", "parameters and buffers", "build the same model on every rank"
    check_same(whole, state.process_group(CommGroup.DP_GROUP), subject, noun, hint)
    if pieces:
        check_same(pieces, state.process_group(CommGroup.RDP_GROUP), subject, noun, hint)


def check_same(lines: Sequence[str], group: dist.ProcessGroup, subject: str, noun: str, hint: str) -> None:
    """Raise on all ranks of a group if their lines differ; all of them call this.

    Args:
        subject: the beginning of the error.
        noun: what the lines are.
    """
    what = f"the comparison of {noun}"
    # Hashes first: the lines of a large model are long, and equal nearly always.
    digests = gather_objects(hashlib.sha256("\n".join(lines).encode()).hexdigest(), group, what)
    if len(set(digests)) == 1:
        return
    descriptions = gather_objects(list(lines), group, what)
    ranks = dist.get_process_group_ranks(group)
    other = next(index for index, digest in enumerate(digests) if digest != digests[0])
    raise UsageError(
        f"{subject} between data-parallel ranks {ranks[0]} and {ranks[other]}: "
        f"{_first_difference(descriptions[0], descriptions[other], noun)}",
        hint=hint,
    )


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[tuple[torch.Tensor, Source]], what: str) -> None:
    """Overwrite each tensor by that of the rank at an index of a group, in a few large messages.

    All ranks name the tensors in the same order: then they also come to the groups in one order, and none waits for
    another in a circle. `what` names them in errors.
    """
    by_source: dict[Source, list[torch.Tensor]] = {}
    for tensor, source in tensors:
        # As bytes: gloo does not know float8.
        bits = tensor.detach().view(torch.uint8) if tensor.itemsize == 1 else tensor.detach()
        by_source.setdefault(source, []).append(bits)
    for (group, index), together in by_source.items():
        with waiting(what, group):
            # Into the same memory: the model, gradients and the optimizer's groups all refer to these objects.
            # As torch's own DDP does. The name is private.
            dist._broadcast_coalesced(group, together, _MESSAGE_BYTES, index)  # type: ignore[attr-defined]


UPDATES_COMPARED: Final = 10
"""Before so many updates ranks compare what they have done: what makes them differ does so in the first ones, and to
compare makes the host wait for the device."""


def check_same_weights(placements: Iterable[ParameterPlacement]) -> None:
    """Raise on all replicas of a weight if its norm has become another on one of them; all ranks call this.

    A forward that writes to weights by its samples (`nn.Embedding(max_norm=...)`, an ActNorm that its first batch
    initialises) writes other values in each replica, and updates keep the difference.
    """
    by_group: dict[dist.ProcessGroup, dict[str, torch.Tensor]] = {}
    for placed in placements:
        if placed.replica_group is not None and placed.parameter.requires_grad:
            by_group.setdefault(placed.replica_group, {})[placed.name] = placed.parameter
    for group, weights in by_group.items():
        norms = gather_objects(norms_of_weights(weights.values()).tolist(), group, "the comparison of weights")
        for name, (first, *others) in zip(weights, zip(*norms, strict=True), strict=True):
            for rank, norm in enumerate(others, 1):
                if abs(norm - first) > _ROUNDING * max(norm, first):
                    ranks = dist.get_process_group_ranks(group)
                    raise UsageError(
                        f"`{name}` is no longer the same on data-parallel ranks {ranks[0]} and {ranks[rank]}: its norm"
                        f" is {first:g} and {norm:g}",
                        hint="change weights alike on all ranks: not in a forward by what its samples are"
                        " (`nn.Embedding(max_norm=...)`, a first batch that initialises), nor on one rank alone",
                    )


_ROUNDING: Final = 1e-3
"""Far more than devices of different kinds make of the same updates in ten steps."""


@torch.no_grad()
def norms_of_weights(weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each, on their device."""
    # Summed in float32 at least.
    wide = [(weight, torch.promote_types(weight.dtype, torch.float32)) for weight in weights]
    norms = [torch.linalg.vector_norm(weight, dtype=dtype).float() for weight, dtype in wide]
    return torch.stack(norms) if norms else torch.empty(0, device=state.device)


def _describe(module: nn.Module, placement: Placement) -> tuple[list[str], list[str]]:
    """Return lines that describe the pieces of tensor-parallel parameters, and lines for everything else."""
    pieces: list[str] = []
    whole: list[str] = []
    for placed in placement:
        param, shard = placed.parameter, placed.shard
        frozen = "" if param.requires_grad else " frozen"
        line = f"parameter {placed.name} {tuple(param.shape)} {param.dtype}{frozen}"
        if shard is not None:
            line += f" of {shard.shape} along {shard.dim} in {shard.parts}, {shard.group.value} x {shard.scale}"
        (pieces if placed.is_tp_shard else whole).append(line)
    return pieces, whole + [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()]


def _first_difference(first: Sequence[str], second: Sequence[str], noun: str) -> str:
    for left, right in zip(first, second, strict=False):
        if left != right:
            return f"`{left}` against `{right}`"
    return f"{len(first)} against {len(second)} {noun}"
