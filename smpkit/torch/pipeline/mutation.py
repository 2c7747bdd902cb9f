"""Mutation and aliasing across ranks: what a call does besides returning a result, in the memory of its arguments.

Only the rank that runs a call sees that; it broadcasts it as `MutationInfo` with the first result of each kind of call.
`apply_mutations` brings all values up to date, alike on all ranks. So a unit may do with its input what it does in one
process: `nn.ReLU(inplace=True)`, a Flatten, a Dropout that returns its input.

A value and the views made of it form one *alias set*, as does what a call on another rank has made of a copy that was
sent there. All ranks know the same alias sets, since they all apply the same mutation infos.

A value and its copy on another rank lie in different memory, so a change in place, which happens on the rank that runs
the call, separates them. The changed copy becomes the value; what lies in the same memory follows it, older copies are
dropped. What lies elsewhere and would have changed in one process is *stale*: using it is an error.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smpkit.errors import UsageError
from smpkit.torch.core.tensor_spec import NON_TENSOR_TYPES, TensorSpec, spec_of, storage_of, tensors_in, version_of
from smpkit.torch.pipeline.stage_tensor import StageTensor, make_stage_tensor

if TYPE_CHECKING:
    from smpkit.torch.pipeline.microbatch import Microbatch
    from smpkit.torch.pipeline.stage_context import StageContext

__all__ = [
    "AliasSet",
    "MutationInfo",
    "TrackedArguments",
    "apply_mutation",
    "apply_mutations",
    "changes_in_place",
    "mark_aliased",
    "mark_replicated_aliased",
    "replicated_aliases_of",
    "stale_alias_error",
    "tracking_writes",
    "unrecorded_mutation_error",
]

_VERSION: Final[Callable[[torch.Tensor], int]] = operator.attrgetter("_version")
_NONE: Final[frozenset[int]] = frozenset()


def changes_in_place(func: Any, name: str, kwargs: dict[str, Any]) -> bool:
    """Return whether an operation changes its first argument: its values, its shape or its `requires_grad`."""
    # `__iadd__` and its like: those that are `__add__` without the letter.
    if func is torch.Tensor.__setitem__ or (name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}")):
        return True
    return (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True


@dataclass(frozen=True)
class MutationInfo:
    """What a call does besides returning a result; tensors are numbered, those of the arguments first."""

    mutated: tuple[tuple[int, TensorSpec], ...]
    """Arguments that it changes in place, with what they are afterwards."""
    aliased: tuple[tuple[int, ...], ...]
    """Groups of tensors that lie in the same memory, each with a result in it."""

    is_view: bool = field(init=False, repr=False, compare=False)
    """Whether it only returns the memory of its first argument, as `x.view(-1)` does."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_view", not self.mutated and self.aliased == ((0, 1),))


