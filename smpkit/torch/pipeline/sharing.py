"""Which located values are the same memory, and what a change in place of one does to the others.

A value and what views were made of it are one *family*, and so is what a call on another rank has made of what the
value was sent as. All ranks know the same families, for they are told what calls do (see `effects.py`).

A value and what it was sent as lie in different memory, which a change in place divides: it happens on the rank that
runs the call. There the changed copy becomes the value; what lies in the same memory moves along, older copies are
forgotten. What lies elsewhere and would have changed in one process is *left behind*: using it is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from smpkit.errors import UsageError
from smpkit.torch.pipeline.located import Located
from smpkit.torch.pipeline.specs import TensorSpec, storage_of

if TYPE_CHECKING:
    from smpkit.torch.pipeline.stage import Stage

__all__ = ["Family", "change", "join", "left_behind", "plain_in_memory_of", "share_plain"]


class Family:
    """Values that are, or were sent from, one memory; all ranks know the same ones.

    Args:
        value: the first of them.
    """

    def __init__(self, value: Located) -> None:
        self.values = [weakref.ref(value)]
        self.plain: list[tuple[torch.Tensor, int, object]] = []
        """Tensors that every rank holds, each with the rank on which it is the memory of values, and that memory."""

    def members(self) -> list[Located]:
        return [member for reference in self.values if (member := reference()) is not None]


def join(value: Located, other: Located, *, memory: bool) -> None:
    """Note that two values belong together, and with `memory` that both lie in the same."""
    family = _family_of(value)
    if other.family is None:  # most often it has just been made
        other.family, other.memory = family, value.memory if memory else object()
        family.values.append(weakref.ref(other))
        return
    before, members = other.memory, other.family.members()
    if other.family is not family:
        family.values += other.family.values
        family.plain += other.family.plain
        for member in members:
            member.family = family
    if memory and before is not value.memory:
        for member in members:
            if member.memory is before:
                member.memory = value.memory


def _family_of(value: Located) -> Family:
    if value.family is None:
        value.family, value.memory = Family(value), object()
    return value.family


def share_plain(plain: torch.Tensor, value: Located) -> None:
    """Note that a value is the memory that its home has of a tensor which every rank holds."""
    _family_of(value).plain.append((plain, value.home, value.memory))


def plain_in_memory_of(value: Located) -> list[torch.Tensor]:
    """Return the tensors that every rank holds which have changed with a value, on its home.

    Raises:
        UsageError: one would have changed, but lies elsewhere.
    """
    if value.family is None or not value.family.plain:
        return []
    if any(memory is not value.memory for _, _, memory in value.family.plain):
        raise left_behind(value)
    return [plain for plain, _, _ in value.family.plain]


def change(
    value: Located,
    here: Located,
    changed: torch.Tensor | None,
    spec: TensorSpec,
    segment: int,
    stage: Stage,
    given: Sequence[torch.Tensor],
) -> None:
    """Bring a value that a call has changed in place up to date, and all that belong to it.

    Args:
        here: the value as the rank that ran the call had it: itself, or what it was sent as.
        changed: the data, on that rank.
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
    before, memory = value.value, here.memory
    if here is not value:
        value.home, value.memory = here.home, object() if memory is None else memory
    value.value, value.segment, value.spec = changed, segment, spec
    value.requires_grad_(spec.requires_grad)
    value.forget_copies()
    family = value.family
    for other in () if family is None else family.members():
        if other is value:
            continue
        there = other if other.home == here.home else other.copies.get(here.home)
        other.forget_copies()
        if there is not None and memory is not None and there.memory is memory:
            if there is not other:
                other.home, other.memory = there.home, memory
                other.value, other.segment = there.value, there.segment
            if changed is not None and _is_cut_off(other, changed):
                other.value = None
        elif other.home == stage.rank and other.value is not None and (before is None or _overlap(before, other.value)):
            other.value = None
            if any(other is argument for argument in given):
                stage.failed_alone = True  # only here are the data that show whether they overlap
                raise left_behind(other)


def left_behind(value: Located) -> UsageError:
    """Return the error for the use of a value that would be another one in one process."""
    return UsageError(
        f"{value!r} was changed in place through another value that shares its memory, in a way that it could not"
        " follow over the pipeline",
        hint="assign to the value itself, `x[:, 0] = 0` and not `x[:, 0].zero_()`, and take views of it after that;"
        " give a module that changes its input a copy, `module(x.clone())`",
    )


def _is_cut_off(other: Located, changed: torch.Tensor) -> bool:
    """Return whether the graph of a value does not know of a change of its memory: using it would train wrongly.

    Torch follows a change from a view to its base and to other views of it. It cannot where the value had to be cut off
    its graph, nor can the other ranks know that a relative needs gradients from now on.
    """
    value = other.value
    if value is None or not (changed.requires_grad and torch.is_grad_enabled()):
        return False
    if storage_of(value) != storage_of(changed):  # it may share memory and, this time, does not
        return False
    is_left = _base(value) is not _base(changed) and value.requires_grad
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
