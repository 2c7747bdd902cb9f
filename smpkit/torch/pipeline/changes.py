"""Changes in place: a value and its copies on other ranks lie in different memory, and a change reaches one of them.

The rank that runs a call sees by versions which arguments the call has changed, and tells all ranks with the first
result of each kind of call. From then on, on all ranks alike (`apply_changes`),

- a value that was changed where it lies is what it has become, and is sent again where it is needed;
- a value whose copy was changed on another rank is *stale*: using it is an error that names the call.

So a unit may do with its input what it does in one process, `nn.ReLU(inplace=True)` say, and `x += y` is fine. What
else lies in memory that has changed, a view for example, is not followed: it keeps its numbers on other ranks. Of 118
public models, none changes a value that it has received.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.core.tensor_spec import TensorSpec, spec_of_unwrapped, tensors_in, version_of
from smpkit.torch.core.tree import children
from smpkit.torch.pipeline.stage_tensor import StageTensor

if TYPE_CHECKING:
    from smpkit.torch.pipeline.microbatch import Microbatch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

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


def apply_changes(
    microbatch: Microbatch,
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
            if id(value) not in microbatch.stage.parameter_owners:
                raise held_everywhere_error(name, value)
            continue  # a weight of the rank that runs the call
        if type(value) is not StageTensor:
            raise UsageError(
                f"`{name}` changed in place a parameter of shape {list(value.shape)} that pipeline rank {owner},"
                " which runs it, does not hold: only a copy has changed",
                hint="let the module that changes a parameter own it, or put both on one rank with smp.set_partition",
            )
        if spec.shape != value.spec.shape:
            raise UsageError(
                f"a value of shape {list(value.shape)} that another pipeline rank may hold was given another shape"
                f" in place, {list(spec.shape)}",
                hint="write `x = x.unsqueeze(0)` instead of `x.unsqueeze_(0)`",
            )
        if local is value:  # it is what it has become, and is sent again where it is needed
            changed, segment = None if tensors is None else tensors[number], microbatch.current_segments[owner]
            value.value, value.segment, value.spec, value.copies = changed, segment, spec, {}
            value.requires_grad_(spec.requires_grad)
        else:
            value.make_stale(name)
            microbatch.has_stale = True


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
