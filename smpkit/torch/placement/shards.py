"""How a parameter of this rank lies in the whole model's, and over which ranks its gradient is averaged.

Parameters stay plain local tensors: what is special about one is written on it, and read by data parallelism, by
gradient norms and by everything that saves or loads.

A dimension of n is divided as `torch.chunk` (and DTensor) does it: every rank has ceil(n / tp_size), the last ones what
is left. So a vocabulary of 50257 needs no padding; where shapes must be equal, the modules refuse uneven sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import UnsupportedError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state

__all__ = [
    "TpShard",
    "assignment_refusal",
    "copy_mark_to",
    "is_tp_shard",
    "join_shards",
    "keep_attributes_in_copies",
    "mark",
    "refuse_assignment",
    "sees_scaled_batch",
    "shard_of",
    "shard_range",
    "take_shard",
]


# --- What is written on a parameter, and the parameter itself, through copies and state dicts -------------------------
# Much of what is known of a parameter stands on the object itself or goes by it: its place in the whole model, whether
# it has memory yet, the hooks that reduce its gradient, its state in the optimizer.


_ASSIGN: Final = "assign_to_params_buffers"
"""How `nn.Module.load_state_dict` tells each module of `assign=True`."""


def keep_attributes_in_copies(tensor: torch.Tensor) -> None:
    """Let `copy.deepcopy` copy what is written on a parameter, as it does for any other tensor.

    `nn.Parameter.__deepcopy__` copies values only. Without it, `copy.deepcopy` takes what pickle takes, attributes
    included.
    """
    if isinstance(tensor, nn.Parameter):
        tensor.__deepcopy__ = None  # type: ignore[method-assign, assignment]


def refuse_assignment(root: nn.Module) -> None:
    """Refuse `load_state_dict(assign=True)` for every part of a model, as long as it is the wrapped one.

    Scripted parts take no hooks. The one that a whole model has comes first, so only a part loaded by itself slips by.
    """
    for module in root.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        module.register_load_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(module: nn.Module, _: Any, __: str, metadata: dict[str, Any], *_others: Any) -> None:
    if metadata.get(_ASSIGN) and state.model is not None and any(each is module for each in state.model.modules()):
        raise assignment_refusal()


def assignment_refusal() -> UnsupportedError:
    """Return the error for `load_state_dict(assign=True)`."""
    return UnsupportedError(
        "load_state_dict(assign=True) would replace parameters that the optimizer and data parallelism know",
        hint="leave `assign` out: values are copied into the parameters",
    )


# --- How a parameter of this rank lies in the whole model's, and over which ranks its gradient is averaged ------------


_ATTRIBUTE = "_smp_shard"


@dataclass(frozen=True)
class TpShard:
    """The place of a local parameter in the whole one.

    Args:
        shape: of the whole parameter.
        dim: the dimension that is divided over the tensor-parallel ranks; None: each of them holds the whole parameter.
        parts: sizes along `dim`, in the whole parameter, of pieces packed into one (query, key and value, say), each of
            which is divided by itself; empty for one piece.
        tp_rank, tp_size: whose piece of how many this is.
        group: the ranks that the gradient is averaged over: RDP_GROUP where one backward on this rank has seen the
            samples of the whole tensor-parallel group ("scaled batch" in SMP v1), else DP_GROUP.
        scale: what the averaged gradient is multiplied with to become the gradient of the mean loss. A weight that saw
            `tp_size` batches holds their sum, so 1 / tp_size; with `prescaled_batch` all ranks have one batch and one
            loss, so 1. A whole parameter that saw only this rank's part of a common batch: DP_GROUP and tp_size.
    """

    shape: tuple[int, ...]
    dim: int | None
    parts: tuple[int, ...]
    tp_rank: int
    tp_size: int
    group: CommGroup
    scale: float

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's piece."""
        if self.dim is None:
            return self.shape
        sizes = self.parts or (self.shape[self.dim],)
        length = sum(shard_range(size, self.tp_rank, self.tp_size)[1] for size in sizes)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @property
    def is_distributed(self) -> bool:
        """Whether the ranks hold different values ("distributed parameter" in SMP v1)."""
        return self.dim is not None

    @property
    def sees_scaled_batch(self) -> bool:
        """Whether one backward accumulates the samples of all tensor-parallel ranks ("scaled batch" in SMP v1)."""
        return self.group is CommGroup.RDP_GROUP


def mark(parameter: torch.Tensor, shard: TpShard) -> None:
    """Write on a parameter (or buffer) where it lies; `copy.deepcopy` then copies that too."""
    setattr(parameter, _ATTRIBUTE, shard)
    keep_attributes_in_copies(parameter)


def copy_mark_to(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return a tensor with what is written on the one whose place it takes, if anything is."""
    shard = shard_of(before)
    if shard is not None:
        mark(tensor, shard)
    return tensor


def shard_of(parameter: torch.Tensor) -> TpShard | None:
    """Return what was written on a parameter; None for an ordinary one, equal on all ranks of the DP group."""
    shard: TpShard | None = getattr(parameter, _ATTRIBUTE, None)
    return shard


def is_tp_shard(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is this rank's piece of a larger one ("distributed parameter" in SMP v1)."""
    shard = shard_of(tensor)
    return shard is not None and shard.is_distributed


def sees_scaled_batch(tensor: torch.Tensor) -> bool:
    """Tell whether one backward gives a tensor the samples of all tensor-parallel ranks ("scaled batch" in SMP v1)."""
    shard = shard_of(tensor)
    return shard is not None and shard.sees_scaled_batch


def shard_range(size: int, rank: int, of: int) -> tuple[int, int]:
    """Return start and length of a rank's piece of a dimension; the last pieces are shorter where it is uneven."""
    longest = -(-size // of)
    start = min(longest * rank, size)
    return start, min(longest, size - start)


def take_shard(whole: torch.Tensor, shard: TpShard) -> torch.Tensor:
    """Return this rank's piece of a whole tensor of `shard.shape` (or of a state shaped like it), as a copy."""
    if shard.dim is None:
        return whole.clone()
    parts = torch.split(whole, list(shard.parts) or [whole.shape[shard.dim]], shard.dim)
    pieces = [
        part.narrow(shard.dim, *shard_range(part.shape[shard.dim], shard.tp_rank, shard.tp_size)) for part in parts
    ]
    return torch.cat(pieces, shard.dim) if len(pieces) > 1 else pieces[0].clone()


def join_shards(pieces: Sequence[torch.Tensor], shard: TpShard) -> torch.Tensor:
    """Return the whole tensor from the pieces of the ranks, in their order: the reverse of `take_shard`."""
    if shard.dim is None:
        return pieces[0].clone()
    parts = shard.parts or (sum(piece.shape[shard.dim] for piece in pieces),)
    parts_by_rank = [
        torch.split(piece, [shard_range(size, rank, shard.tp_size)[1] for size in parts], shard.dim)
        for rank, piece in enumerate(pieces)
    ]
    return torch.cat([piece for part in zip(*parts_by_rank, strict=True) for piece in part], shard.dim)