class TrackedArguments:
    """The tensors that a call is given on the rank that runs it, and the version of each before the call."""

    __slots__ = ("_version_of", "_versions", "tensors", "written")

    def __init__(self, tensors: list[torch.Tensor], *, changes_first: bool) -> None:
        self.tensors = tensors
        self.written: Collection[int] = {storage_of(tensors[0])} if changes_first else _NONE
        """Storages that are known to be changed."""
        self._version_of = _VERSION
        try:
            self._versions = list(map(_VERSION, tensors))
        except RuntimeError:  # tensors of inference mode have none
            self._version_of = version_of
            self._versions = list(map(version_of, tensors))

    def are_apart(self, output: torch.Tensor) -> bool:
        """Return whether the call that has just run changed none of them, and its result has memory of its own."""
        if output._is_view() or self._versions != list(map(self._version_of, self.tensors)):
            return False
        for tensor in self.tensors:  # noqa: SIM110 - a generator takes twice as long
            if tensor is output:
                return False
        return True

    def mutation_info(self, outputs: Sequence[torch.Tensor]) -> MutationInfo | None:
        """Return what the call that has just run did to its arguments; None if nothing."""
        versions = zip(self.tensors, self._versions, map(self._version_of, self.tensors), strict=True)
        mutated = [
            (number, spec_of(tensor))
            for number, (tensor, before, after) in enumerate(versions)
            if before != after or (self.written and storage_of(tensor) in self.written)
        ]
        aliased = self._find_aliases(outputs)
        return MutationInfo(tuple(mutated), aliased) if mutated or aliased else None

    def unrecorded_aliases(
        self, known: MutationInfo | None, name: str, outputs: Sequence[torch.Tensor]
    ) -> Collection[int]:
        """Return the ids of results that share memory, unlike in the recorded call: other ranks do not know.

        Raises:
            UsageError: the call has changed an argument that the recorded one did not change.
        """
        if known is not None and known.is_view and len(self.tensors) == len(outputs) == 1:  # most views
            if self._versions == [self._version_of(self.tensors[0])]:
                return _NONE
        elif known is None and all(map(self.are_apart, outputs)):
            return _NONE
        found = self.mutation_info(outputs)
        if found is None:
            return _NONE
        allowed = () if known is None else known.mutated
        for number, spec in found.mutated:
            if (number, spec) not in allowed:
                raise unrecorded_mutation_error(name, number, spec)
        groups = [] if known is None else [set(group) for group in known.aliased]
        first = len(self.tensors)
        unrecorded = [group for group in found.aliased if not any(recorded.issuperset(group) for recorded in groups)]
        return {id(outputs[number - first]) for group in unrecorded for number in group if number >= first}

    def _find_aliases(self, outputs: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
        groups: dict[int, list[int]] = {}
        for number, tensor in enumerate((*self.tensors, *outputs)):
            groups.setdefault(storage_of(tensor), []).append(number)
        first = len(self.tensors)
        return tuple([tuple(group) for group in groups.values() if len(group) > 1 and group[-1] >= first])


def unrecorded_mutation_error(name: str, number: int, spec: TensorSpec) -> UsageError:
    """Return the error for a change in place that the recorded call did not make."""
    return UsageError(
        f"`{name}` changed in place what it was given as tensor {number}, {spec}, which it did not do the first time"
        " for arguments of the same shapes",
        hint="the other pipeline ranks cannot know: let it change a copy, for example `x = x.clone()`",
    )


def tracking_writes(function: Callable[..., Any], arguments: TrackedArguments) -> Callable[..., Any]:
    """Return a function that also notes the storages it writes to, for inference tensors, which have no version."""

    def called(*args: Any, **kwargs: Any) -> Any:
        written = set(arguments.written)
        with _WriteTracker(written):
            result = function(*args, **kwargs)
        arguments.written = written
        return result

    return called


class _WriteTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, storages: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        for number, argument in enumerate(() if schema is None else schema.arguments):
            if argument.is_write:
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                self.storages.update(map(storage_of, tensors_in(value)))
        return func(*args, **kwargs)


def apply_mutations(
    mutation_info: MutationInfo,
    microbatch: Microbatch,
    owner: int,
    name: str,
    caller_args: tuple[tuple[Any, ...], dict[str, Any]],
    owner_args: tuple[tuple[Any, ...], dict[str, Any]],
    result: Any,
    tensors: Sequence[torch.Tensor] | None = None,
) -> None:
    """Apply to all values what a call on rank `owner` has done to its arguments; all ranks call this.

    Args:
        name: the module or operation.
        caller_args: the arguments, as the caller has them.
        owner_args: the same as rank `owner` has them.
        result: what the call returned, as stage tensors.
        tensors: the arguments' data, on that rank.
    """
    stage, segment = microbatch.stage, microbatch.segments[owner]
    microbatch.has_mutations = microbatch.has_mutations or bool(mutation_info.mutated)
    if mutation_info.is_view and _is_view_of_first(caller_args, owner_args, result):  # the fast path of most views
        _mark_aliased_on_owner(owner_args[0][0], result, tensors, 0, segment)
        if owner_args[0][0] is not caller_args[0][0]:
            mark_aliased(caller_args[0][0], result, same_storage=False)
        return
    owner_tensors = _tensors(owner_args)
    outputs: list[Any] = [result] if type(result) is StageTensor else tensors_in(result)
    caller_tensors = _tensors(caller_args)
    values: list[Any] = [
        tensor if type(tensor) is StageTensor else microbatch.weights.as_stored_on(owner, tensor)
        for tensor in caller_tensors
    ]
    for group in mutation_info.aliased:
        first, *others = [outputs[number - len(owner_tensors)] for number in group if number >= len(owner_tensors)]
        for number in group[: -1 - len(others)]:
            if not isinstance(owner_tensors[number], StageTensor):
                mark_replicated_aliased(values[number], first)
                continue
            _mark_aliased_on_owner(owner_tensors[number], first, tensors, number, segment)
            if owner_tensors[number] is not values[number]:
                mark_aliased(values[number], first, same_storage=False)
        for other in others:
            mark_aliased(first, other, same_storage=True)
    for number, spec in mutation_info.mutated:
        value, data = values[number], None if tensors is None else tensors[number]
        if value is not caller_tensors[number]:
            raise UsageError(
                f"`{name}` changed in place a parameter of shape {list(value.shape)} that pipeline rank {owner}, which"
                " runs it, does not hold: only a copy has changed",
                hint="let the module that changes a parameter own it, or put both on one rank with smp.set_partition",
            )
        if isinstance(value, StageTensor):
            apply_mutation(value, owner_tensors[number], data, spec, segment, stage, values)
            for replicated in replicated_aliases_of(value):
                _replicate_mutation(replicated, microbatch, owner, spec, name)
        elif id(value) not in stage.parameter_owners:
            _replicate_mutation(value, microbatch, owner, spec, name)


def _is_view_of_first(
    caller_args: tuple[tuple[Any, ...], dict[str, Any]], owner_args: tuple[tuple[Any, ...], dict[str, Any]], result: Any
) -> bool:
    """Return whether a view is of the first positional argument, a stage tensor."""
    if type(result) is not StageTensor or not owner_args[0]:
        return False
    return type(owner_args[0][0]) is StageTensor and type(caller_args[0][0]) is StageTensor


def _mark_aliased_on_owner(
    on_owner: StageTensor, output: StageTensor, tensors: Sequence[torch.Tensor] | None, number: int, segment: int
) -> None:
    """Note that a result lies in the memory of an argument, tensor `number` of the call, on the rank that ran it."""
    mark_aliased(on_owner, output, same_storage=True)
    if tensors is not None:
        # The call may have been given a detached leaf of the argument: from now on that leaf is the argument's data, or
        # a change of one would not reach the graph of the other.
        on_owner.value, on_owner.segment = tensors[number], segment


def _tensors(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
    """Return the tensors among arguments, with a fast path for stage tensors and numbers."""
    args, kwargs = arguments
    if not kwargs and all(type(each) is StageTensor or type(each) in NON_TENSOR_TYPES for each in args):
        return [each for each in args if type(each) is StageTensor]
    return tensors_in(arguments)


def _replicate_mutation(
    replicated: torch.Tensor, microbatch: Microbatch, owner: int, spec: TensorSpec, name: str
) -> None:
    """Broadcast a tensor that all ranks hold and that a call on rank `owner` has changed in place."""
    if spec.requires_grad:
        raise UsageError(
            f"`{name}` changed in place a tensor that every pipeline rank holds, by a value that needs gradients",
            hint="give it a copy, for example `x.clone()`",
        )
    stage = microbatch.stage
    # Send a copy: microbatches are views of one batch, so a change of one raises the version of all of them.
    value = replicated.clone() if owner == stage.rank else None
    mutated = microbatch.replicate(
        make_stage_tensor(spec_of(replicated), stage.device, owner, value, microbatch.segments[owner])
    )
    if owner != stage.rank:
        replicated.detach().copy_(mutated)


class AliasSet:
    """Stage tensors that share one memory, or were sent from it; all ranks have the same sets.

    Args:
        value: the first of them.
    """

    def __init__(self, value: StageTensor) -> None:
        self.values = [weakref.ref(value)]
        self.replicated: list[tuple[torch.Tensor, int, object]] = []
        """Tensors that every rank holds, each with a rank on which members lie in its memory, and their storage key."""

    def members(self) -> list[StageTensor]:
        return [member for reference in self.values if (member := reference()) is not None]


def mark_aliased(value: StageTensor, other: StageTensor, *, same_storage: bool) -> None:
    """Put two values into one alias set; with `same_storage` both lie in the same memory."""
    alias_set = _alias_set_of(value)
    if other.alias_set is None:  # most often, `other` has just been made
        other.alias_set = alias_set
        other.storage_key = value.storage_key if same_storage else object()
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
    """Note that a value lies in the memory that its owner has of a tensor which every rank holds."""
    _alias_set_of(value).replicated.append((replicated, value.owner, value.storage_key))


def replicated_aliases_of(value: StageTensor) -> list[torch.Tensor]:
    """Return the tensors held by every rank that a change of `value` has changed on its owner.

    Raises:
        UsageError: in one process one of them would have changed, but here it lies in other memory.
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
    """Update a value that a call has changed in place, and its alias set.

    Args:
        on_owner: the value as the rank that ran the call had it: itself, or a copy.
        mutated: the data, on that rank.
        segment: of that rank.
        stage: of this rank.
        given: all tensors that the call was given.
    """
    if spec.shape != value.spec.shape:
        raise UsageError(
            f"a value of shape {list(value.shape)} that another pipeline rank may hold was given another shape in"
            f" place, {list(spec.shape)}",
            hint="write `x = x.unsqueeze(0)` instead of `x.unsqueeze_(0)`",
        )
    before, storage_key = value.value, on_owner.storage_key
    if on_owner is not value:  # the changed copy becomes the value
        value.owner = on_owner.owner
        value.storage_key = object() if storage_key is None else storage_key
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
            # It lies in the changed memory, and has changed with it.
            if other_on_owner is not other:
                other.owner, other.storage_key = other_on_owner.owner, storage_key
                other.value, other.segment = other_on_owner.value, other_on_owner.segment
            if mutated is not None and _graph_misses_mutation(other, mutated):
                other.value = None
        elif (
            other.owner == stage.rank and other.value is not None and (before is None or _overlap(before, other.value))
        ):
            other.value = None  # stale: it would have changed in one process
            if any(other is argument for argument in given):
                stage.failed_alone = True  # only this rank has the data that show whether they overlap
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
    """Return whether the graph of a value misses a change of its memory, so that using it would train wrongly.

    Torch follows a change from a view to its base and to other views. It cannot where the value was detached for a
    later segment, and other ranks cannot know that an alias needs gradients from now on.
    """
    value = other.value
    if value is None or not (mutated.requires_grad and torch.is_grad_enabled()):
        return False
    if storage_of(value) != storage_of(mutated):  # aliases of the recorded call that have other memory this time
        return False
    is_left = _base(value) is not _base(mutated) and value.requires_grad
    return is_left or value.requires_grad != other.spec.requires_grad


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have an element in common; True as well if they lie in different memory."""
    size = left.itemsize
    if storage_of(left) != storage_of(right) or size != right.itemsize:
        return True
    count = left.untyped_storage().nbytes() // size
    if count in (left.numel(), right.numel()):
        return True
    taken = torch.zeros(count, dtype=torch.bool, device=left.device)
    taken.as_strided(left.shape, left.stride(), left.storage_offset()).fill_(True)
    return bool(taken.as_strided(right.shape, right.stride(), right.storage_offset()).any())
