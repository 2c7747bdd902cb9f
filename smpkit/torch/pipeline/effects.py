"""What a call does besides returning a result: changes its arguments in place, returns what lies in their memory.

Only the rank that runs a call sees that; it tells the others with the first result of each kind of call. So all ranks
keep the same account of which values are older than others, and a unit may do with its input what it does in one
process: `nn.ReLU(inplace=True)`, a Flatten, a Dropout that returns what it was given.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smpkit.errors import UsageError
from smpkit.torch.pipeline.located import Located, locate
from smpkit.torch.pipeline.messages import version_of
from smpkit.torch.pipeline.sharing import change, join, plain_in_memory_of, share_plain
from smpkit.torch.pipeline.specs import PLAIN, TensorSpec, spec_of, storage_of, tensors_in

if TYPE_CHECKING:
    from smpkit.torch.pipeline.microbatch import Microbatch

__all__ = ["Arguments", "Effects", "apply", "changed_anew", "changes_in_place", "noting_writes"]

_VERSION: Final[Callable[[torch.Tensor], int]] = operator.attrgetter("_version")
_NONE: Final[frozenset[int]] = frozenset()

_AUGMENTED: Final = frozenset(
    f"__i{name}__"
    for name in [
        "add",
        "sub",
        "mul",
        "truediv",
        "div",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    ]
)


def changes_in_place(func: Any, name: str, kwargs: dict[str, Any]) -> bool:
    """Return whether an operation changes its first argument, if only its shape or its need of gradients."""
    if func is torch.Tensor.__setitem__ or name in _AUGMENTED:
        return True
    return (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True


@dataclass(frozen=True)
class Effects:
    """What a call does besides returning a result; tensors count in order, the arguments' first, then the result's."""

    changed: tuple[tuple[int, TensorSpec], ...]
    """Arguments that it changes in place, with what they are afterwards."""
    shared: tuple[tuple[int, ...], ...]
    """Groups of tensors with a result among them that lie in the same memory."""

    is_view: bool = field(init=False, repr=False, compare=False)
    """Whether all it does is to return the memory of its first argument, as `x.view(-1)` does."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_view", not self.changed and self.shared == ((0, 1),))


