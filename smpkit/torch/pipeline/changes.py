"""Changes in place: a value and its copies on other ranks lie in different memory, and a change reaches one of them.

The rank that runs a call sees by versions which arguments the call has changed, and tells all ranks with the first
result of each kind of call. From then on, on all ranks alike (`ValueChanges.apply`),

- a value that was changed where it lies is what it has become, and is sent again where it is needed;
- a value whose copy was changed on another rank is *stale*: using it is an error that names the call.

So a unit may do with its input what it does in one process, `nn.ReLU(inplace=True)` say, and `x += y` is fine. What
else lies in memory that has changed, a view for example, only the rank knows that holds it. It raises where that is
used and would be another value in one process (`ValueChanges.check`).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.core.tensor_spec import TensorSpec, spec_of_unwrapped, storage_of, tensors_in, version_of
from smpkit.torch.core.tree import children
from smpkit.torch.pipeline.stage_tensor import StageTensor

if TYPE_CHECKING:
    from smpkit.torch.pipeline.stage_context import StageContext

Arguments = tuple[Sequence[Any], dict[str, Any]]

Change = tuple[int, TensorSpec]
"""The number of a tensor among the arguments of a call that changes it in place, and what it is afterwards."""

_VERSION: Final[Callable[[torch.Tensor], int]] = operator.attrgetter("_version")


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how often each tensor has been changed in place."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # tensors made under torch.inference_mode() do not count
        return list(map(version_of, tensors))


def changed_arguments(
    tensors: Sequence[torch.Tensor], versions: Sequence[int], *, changes_first: bool
) -> tuple[Change, ...]:
    """Return the arguments that a call has changed, by their versions before it.

    Args:
        changes_first: whether it changes its first argument, perhaps without counting: its shape, its `requires_grad`.
    """
    now = versions_of(tensors)
    return tuple(
        [
            (number, spec_of_unwrapped(tensor))
            for number, tensor in enumerate(tensors)
            if now[number] != versions[number] or (changes_first and not number)
        ]
    )


def contents_of(value: Any) -> Any:
    """Return what containers among the arguments of a call hold, to compare it with later."""
    inside = children(value)
    return id(value) if inside is None else [(key, contents_of(part)) for key, part in inside.items()]


class ValueChanges:
    """The changes in place of one microbatch, as this rank knows them.

    Args:
        segments: by rank, the segment that it is in; the microbatch keeps it up to date.
    """

    has_stale = False
    """Whether any value of this microbatch is stale."""

    def __init__(self, stage: StageContext, segments: list[int]) -> None:
        self.missed: list[tuple[torch.Tensor, str, bool]] = []
        """Tensors of this rank in whose memory lie values that have missed a change; with each of them the name of the
        call that made the change, and whether it ran on another rank."""
        self._stage, self._segments = stage, segments
        self.received: list[weakref.ref[StageTensor]] = []
        """The copies that other ranks have sent here."""

    def apply(
        self,
        changes: Sequence[Change],
        owner: int,
        name: str,
        caller_args: Arguments,
        owner_args: Arguments,
        tensors: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Bring values up to date after a call on rank `owner` has changed arguments in place; all ranks call this.

        Args:
            caller_args, owner_args: the arguments as the caller and as rank `owner` have them.
            tensors: their data; None on the other ranks.
        """
        values, on_owner = tensors_in(caller_args), tensors_in(owner_args)
        for number, spec in changes:
            value, local = values[number], on_owner[number]
            if type(local) is not StageTensor:
                if id(value) not in self._stage.parameter_owners:
                    raise held_everywhere_error(name, value)
                continue  # a weight of the rank that runs the call
            if type(value) is not StageTensor:
                raise UsageError(
                    f"`{name}` changed in place a parameter of shape {list(value.shape)} that pipeline rank {owner},"
                    " which runs it, does not hold: only a copy has changed",
                    hint="let the module that changes a parameter own it, or put both on one rank with"
                    " smp.set_partition",
                )
            if spec.shape != value.spec.shape:
                raise UsageError(
                    f"a value of shape {list(value.shape)} that another pipeline rank may hold was given another shape"
                    f" in place, {list(spec.shape)}",
                    hint="write `x = x.unsqueeze(0)` instead of `x.unsqueeze_(0)`",
                )
            # On the other ranks that have the value, what was made of it, a view for example, has missed the change.
            for other in (value, *value.copies.values()):
                if other is not local and other.value is not None:
                    self.missed.append((other.value, name, True))
            if local is value:
                self._rebind(value, spec, name, None if tensors is None else tensors[number])
            else:
                value.make_stale(name)
                self.has_stale = True

    def _rebind(self, value: StageTensor, spec: TensorSpec, name: str, changed: torch.Tensor | None) -> None:
        """Let a value that its owner has changed be what it has become, to be sent again where it is needed.

        Args:
            changed: its data; None on the other ranks.
        """
        segment = self._segments[value.owner]
        if changed is not None:
            self._refuse_shared_copy(value, changed)
            if value.segment != segment:  # torch does not tell values that were detached here beside this one
                older = [change for change in self.missed if change[2] or storage_of(change[0]) != storage_of(changed)]
                self.missed = [*older, (changed, name, False)]  # what has missed an earlier change has missed this one
        value.value, value.segment, value.spec, value.copies = changed, segment, spec, {}
        value.requires_grad_(spec.requires_grad)

    def _refuse_shared_copy(self, value: StageTensor, changed: torch.Tensor) -> None:
        """Raise if a changed value lies in the memory of a copy that was sent here: what was sent has not changed."""
        for reference in self.received:
            copy = reference()
            if copy is not None and copy.value is not None and storage_of(copy.value) == storage_of(changed):
                self._stage.failed_alone = True  # no other rank knows where values lie here
                raise UsageError(
                    f"{value!r} was changed in place, and lies in the memory of what a module was given by another"
                    " pipeline rank: it has returned its input, or a view of it",
                    hint="change a copy: `x = x.clone()`",
                )

    def check(self, value: torch.Tensor) -> None:
        """Raise UsageError if a value of this rank would be another one in one process, or have another graph."""
        for tensor, name, elsewhere in self.missed:
            if storage_of(value) != storage_of(tensor):
                continue
            if elsewhere or (value.requires_grad and _base_of(value) is not _base_of(tensor)):
                self._stage.failed_alone = True  # no other rank knows where values lie here
                raise UsageError(
                    f"{spec_of_unwrapped(value)} shares its memory with a value that `{name}` has changed in place, in"
                    " a way that it could not follow over the pipeline",
                    hint="take views of a value after it has been changed, or give a module that changes its input a"
                    " copy, `module(x.clone())`",
                )

    def end(self, output: Any) -> None:
        """Check what the microbatch has returned, and forget all changes."""
        if self.has_stale or self.missed:
            for tensor in tensors_in(output):
                if type(tensor) is StageTensor:
                    tensor.refuse_stale()
                    if tensor.value is not None:
                        self.check(tensor.value)
            self.missed.clear()
        self.received.clear()


