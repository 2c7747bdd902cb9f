"""Infer what an operation returns from the specs of its arguments: every rank does so alike, and none waits.

The owner of an operation runs it, and the others need its output spec. When that is not known yet (a mask selects
another number of rows, a script scales its loss by another number), every rank runs the operation on *shadows*: tensors
of the same shape, strides, dtype and device, without data. Tensors that every rank holds take part as they are, so that
masks select what they will select.

The owner infers, too, and gives its result the strides that the others expect. So all ranks agree, also on what cannot
be inferred, such as shapes that depend on values of one rank: the owner broadcasts those specs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes

from smpkit.torch.core.tensor_spec import (
    TensorSpec,
    as_layout,
    map_tensors,
    permute_to_memory,
    spec_of_unwrapped,
    tensors_in,
    version_of,
)
from smpkit.torch.pipeline.output_specs import MISSING

__all__ = ["infer_output", "with_strides_of"]

_aten = torch.ops.aten
_META: Final = torch.device("meta")


class _Shadow(torch.Tensor):
    """A tensor without data. Autograd and autocast see the device that it stands for, kernels see `meta`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    on_meta: torch.Tensor
    """What kernels get; those of a tensor and of its views share a storage."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func, args = _without_masks(func, args)
        kwargs = dict(kwargs or {})
        _refuse_writes(func, args, kwargs)
        shadows: dict[int, _Shadow] = {}

        def unwrap(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, _Shadow):
                return tensor.to(_META)
            shadows[id(tensor.on_meta)] = tensor
            return tensor.on_meta

        if kwargs.get("device") is not None:
            kwargs["device"] = _META
        result = func(*map_tensors(unwrap, args), **map_tensors(unwrap, kwargs))
        device = next(iter(shadows.values())).device
        # What changes its argument in place returns that argument.
        return map_tensors(lambda inner: shadows[id(inner)] if id(inner) in shadows else _shadow(inner, device), result)


def _shadow(inner: torch.Tensor, device: torch.device, *, requires_grad: bool = False) -> _Shadow:
    made: _Shadow = torch.Tensor._make_wrapper_subclass(
        _Shadow, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=device, requires_grad=requires_grad
    )
    made.on_meta = inner
    return made


def _without_masks(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return an operation that indexes by masks as one that indexes by the positions that they select."""
    if func is _aten.masked_select.default:
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        func, args = _aten.index.Tensor, (args[0].expand(shape), [args[1].expand(shape)])
    if func is not _aten.index.Tensor:
        return func, args
    positions: list[Any] = []
    for index in args[1]:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        positions += index.nonzero(as_tuple=True) if is_mask else [index]
    return func, (args[0], positions)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if an operation changes a tensor that every rank holds, such as running averages: only its owner may."""
    is_writing = "batch_norm" in func.__name__  # some of them do not say in their schemas that they do
    if func._schema.is_mutable:
        names = [(argument.name, argument.is_write) for argument in func._schema.arguments]
        given = dict(zip([name for name, _ in names], args, strict=False)) | kwargs
        written = tensors_in([given.get(name) for name, is_write in names if is_write])
        is_writing = is_writing or any(type(tensor) is not _Shadow for tensor in written)
    if is_writing:
        raise NotImplementedError(func.__name__)


def infer_output(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: Callable[[torch.Tensor], TensorSpec | None],
    device: torch.device,
) -> Any:
    """Return the output spec of an operation between units, which changes no argument.

    Returns MISSING where that takes the data of the arguments, on all ranks alike.

    Args:
        args, kwargs: stage tensors, other tensors, and anything else.
        known: returns the spec of a tensor whose data some ranks lack, and None for any other.
        device: where stage tensors live.
    """
    shadows: dict[int, _Shadow] = {}

    def shadow(tensor: torch.Tensor) -> torch.Tensor:
        spec = known(tensor)
        if spec is None:
            return tensor
        if id(tensor) not in shadows:
            inner = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=_META)
            shadows[id(tensor)] = _shadow(inner, device, requires_grad=spec.requires_grad)
        return shadows[id(tensor)]

    try:
        with without_dispatch_modes(), _without_hooks():
            given = map_tensors(shadow, (args, kwargs))
            output = function(*given[0], **given[1])
            if any(type(tensor) is not _Shadow for tensor in tensors_in(output)):
                return MISSING
        if any(map(version_of, shadows.values())):
            return MISSING
        return map_tensors(spec_of_unwrapped, output)
    except Exception:
        # No kernel for tensors without data, or a result whose shape depends on them. If the operation itself is
        # wrong, its owner will say so.
        return MISSING


def _without_hooks() -> contextlib.AbstractContextManager[object]:
    """Keep hooks on saved tensors (of offloading, of checkpointing) from seeing what an inference saves."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return saved_tensors_hooks(_itself, _itself)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def with_strides_of(specs: Iterator[TensorSpec], output: Any) -> Any:
    """Return what an operation has returned, with the strides that were inferred for it."""

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        spec = next(specs, None)  # None: it returns more than was inferred, which the caller tells
        if spec is None or tensor.shape != spec.shape or tensor.stride() == spec.stride:
            return tensor
        return as_layout(permute_to_memory(tensor, spec.order).contiguous(), spec.shape, spec.order, spec.stride)

    return map_tensors(laid_out, output)
