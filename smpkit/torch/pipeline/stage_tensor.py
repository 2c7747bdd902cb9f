"""Stage tensors: values of which one rank, the owner, holds the data, while all ranks know the shape.

They exist in the step function and in modules whose parts lie on several ranks. Operations on them follow the data:
the owner computes, the others make placeholders of the same shape (`microbatch.py`). What depends on shapes alone is
answered at once; what Python needs to know (`.item()`, `if tensor:`) is broadcast from the owner. `_HANDLERS` at the
end says which function is answered how.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.nn import functional

from smpkit.errors import UsageError
from smpkit.torch.core.tensor_spec import TensorSpec, map_tensors, spec_of

if TYPE_CHECKING:
    from smpkit.torch.pipeline.microbatch import Microbatch

T = torch.Tensor
_NO_COPIES: Final[Mapping[int, Any]] = MappingProxyType({})
_STRIDED: Final = torch.strided
_make_wrapper: Final[Callable[..., Any]] = torch.Tensor._make_wrapper_subclass


Function = Callable[..., Any]


class Callee(NamedTuple):
    """What code that all ranks run calls: an operation, a module, or several modules together."""

    target: Any
    """What identifies it among the kinds of call: an operation, or the name of a module."""
    name: str
    """Names it in errors, and its stream of random numbers."""
    has_closed_stream: bool | None = None
    """Whether its stream of random numbers is a closed one; None if it has none of its own."""
    is_operation: bool = False
    """Whether it is an operation of torch; a module's own code runs as a whole, its calls are not dispatched."""
    changes_first: bool = False
    """Whether it certainly changes its first argument in place."""


_PLAIN: Final[dict[Any, Callee]] = {}
"""Operations on data that change nothing in place, unless keyword arguments say so."""
_MAX_PLAIN: Final = 1 << 12


class Current:
    """The microbatch whose code runs now: one for all threads, since only one of them runs at a time."""

    microbatch: Microbatch | None = None


def current_microbatch() -> Microbatch:
    microbatch = Current.microbatch
    if microbatch is None:
        raise UsageError(
            "a value of another rank was used outside the step that made it",
            hint="return it from the step function; the step hands every rank a copy. A buffer belongs to the"
            " torch.nn.Module that makes its values",
        )
    return microbatch


def microbatch_between_units() -> Microbatch | None:
    """Return the microbatch whose code runs now if all ranks run that code.

    None: the code runs inside a unit, on its owner alone; or no microbatch runs, as in recomputation in backward.
    """
    microbatch = Current.microbatch
    return None if microbatch is None or microbatch.stage.inside_unit else microbatch