class Arguments:
    """The tensors that a call is given on the rank that runs it, and how often each had been changed before."""

    __slots__ = ("_versions", "tensors", "written")

    def __init__(self, tensors: list[torch.Tensor], *, changes_first: bool) -> None:
        self.tensors = tensors
        self.written: Collection[int] = {storage_of(tensors[0])} if changes_first else _NONE
        """Storages that are known to be changed."""
        self._versions = _versions(tensors)

    def effects(self, made: Sequence[torch.Tensor]) -> Effects | None:
        """Return what a call that has just run did to its arguments; None if nothing."""
        versions = zip(self.tensors, self._versions, _versions(self.tensors), strict=True)
        changed = [
            (number, spec_of(tensor))
            for number, (tensor, before, after) in enumerate(versions)
            if before != after or (self.written and storage_of(tensor) in self.written)
        ]
        shared = self._shared(made)
        return Effects(tuple(changed), shared) if changed or shared else None

    def untold(self, known: Effects | None, name: str, made: Sequence[torch.Tensor]) -> Collection[int]:
        """Return the ids of results that share memory, which the other ranks do not know.

        Raises:
            UsageError: an argument was changed that had not been the first time.
        """
        # Most calls do nothing, and are asked each time: this must be quick.
        if _versions(self.tensors) == self._versions and (
            self._is_anew(made) or not (self.written or self._shared(made))
            if known is None
            else known.is_view and len(self.tensors) == len(made) == 1
        ):
            return _NONE
        found = self.effects(made)
        if found is None:
            return _NONE
        allowed = () if known is None else known.changed
        for number, spec in found.changed:
            if (number, spec) not in allowed:
                raise changed_anew(name, number, spec)
        groups = [] if known is None else [set(group) for group in known.shared]
        first = len(self.tensors)
        strange = [group for group in found.shared if not any(told.issuperset(group) for told in groups)]
        return {id(made[number - first]) for group in strange for number in group if number >= first}

    def _is_anew(self, made: Sequence[torch.Tensor]) -> bool:
        """Return whether no result is the memory of an argument, as far as views go, which torch keeps account of."""
        for result in made:
            if result._is_view():
                return False
            for tensor in self.tensors:
                if result is tensor:
                    return False
        return True

    def _shared(self, made: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
        groups: dict[int, list[int]] = {}
        for number, tensor in enumerate((*self.tensors, *made)):
            groups.setdefault(storage_of(tensor), []).append(number)
        first = len(self.tensors)
        return tuple([tuple(group) for group in groups.values() if len(group) > 1 and group[-1] >= first])


def changed_anew(name: str, number: int, spec: TensorSpec) -> UsageError:
    """Return the error for a change in place by a call that did not do so the first time."""
    return UsageError(
        f"`{name}` changed in place what it was given as tensor {number}, {spec}, which it did not do the first time"
        " for arguments of the same shapes",
        hint="the other pipeline ranks cannot know: let it change a copy, for example `x = x.clone()`",
    )


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # tensors of inference mode have none
        return [version_of(tensor) for tensor in tensors]


def noting_writes(function: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
    """Return a function that also notes which storages it writes to, for tensors that do not count their changes."""

    def called(*args: Any, **kwargs: Any) -> Any:
        written = set(arguments.written)
        with _Writes(written):
            result = function(*args, **kwargs)
        arguments.written = written
        return result

    return called


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
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


# --- all ranks learn of it ------------------------------------------------------------------------------------------


def apply(
    effects: Effects,
    microbatch: Microbatch,
    home: int,
    name: str,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    brought: tuple[tuple[Any, ...], dict[str, Any]],
    result: Any,
    tensors: Sequence[torch.Tensor] | None = None,
) -> None:
    """Let all values know what a call on rank `home` has done to its arguments; all ranks call this alike.

    Args:
        name: the module or operation.
        given: the arguments, as the caller has them.
        brought: the same as rank `home` has them.
        result: what the call returned, located.
        tensors: the arguments' data, on that rank.
    """
    stage, segment = microbatch.stage, microbatch.segment_of(home)
    microbatch.changes = microbatch.changes or bool(effects.changed)
    if effects.is_view and _is_view_of_first(given, brought, result):  # most views: no need to look for tensors
        _join_here(brought[0][0], result, tensors, 0, segment)
        if brought[0][0] is not given[0][0]:
            join(given[0][0], result, memory=False)
        return
    here = _tensors(brought)
    made: list[Any] = [result] if type(result) is Located else tensors_in(result)
    passed = _tensors(given)
    values: list[Any] = [
        tensor if type(tensor) is Located else microbatch.weights.as_held_on(home, tensor) for tensor in passed
    ]
    for group in effects.shared:
        first, *others = [made[number - len(here)] for number in group if number >= len(here)]
        for number in group[: -1 - len(others)]:
            if not isinstance(here[number], Located):
                share_plain(values[number], first)
                continue
            _join_here(here[number], first, tensors, number, segment)
            if here[number] is not values[number]:
                join(values[number], first, memory=False)
        for other in others:
            join(first, other, memory=True)
    for number, spec in effects.changed:
        value, data = values[number], None if tensors is None else tensors[number]
        if value is not passed[number]:
            raise UsageError(
                f"`{name}` changed in place a parameter of shape {list(value.shape)} that pipeline rank {home}, which"
                " runs it, does not hold: only a copy has changed",
                hint="let the module that changes a parameter own it, or put both on one rank with smp.set_partition",
            )
        if isinstance(value, Located):
            change(value, here[number], data, spec, segment, stage, values)
            for plain in plain_in_memory_of(value):
                _spread(plain, microbatch, home, spec, name)
        elif id(value) not in stage.weights_elsewhere:
            _spread(value, microbatch, home, spec, name)


def _is_view_of_first(
    given: tuple[tuple[Any, ...], dict[str, Any]], brought: tuple[tuple[Any, ...], dict[str, Any]], result: Any
) -> bool:
    """Return whether a view is one of the first positional argument."""
    if type(result) is not Located or not brought[0]:
        return False
    return type(brought[0][0]) is Located and type(given[0][0]) is Located


def _join_here(here: Located, made: Located, tensors: Sequence[torch.Tensor] | None, number: int, segment: int) -> None:
    """Note that a result is the memory of an argument, tensor `number` of the call, on the rank that ran it."""
    join(here, made, memory=True)
    if tensors is not None:  # perhaps cut off its graph: from now on it must be one with what shares it
        here.value, here.segment = tensors[number], segment


def _tensors(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
    """Return the tensors among arguments; most often there is a located value, and numbers."""
    args, kwargs = arguments
    if not kwargs and all(type(each) is Located or type(each) in PLAIN for each in args):
        return [each for each in args if type(each) is Located]
    return tensors_in(arguments)


def _spread(plain: torch.Tensor, microbatch: Microbatch, home: int, spec: TensorSpec, name: str) -> None:
    """Give all ranks what a call on rank `home` has made of a tensor that they all hold."""
    if spec.requires_grad:
        raise UsageError(
            f"`{name}` changed in place a tensor that every pipeline rank holds, by a value that needs gradients",
            hint="give it a copy, for example `x.clone()`",
        )
    stage = microbatch.stage
    # A copy travels: a batch's microbatches are views of it, and a change of one seems to be a change of all.
    value = plain.clone() if home == stage.rank else None
    changed = microbatch.everywhere(locate(spec_of(plain), stage.device, home, value, microbatch.segment_of(home)))
    if home != stage.rank:
        plain.detach().copy_(changed)
