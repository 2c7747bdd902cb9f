"""Which stage tensors alias each other, and what a change in place of one does to the others.

A value and what views were made of it form one *alias set*, as does what a call on another rank has made of what the
value was sent as. All ranks know the same alias sets, for they all record what calls do (see `effects.py`).

A value and what it was sent as lie in different memory, which a change in place divides: it happens on the rank that
runs the call. There the changed copy becomes the value; what lies in the same memory follows it, older copies are
dropped. What lies elsewhere and would have changed in one process is *stale*: using it is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from smpkit.errors import UsageError
from smpkit.torch.pipeline.located import StageTensor
from smpkit.torch.pipeline.specs import TensorSpec, storage_of

if TYPE_CHECKING:
    from smpkit.torch.pipeline.stage import StageContext

__all__ = [
    "AliasSet",
    "apply_mutation",
    "mark_aliased",
    "mark_replicated_aliased",
    "replicated_aliases_of",
    "stale_alias_error",
]


class AliasSet:
    """Values that are, or were sent from, one memory; all ranks know the same ones.

    Args:
        value: the first of them.
    """

    def __init__(self, value: StageTensor) -> None:
        self.values = [weakref.ref(value)]
        self.replicated: list[tuple[torch.Tensor, int, object]] = []
        """Tensors that every rank holds, each with the rank on which it is the memory of values, and that memory."""

    def members(self) -> list[StageTensor]:
        return [member for reference in self.values if (member := reference()) is not None]


def mark_aliased(value: StageTensor, other: StageTensor, *, same_storage: bool) -> None:
    """Note that two values belong together, and with `same_storage` that both lie in the same."""
    alias_set = _alias_set_of(value)
    if other.alias_set is None:  # most often it has just been made
        other.alias_set, other.storage_key = alias_set, value.storage_key if same_storage else object()
        alias_set.values.append(weakref.ref(other))
        return
    before, members = other.storage_key, other.alias_set.members()
    if other.alias_set is not alias_set:
        alias_set.values += other.alias_set.values
        alias_set.replicated += other.alias_set.replicated
        for member in members:
            member.alias_set = alias_set
    if same_storage and before is not value.storage_key:
        for member in members:
            if member.storage_key is before:
                member.storage_key = value.storage_key


def _alias_set_of(value: StageTensor) -> AliasSet:
    if value.alias_set is None:
        value.alias_set, value.storage_key = AliasSet(value), object()
    return value.alias_set


def mark_replicated_aliased(replicated: torch.Tensor, value: StageTensor) -> None:
    """Note that a value is the memory that its owner has of a tensor which every rank holds."""
    _alias_set_of(value).replicated.append((replicated, value.owner, value.storage_key))


def replicated_aliases_of(value: StageTensor) -> list[torch.Tensor]:
    """Return the tensors that every rank holds which have changed with a value, on its owner.

    Raises:
        UsageError: one would have changed, but lies elsewhere.
    """
    if value.alias_set is None or not value.alias_set.replicated:
        return []
    if any(storage_key is not value.storage_key for _, _, storage_key in value.alias_set.replicated):
        raise stale_alias_error(value)
    return [replicated for replicated, _, _ in value.alias_set.replicated]


def apply_mutation(
    value: StageTensor,
    on_owner: StageTensor,
    mutated: torch.Tensor | None,
    spec: TensorSpec,
    segment: int,
    stage: StageContext,
    given: Sequence[torch.Tensor],
) -> None:
    """Bring a value that a call has changed in place up to date, and all that belong to it.

    Args:
        on_owner: the value as the rank that ran the call had it: itself, or what it was sent as.
        mutated: the data, on that rank.
        segment: of that rank.
        stage: of this rank.
        given: what else the call was given.
    """
    if spec.shape != value.spec.shape:
        raise UsageError(
            f"a value of shape {list(value.shape)} that another pipeline rank may hold was given another shape in"
            f" place, {list(spec.shape)}",
            hint="write `x = x.unsqueeze(0)` instead of `x.unsqueeze_(0)`",
        )
    before, storage_key = value.value, on_owner.storage_key
    if on_owner is not value:
        value.owner, value.storage_key = on_owner.owner, object() if storage_key is None else storage_key
    value.value, value.segment, value.spec = mutated, segment, spec
    value.requires_grad_(spec.requires_grad)
    value.drop_copies()
    alias_set = value.alias_set
    for other in () if alias_set is None else alias_set.members():
        if other is value:
            continue
        other_on_owner = other if other.owner == on_owner.owner else other.copies.get(on_owner.owner)
        other.drop_copies()
        if other_on_owner is not None and storage_key is not None and other_on_owner.storage_key is storage_key:
            if other_on_owner is not other:
                other.owner, other.storage_key = other_on_owner.owner, storage_key
                other.value, other.segment = other_on_owner.value, other_on_owner.segment
            if mutated is not None and _graph_misses_mutation(other, mutated):
                other.value = None
        elif (
            other.owner == stage.rank and other.value is not None and (before is None or _overlap(before, other.value))
        ):
            other.value = None
            if any(other is argument for argument in given):
                stage.failed_alone = True  # only here are the data that show whether they overlap
                raise stale_alias_error(other)


def stale_alias_error(value: StageTensor) -> UsageError:
    """Return the error for the use of a stale value."""
    return UsageError(
        f"{value!r} was changed in place through another value that shares its memory, in a way that it could not"
        " follow over the pipeline",
        hint="assign to the value itself, `x[:, 0] = 0` and not `x[:, 0].zero_()`, and take views of it after that;"
        " give a module that changes its input a copy, `module(x.clone())`",
    )


def _graph_misses_mutation(other: StageTensor, mutated: torch.Tensor) -> bool:
    """Return whether the graph of a value does not know of a change of its memory: using it would train wrongly.

    Torch follows a change from a view to its base and to other views of it. It cannot where the value had to be cut off
    its graph, nor can the other ranks know that a relative needs gradients from now on.
    """
    value = other.value
    if value is None or not (mutated.requires_grad and torch.is_grad_enabled()):
        return False
    if storage_of(value) != storage_of(mutated):  # it may share memory and, this time, does not
        return False
    is_left = _base(value) is not _base(mutated) and value.requires_grad
    return is_left or value.requires_grad != other.spec.requires_grad


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have an element in common; those of other memory count as if they had."""
    size = left.itemsize
    if storage_of(left) != storage_of(right) or size != right.itemsize:
        return True
    count = left.untyped_storage().nbytes() // size
    if count in (left.numel(), right.numel()):
        return True
    taken = torch.zeros(count, dtype=torch.bool, device=left.device)
    taken.as_strided(left.shape, left.stride(), left.storage_offset()).fill_(True)
    return bool(taken.as_strided(right.shape, right.stride(), right.storage_offset()).any())
