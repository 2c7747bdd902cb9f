"""What calls return, so that ranks which do not run a call can go on without waiting for it.

They make placeholders from the *output spec* of the call: its result with a TensorSpec in place of each tensor. That of
a new kind of operation is *inferred*: every rank runs the operation on fake tensors and comes to the same spec, and the
owner gives its result these strides. What cannot be inferred (a module, a shape that depends on values of one rank) the
owner broadcasts, and with it which arguments the call changes in place (`changes.py`). Calls are of one kind if their
keys are equal: the module or operation, its mode, and the specs of its arguments.

Hugging Face models have outputs that no call returns: hooks put hidden states, attentions or router logits into lists,
*output collectors*, that the model's forward has opened. Over a pipeline the hooks run where the layer runs, so the
lists would fill on its rank alone, and a loss made of them would miss what other ranks hold. So a unit returns, beside
its result, what it has added to the lists, and every rank adds that to its own.

Other ranks rebuild a `torch.distributions.Distribution` from its tensors. For any other object that is no container,
such as a cache of keys and values, they have no placeholder: they get an `AbsentObject`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributions import Distribution
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes

from smpkit.errors import UsageError
from smpkit.torch.core.tensor_spec import (
    NON_TENSOR_TYPES,
    TensorSpec,
    as_layout,
    map_tensors,
    permute_to_memory,
    spec_of_unwrapped,
    tensors_in,
    version_of,
)
from smpkit.torch.core.tree import children, map_leaves, rebuild
from smpkit.torch.pipeline.changes import Change
from smpkit.torch.pipeline.stage_tensor import StageTensor, make_stage_tensor

MISSING: Final[Any] = object()
"""The output spec of a new kind of call. Not None, which is what a call such as `x[0] = 1` returns."""

_CONSTANTS: Final[tuple[Any, ...]] = (*NON_TENSOR_TYPES, complex, bytes, slice, type, Enum)
"""Leaves of a result that other ranks may copy: `has_same_specs` sees if a later call returns another one."""


# --- kinds of call ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class CallKind:
    """A kind of call: what calls with equal keys have in common."""

    key: tuple[Any, ...]
    """All that the result depends on: the target, its mode, whether there is a graph, autocast, and the arguments."""
    output_spec: Any = MISSING
    changes: tuple[Change, ...] = ()
    """The arguments that such a call changes in place."""
    is_inferred: bool = False
    """Whether its output spec was inferred, before any rank had run such a call."""
    has_tensors_only: bool = False
    """Whether its arguments are tensors, all of them, by position."""


class OutputSpecs(dict[tuple[Any, ...], CallKind]):
    """The kinds of call by their keys, and what they return; filled while microbatches run, alike on all ranks."""

    def __init__(self) -> None:
        self._with_other_floats: dict[tuple[Any, ...], CallKind] = {}
        """By key without floats, the latest kind of call whose output spec is known."""

    def __missing__(self, key: tuple[Any, ...]) -> CallKind:
        kind = self[key] = CallKind(key)
        return kind

    def remember(self, kind: CallKind, output_spec: Any, changes: tuple[Change, ...]) -> None:
        """Keep what calls of a new kind return and change."""
        kind.output_spec, kind.changes = output_spec, changes
        self._with_other_floats[_without_floats(kind.key)] = kind

    def expect_other_floats(self, kind: CallKind) -> bool:
        """Expect a call to return what one with other floats (a temperature) has returned, if there is one.

        Floats seldom decide shapes; where they do, the owner raises.
        """
        other = self._with_other_floats.get(_without_floats(kind.key))
        if other is None:
            return False
        kind.output_spec, kind.changes = other.output_spec, other.changes
        del self[kind.key]  # there may be a new float in each step
        return True


def _without_floats(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([part for part in key if type(part) is not float])


# --- output specs -----------------------------------------------------------------------------------------------------


class AbsentObject:
    """Stands for an object that a call on another rank has returned, and refuses to be used.

    A copy would stay that of the first microbatch, and its tensors would have no graph.
    """

    def __init__(self, kind: str, name: str) -> None:
        self._smpkit_refusal = (
            f"`{name}` returned an object of the type {kind}, which was used on a pipeline rank that does not have it:"
            " smpkit does not look into such objects"
        )

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UsageError(
            self._smpkit_refusal,
            hint="return its tensors instead, in a tuple, list, dict or dataclass, and make the object of them where it"
            " is used; or use it in the torch.nn.Module that makes it",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for methods that objects need not have
            raise AttributeError(name)
        self._refuse()

    __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __call__ = _refuse


def spec_of_leaf(leaf: Any, name: str) -> Any:
    """Return the entry of an output spec for one leaf (a stage tensor or anything else) of what `name` has returned."""
    if type(leaf) is StageTensor:
        return leaf.spec
    return leaf if isinstance(leaf, _CONSTANTS) else AbsentObject(type(leaf).__name__, name)


@dataclass
class _Expanded:
    """Stands for a `torch.distributions.Distribution` as a container of its attributes, in which tensors are found."""

    kind: type
    attributes: dict[str, Any]


def expand_distributions(value: Any) -> Any:
    """Put a container of its attributes in place of each distribution in a nested value."""
    return map_leaves(_expand, value)


def _expand(leaf: Any) -> Any:
    return _Expanded(type(leaf), expand_distributions(vars(leaf))) if isinstance(leaf, Distribution) else leaf


def restore_distributions(value: Any) -> Any:
    """Undo `expand_distributions`, without the constructors of the distributions, which may check their arguments."""
    if type(value) is _Expanded:
        distribution: Any = object.__new__(value.kind)
        vars(distribution).update(restore_distributions(value.attributes))
        return distribution
    inside = children(value)
    if inside is None:
        return value
    return rebuild(value, {key: restore_distributions(part) for key, part in inside.items()})


def make_placeholders(output_spec: Any, device: torch.device, owner: int) -> Any:
    """Return the result of a call that rank `owner` runs, with stage tensors without data."""
    if type(output_spec) is TensorSpec:
        return make_stage_tensor(output_spec, device, owner)
    if type(output_spec) is tuple:
        return tuple([make_placeholders(part, device, owner) for part in output_spec])
    inside = children(output_spec)
    if inside is None:
        return output_spec
    result = rebuild(output_spec, {key: make_placeholders(part, device, owner) for key, part in inside.items()})
    return restore_distributions(result) if type(result) is _Expanded else result


def has_same_specs(left: Any, right: Any) -> bool:
    """Return whether placeholders that other ranks have made from one output spec are right for the other, too."""
    if isinstance(left, TensorSpec) or isinstance(right, TensorSpec):
        return bool(left == right)
    parts, others = children(left), children(right)
    if parts is None or others is None:
        return type(left) is type(right) and (isinstance(left, AbsentObject) or left == right)
    return parts.keys() == others.keys() and all(has_same_specs(part, others[key]) for key, part in parts.items())


def describe_difference(left: Any, right: Any) -> str:
    """Return the first difference of two output specs, for an error."""
    for first, now in zip(_leaves_in(left), _leaves_in(right), strict=False):
        if not has_same_specs(first, now):
            if isinstance(first, TensorSpec) and str(first) == str(now):
                what = "stride" if first.stride != now.stride else "requires_grad"
                return f"{first} with {what}={getattr(first, what)} the first time and {getattr(now, what)} now"
            return f"{first} the first time and {now} now"
    return "another structure than before"


def _leaves_in(output_spec: Any) -> Iterator[Any]:
    inside = None if isinstance(output_spec, TensorSpec) else children(output_spec)
    if inside is None:
        yield output_spec
    for part in (inside or {}).values():
        yield from _leaves_in(part)


# --- inference --------------------------------------------------------------------------------------------------------


_WITH_RUNNING_AVERAGES: Final = frozenset({"batch_norm", "instance_norm"})


def infer_output(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    known: Callable[[torch.Tensor], TensorSpec | None],
    device: torch.device,
) -> Any:
    """Return the output spec of an operation between units that changes no argument; all ranks come to the same one.

    Returns MISSING where it depends on the data of the arguments.

    Args:
        args, kwargs: stage tensors, other tensors, and anything else.
        known: returns the spec of a tensor whose data some ranks lack, and None for any other.
        device: where stage tensors live.
    """
    if getattr(function, "__name__", "") in _WITH_RUNNING_AVERAGES:
        return MISSING  # only the owner may change them
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        # What all ranks hold is faked, too: an operation may send it (the loss of tensor parallelism its labels), and
        # ranks that have sent such a shape before would go on where others wait.
        if (spec := known(tensor)) is not None:
            shape, stride, place = spec.shape, spec.stride, device
        elif tensor.layout is torch.strided:
            shape, stride, place = tensor.shape, tensor.stride(), tensor.device
        else:
            return tensor
        if id(tensor) not in fakes:
            fakes[id(tensor)] = torch.empty_strided(
                shape, stride, dtype=tensor.dtype, device=place, requires_grad=tensor.requires_grad
            )
        return fakes[id(tensor)]

    try:
        with without_dispatch_modes(), _without_hooks():
            function, args, kwargs = _without_deciding_values(function, args, kwargs)
            with FakeTensorMode(allow_non_fake_inputs=True):
                args, kwargs = map_tensors(fake, (args, kwargs))
                output = function(*args, **kwargs)
        if any(map(version_of, fakes.values())) or any(
            value.layout is not torch.strided for value in tensors_in(output)
        ):
            return MISSING
        return map_tensors(spec_of_unwrapped, output)
    except Exception:
        # A result whose shape depends on data, or an operation that is wrong: its owner will say so.
        return MISSING


def _without_deciding_values(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """Return a call with a result of the same shape in which no values of masks and repetitions decide the shape.

    Fake tensors have no values. Those that every rank holds are looked at here.
    """
    if function is torch.Tensor.__getitem__:
        return function, (args[0], _masks_to_positions(args[1])), kwargs
    if function in (torch.Tensor.masked_select, torch.masked_select):
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        positions = _masks_to_positions(args[1].expand(shape))
        return lambda value, *index: value.expand(shape)[index], (args[0], *positions), {}
    if function in (torch.Tensor.repeat_interleave, torch.repeat_interleave) and type(args[1]) is torch.Tensor:
        return function, args, {**kwargs, "output_size": int(args[1].sum())}
    return function, args, kwargs


def _masks_to_positions(index: Any) -> Any:
    """Return an index with each mask replaced by the positions that it selects."""
    parts = index if type(index) is tuple else (index,)
    if not any(map(_is_mask, parts)):
        return index
    return tuple([index for part in parts for index in (part.nonzero(as_tuple=True) if _is_mask(part) else (part,))])


def _is_mask(index: Any) -> bool:
    return type(index) is torch.Tensor and index.dtype is torch.bool and index.dim() > 0


def _without_hooks() -> contextlib.AbstractContextManager[object]:
    """Keep hooks on saved tensors (of offloading, of checkpointing) from seeing what an inference saves."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def with_strides_of(output_spec: Any, output: Any) -> Any:
    """Return what an operation has returned, with the strides that were inferred for it."""
    specs = (leaf for leaf in _leaves_in(output_spec) if isinstance(leaf, TensorSpec))

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        spec = next(specs, None)  # None: it returns more than was inferred; the caller raises
        if spec is None or tensor.shape != spec.shape or tensor.stride() == spec.stride:
            return tensor
        return as_layout(permute_to_memory(tensor, spec.order).contiguous(), spec.shape, spec.order, spec.stride)

    return map_tensors(laid_out, output)