def _base_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def changed_through_view_error(value: torch.Tensor, rank: int) -> UsageError:
    return UsageError(
        f"{value!r} was changed in place through a value that shares its memory after pipeline rank {rank} had been"
        " sent it",
        hint="change the value itself, `x[:, 0] = 0` and not `x[:, 0].zero_()`, or write `x = x.clone()` before",
    )


def held_everywhere_error(name: str, tensor: torch.Tensor) -> UsageError:
    return UsageError(
        f"`{name}` changed in place a tensor of shape {list(tensor.shape)} that every pipeline rank holds, on one rank"
        " alone",
        hint="give a module that changes its input a copy, `module(x.clone())`; write `x = x + y` instead of `x += y`;"
        " put a buffer, the layer that makes its values and the code that changes it into one torch.nn.Module",
    )


def written_container_error(name: str) -> UsageError:
    return UsageError(
        f"`{name}` wrote into a dict, a list or a dataclass that it was given: other pipeline ranks keep theirs as they"
        " were",
        hint="return what it adds from the module's forward, and let the caller put it there",
    )


def unrecorded_change_error(name: str, change: Change) -> UsageError:
    number, spec = change
    return UsageError(
        f"`{name}` changed in place what it was given as tensor {number}, {spec}, which it did not do the first time"
        " for arguments of the same shapes",
        hint="the other pipeline ranks cannot know: let it change a copy, for example `x = x.clone()`",
    )