class StageTensor(torch.Tensor):
    """A tensor of which this rank holds either the data or only the shape; made by `make_stage_tensor`."""

    spec: TensorSpec
    """Shape, strides, dtype and whether it needs gradients: what all ranks know."""
    owner: int
    """The pp_rank that holds the data."""
    value: torch.Tensor | None
    """The data on the owner; None elsewhere."""
    segment: int
    """The owner's segment that made it."""
    # Defaults on the class: every operation makes stage tensors, and most of them need none of these.
    copies: Mapping[int, StageTensor] = _NO_COPIES
    """By pp_rank, the copies that were sent there."""
    sent_version: int = 0
    """On the owner, how often the data had been changed in place when they were sent last."""
    changed_by: str | None = None
    """The call that has changed a copy of it on another rank: it is stale; see `changes.py`."""

    # Models ask for these most often: without the detour through __torch_function__.
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self.spec.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.spec.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return super().device if Current.microbatch is None else Current.microbatch.stage.device

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not kwargs and (plain := _PLAIN.get(func)) is not None:  # most operations
            return (Current.microbatch or current_microbatch()).run_plain_operation(plain, args, {})
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return _attribute(func, args)
        if name == "__set__":
            raise UsageError(
                "an attribute of a value that another pipeline rank may hold was assigned",
                hint="use the operation instead, for example `x = x.detach().requires_grad_()`",
            )
        # Under zero bubble, `split_backward.watching` wraps some of torch's methods.
        wrapped: Any = getattr(func, "__wrapped__", None)
        if wrapped in _REFUSED:
            func = wrapped
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if (getattr(func, "__module__", None) or "").startswith("torch.distributed"):
            raise UsageError(
                f"`{name}` of torch.distributed was called on a value that another pipeline rank may hold",
                hint="call it inside a torch.nn.Module that lies on one rank, with"
                " group=smp.get_dp_process_group(): one that has weights, or whose forward names the"
                " torch.autograd.Function that calls it",
            )
        if len(_PLAIN) < _MAX_PLAIN and not changes_in_place(func, name, {}):
            _PLAIN[func] = Callee(func, name, is_operation=True)
        return current_microbatch().run_operation(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise UsageError(
            f"`{func}` was called on a value that another pipeline rank may hold, below where smpkit can follow",
            hint="put the code that calls it (a custom autograd.Function, a C++ operator) into a torch.nn.Module"
            " and let it be placed as a whole",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"StageTensor(pp_rank {self.owner}, {str(self.dtype).removeprefix('torch.')}{list(self.shape)})"

    def __format__(self, specification: str) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            scalar = self.dim() == 0
        return format(self.item(), specification) if scalar else repr(self)

    def make_stale(self, name: str) -> None:
        """Let every later use raise: the call of `name` has changed the copy on another rank."""
        self.changed_by, self.copies = name, _NO_COPIES

    def refuse_stale(self) -> None:
        if self.changed_by is not None:
            raise UsageError(
                f"{self!r} was used after `{self.changed_by}`, which lies on another pipeline rank, had changed its"
                " copy there in place",
                hint="use what the module returns, or give it a copy: `module(x.clone())`",
            )

    def __deepcopy__(self, memo: Any) -> Any:
        raise UsageError(
            "a value of another pipeline rank cannot be copied deeply", hint="use `.clone()` or `.detach()`"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a value of another pipeline rank cannot be saved inside the step", hint="return it and save what you get"
        )


def changes_in_place(func: Any, name: str, kwargs: dict[str, Any]) -> bool:
    """Return whether an operation changes its first argument: its values, its shape or its `requires_grad`."""
    # `__iadd__` and its like: those that are `__add__` without the letter.
    if func is torch.Tensor.__setitem__ or (name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}")):
        return True
    return (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True


def make_stage_tensor(
    spec: TensorSpec, device: torch.device, owner: int, value: torch.Tensor | None = None, segment: int = 0
) -> StageTensor:
    """Return a stage tensor, with its data if this rank owns it."""
    # All by position, which is a fifth faster: no storage offset, memory format, pinned memory.
    tensor: StageTensor = _make_wrapper(
        StageTensor, spec.shape, spec.stride, None, None, spec.dtype, _STRIDED, device, False, spec.requires_grad
    )
    tensor.__dict__ = {"spec": spec, "owner": owner, "value": value, "segment": segment}  # faster than four assignments
    return tensor


def become_stage_tensor(tensor: torch.Tensor, owner: int, value: torch.Tensor | None, segment: int) -> None:
    """Let a tensor that every rank has be a stage tensor from now on, for all who refer to it.

    Args:
        value: a tensor in the same memory, on the rank that is to own it; None on the others.
    """
    spec = spec_of(tensor)
    tensor.__class__ = StageTensor
    tensor.__dict__.update(spec=spec, owner=owner, value=value, segment=segment)


def refuse_foreign_graph(grad_fn: Any) -> None:
    """Raise UsageError: torch has recorded a node on a placeholder, at which backward would end unnoticed."""
    name = grad_fn.name().removesuffix("Backward")
    if name == "BackwardHookFunction":
        raise UsageError(
            "a full backward hook was registered on a module whose parts lie on several pipeline ranks",
            hint="register it on the modules in it that lie on one rank each, or place this one with smp.set_partition",
        )
    raise UsageError(
        f"`{name}`, a custom autograd.Function, was applied to a value that another pipeline rank may hold",
        hint="put the code that calls it into a torch.nn.Module, which is placed as a whole",
    )


def _attribute(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Answer attributes such as `x.shape` from the placeholder; run `x.T` and its like as operations."""
    operation = PROPERTIES.get(func)
    if operation is not None:
        return current_microbatch().run_operation(operation, operation.__name__, args, {})
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args)


def _shape_only(value: Any) -> Any:
    """Return a tensor of the same shape, dtype and device with one element's memory, whose values mean nothing."""
    if not isinstance(value, StageTensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)


PROPERTIES: Final[dict[Any, Callable[..., Any]]] = {
    T.T.__get__: T.t,  # type: ignore[attr-defined]
    T.mT.__get__: lambda x: x.transpose(-2, -1),  # type: ignore[attr-defined]
    T.H.__get__: T.adjoint,  # type: ignore[attr-defined]
    T.mH.__get__: T.adjoint,  # type: ignore[attr-defined]
    T.real.__get__: torch.real,  # type: ignore[attr-defined]
    T.imag.__get__: torch.imag,  # type: ignore[attr-defined]
    T.data.__get__: T.detach,  # type: ignore[attr-defined]
}

SHAPE_FUNCTIONS: Final = frozenset(
    {
        *(T.size, T.dim, T.ndimension, T.numel, T.nelement, T.stride, T.element_size, T.is_contiguous, T.__len__),
        *(T.is_floating_point, T.is_complex, T.is_signed, T.is_inference, T.get_device, T.__hash__),
        *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_inference, torch.result_type),
    }
)
"""Functions of shape, dtype and device alone."""

NUMBER_FUNCTIONS: Final = frozenset(
    {
        *(T.item, T.tolist, T.numpy, T.__array__, T.equal, T.allclose, T.is_nonzero),
        *(T.__bool__, T.__float__, T.__int__, T.__index__, T.__complex__, T.__contains__),
        *(torch.equal, torch.allclose, torch.is_nonzero),
    }
)
"""Functions whose result is a Python value."""

_NEW_FROM_SHAPE: Final = frozenset(
    {
        *(T.new_zeros, T.new_ones, T.new_full, T.new_empty, T.new_tensor),
        *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
    }
)
"""Functions that make a tensor from another's shape and dtype: every rank makes it itself."""

FROM_SHAPE: Final = SHAPE_FUNCTIONS | _NEW_FROM_SHAPE

_INSIDE: Final = (
    "do it inside a torch.nn.Module that lies on one rank (smp.set_partition), where tensors are plain ones"
)
_REFUSED: Final[dict[Any, str]] = {
    # It would run on one rank, through what that rank holds, and the others would train on nothing.
    T.backward: "call `model.backward(loss)` instead, so that every rank runs its part",
    T.register_hook: _INSIDE,
    T.retain_grad: _INSIDE,
    T.untyped_storage: _INSIDE,
    torch.autograd.grad: "gradients come with the step's backward; take others inside a torch.nn.Module that lies on"
    " one rank (smp.set_partition)",
    torch.autograd.backward: "call `model.backward(loss)` instead, so that every rank runs its part",
}
"""Functions that concern the tensor itself and not its value, with a hint for each."""

_LIKE_OTHER: Final = frozenset({T.type_as, T.expand_as, T.view_as, T.reshape_as, T.to})
"""Methods that need only shape, dtype or device of their second tensor."""

INDEXING: Final = frozenset({T.__getitem__, T.__setitem__})


def with_int_bounds(index: Any) -> Any:
    """Return an index whose slices are bounded by numbers.

    A tensor as a bound must be asked for its value on all ranks; Python would ask on the owner only.
    """
    if isinstance(index, tuple):
        return tuple([with_int_bounds(part) for part in index])
    if isinstance(index, slice):
        return slice(_as_int(index.start), _as_int(index.stop), _as_int(index.step))
    return index


def _as_int(bound: Any) -> Any:
    return bound.__index__() if isinstance(bound, torch.Tensor) else bound


def _mask_counts(_value: Any, index: Any = None, **names: Any) -> tuple[int, ...]:
    """Count the elements that each mask selects."""
    index = names.get("mask", index)
    parts = index if isinstance(index, tuple | list) else (index,)
    return tuple([int(part.count_nonzero()) for part in _plain_tensors(*parts) if part.dtype is torch.bool])


def _sum_and_max(*args: Any, **names: Any) -> tuple[int, ...]:
    """Return sum and maximum of lengths or repetitions."""
    lengths = [part for part in _plain_tensors(*args[1:], *names.values()) if part.numel()]
    return tuple([int(number) for part in lengths for number in (part.sum(), part.max())])


def _plain_tensors(*values: Any) -> Iterator[torch.Tensor]:
    return (value for value in values if type(value) is torch.Tensor)


DECIDING_VALUES: Final[dict[Any, Callable[..., tuple[int, ...]]]] = {
    T.__getitem__: _mask_counts,
    T.masked_select: _mask_counts,
    torch.masked_select: _mask_counts,
    T.repeat_interleave: _sum_and_max,
    torch.repeat_interleave: _sum_and_max,
    torch._C._VariableFunctions._pack_padded_sequence: _sum_and_max,
}
"""Operations whose result has a shape that depends on values, each with a function of its arguments that yields them.

Ranks that do not run a call know its result from the shapes of its arguments. Where the deciding values are in tensors
that every rank holds (labels, lengths, masks made of them), each rank computes them itself, and other values make
another kind of call. That waits for the device, as the operation itself does.
"""


def _on_placeholder(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _on_every_rank(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = map_tensors(current_microbatch().replicate, (args, kwargs))
    return func(*args, **kwargs)


def _new_from_shape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(_shape_only(args[0]), *args[1:], **kwargs)


def _like_other(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 1 and isinstance(args[1], StageTensor):
        args = (args[0], _shape_only(args[1]), *args[2:])
        if not isinstance(args[0], StageTensor):
            return func(*args, **kwargs)
    return current_microbatch().run_operation(func, func.__name__, args, kwargs)


def _shaped_by_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in INDEXING:
        args = (args[0], with_int_bounds(args[1]), *args[2:])
    deciding = DECIDING_VALUES.get(func)
    with torch._C.DisableTorchFunction():
        values = () if deciding is None else deciding(*args, **kwargs)
    return current_microbatch().run_operation(func, func.__name__, args, kwargs, values or None)


def _refuse(func: Callable[..., Any], _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    raise UsageError(
        f"`{func.__name__}` was called on a value that another pipeline rank may hold", hint=_REFUSED[func]
    )


def _normalised(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Normalise a batch; refuse to change running statistics that every rank has, since the owner alone would."""
    bound = inspect.signature(func).bind(*args, **kwargs).arguments
    trains = bound.get("use_input_stats", True) if func is functional.instance_norm else bound.get("training", False)
    if trains and type(bound.get("running_mean")) is torch.Tensor:
        raise UsageError(
            f"`{func.__name__}` got a value of one pipeline rank and running statistics that every rank has, and only"
            " that rank would change its own",
            hint="put the layer into the model (torch's own, or inside a torch.nn.Module that lies on one rank), or"
            " call its `.eval()`",
        )
    return current_microbatch().run_operation(func, func.__name__, args, kwargs)


_HANDLERS: Final[dict[Any, Callable[..., Any]]] = {
    **dict.fromkeys(SHAPE_FUNCTIONS, _on_placeholder),
    **dict.fromkeys(NUMBER_FUNCTIONS, _on_every_rank),
    **dict.fromkeys(_NEW_FROM_SHAPE, _new_from_shape),
    **dict.fromkeys(_LIKE_OTHER, _like_other),
    **dict.fromkeys(_REFUSED, _refuse),
    **dict.fromkeys((*DECIDING_VALUES, *INDEXING), _shaped_by_values),
    **dict.fromkeys((functional.batch_norm, functional.instance_norm), _normalised),
}
"""By function, how a call is answered that is no plain operation on data."""