# --- output collectors of Hugging Face models -------------------------------------------------------------------------

Collectors = dict[str, Any]
"""By kind of output, a list; beside the lists settings, under names that begin with an underscore."""


def active_collectors() -> Callable[[], Collectors | None] | None:
    """Return a function that returns the active collectors, or None; None if no library has any."""
    # Transformers keeps them in a private context variable.
    active: Any = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    return None if active is None else active.get


def collector_key(collectors: Collectors) -> tuple[Any, ...]:
    """Return what decides which outputs a call adds: the kinds, how many of each there are, and the settings."""
    return tuple(
        (key, len(kept) if isinstance(kept, list) else tuple(sorted(kept))) for key, kept in collectors.items()
    )


def returning_collected(collectors: Collectors, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that removes from the lists what `function` adds to them, and returns it with the result."""

    def called(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, tuple[Any, ...]]]:
        counts = {key: len(kept) for key, kept in collectors.items() if isinstance(kept, list)}
        output = function(*args, **kwargs)
        collected = {key: tuple(collectors[key][count:]) for key, count in counts.items()}
        for key, count in counts.items():
            del collectors[key][count:]
        return output, collected

    return called


def add_collected(collectors: Collectors, returned: tuple[Any, dict[str, tuple[Any, ...]]]) -> Any:
    """Add to this rank's lists what `returning_collected` has removed on the owner; return the call's result."""
    output, collected = returned
    for key, parts in collected.items():
        collectors[key].extend(parts)
    return output
