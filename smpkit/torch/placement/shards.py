"""`TpShard`: how a parameter of this rank lies in the whole model's, and over which ranks its gradient is averaged.

Parameters stay plain local tensors. What is special about one is an attribute of the object, which data parallelism,
gradient norms and everything that saves or loads reads; so the object must stay, or hand its mark on.

A dimension of n is divided as `torch.chunk` (and DTensor) does it: every rank has ceil(n / tp_size), the last ones what
is left. So a vocabulary of 50257 needs no padding; where shapes must be equal, the modules refuse uneven sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from smpkit.errors import UnsupportedError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state


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
    def local_shapes(self) -> list[torch.Size]:
        """The shapes of the pieces of all ranks, in their order."""
        return [torch.Size(replace(self, tp_rank=rank).local_shape) for rank in range(self.tp_size)]

    @property
    def is_distributed(self) -> bool:
        """Whether the ranks hold different values ("distributed parameter" in SMP v1)."""
        return self.dim is not None

    @property
    def sees_scaled_batch(self) -> bool:
        """Whether one backward accumulates the samples of all tensor-parallel ranks ("scaled batch" in SMP v1)."""
        return self.group is CommGroup.RDP_GROUP


# --- the mark of a parameter ------------------------------------------------------------------------------------------


_ATTRIBUTE = "_smp_shard"


def mark(parameter: torch.Tensor, shard: TpShard) -> None:
    """Mark a parameter (or buffer) with its place in the whole one; `copy.deepcopy` then copies the mark too."""
    setattr(parameter, _ATTRIBUTE, shard)
    keep_attributes_in_copies(parameter)


def shard_of(parameter: torch.Tensor) -> TpShard | None:
    """Return the mark of a parameter; None for an ordinary one, equal on all ranks of the DP group."""
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


def copy_mark_to(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return `tensor` with the mark of `before`, which it replaces, if that has one."""
    shard = shard_of(before)
    if shard is not None:
        mark(tensor, shard)
    return tensor


def keep_attributes_in_copies(tensor: torch.Tensor) -> None:
    """Let `copy.deepcopy` copy the attributes of a parameter, as it does for any other tensor."""
    # `nn.Parameter.__deepcopy__` copies values only. Without it, `copy.deepcopy` copies what pickle would, attributes
    # included.
    if isinstance(tensor, nn.Parameter):
        tensor.__deepcopy__ = None  # type: ignore[method-assign, assignment]


# --- pieces and wholes ------------------------------------------------------------------------------------------------


def shard_range(size: int, rank: int, of: int) -> tuple[int, int]:
    """Return start and length of a rank's piece of a dimension; the last pieces of an uneven one are shorter."""
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
    # Part by part, and within each in the order of the ranks.
    pieces_by_part = zip(*parts_by_rank, strict=True)
    return torch.cat(list(itertools.chain.from_iterable(pieces_by_part)), shard.dim)


# --- hooks on what is divided -----------------------------------------------------------------------------------------


def hook_on_weight(module: nn.Module) -> str | None:
    """Return the name of a weight of a module that a hook was registered on, if there is one."""
    hooked = (
        name
        for name, parameter in module.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )
    return next(hooked, None)


# --- marks and `load_state_dict(assign=True)` -------------------------------------------------------------------------


def refuse_assignment(root: nn.Module) -> None:
    """Refuse `load_state_dict(assign=True)` for every part of a model, as long as it is the wrapped one.

    Besides marks, hooks that reduce gradients and the optimizer's states go by the object of a parameter.
    """
    for module in root.modules():
        # Scripted modules take no hooks. The hook of the whole model runs first, so only such a part that is loaded by
        # itself is missed.
        if isinstance(module, torch.jit.ScriptModule):
            continue
        module.register_load_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(module: nn.Module, _: Any, __: str, metadata: dict[str, Any], *_others: Any) -> None:
    is_asked = metadata.get("assign_to_params_buffers")
    if is_asked and state.model is not None and any(part is module for part in state.model.modules()):
        raise assignment_refusal()


def assignment_refusal() -> UnsupportedError:
    """Return the error for `load_state_dict(assign=True)`."""
    return UnsupportedError(
        "load_state_dict(assign=True) would replace parameters that the optimizer and data parallelism know",
        hint="leave `assign` out: values are copied into the parameters",
    )
