"""Which located values may be the same memory: what a change in place of one does to the others.

A view (`x[:, 0]`, `x.view(-1)`, `x.T`) and what it was made of are a *family*. All ranks see the same operations and so
know the same families, by the operations' names: a family may hold more than what shares memory, which costs no more
than sending a value again. Only the home, which has the data, knows whether a graph was left behind by a change.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch

from smpkit.torch.pipeline.located import PROPERTIES, Located
from smpkit.torch.pipeline.specs import tensors_in

__all__ = ["changes_in_place", "forget_copies", "may_share", "relate", "spoil"]

_VIEWS: Final = frozenset(
    [
        "__getitem__",
        "__iter__",
        "__pos__",
        "_conj",
        "adjoint",
        "alpha_dropout",
        "as_strided",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "bfloat16",
        "broadcast_to",
        "chunk",
        "conj",
        "contiguous",
        "cpu",
        "cuda",
        "detach",
        "diagonal",
        "double",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "dsplit",
        "expand",
        "expand_as",
        "feature_alpha_dropout",
        "flatten",
        "float",
        "half",
        "hsplit",
        "imag",
        "int",
        "long",
        "matrix_H",
        "meshgrid",
        "movedim",
        "moveaxis",
        "mH",
        "mT",
        "narrow",
        "permute",
        "positive",
        "ravel",
        "real",
        "reshape",
        "reshape_as",
        "resolve_conj",
        "resolve_neg",
        "select",
        "split",
        "split_with_sizes",
        "squeeze",
        "swapaxes",
        "swapdims",
        "t",
        "tensor_split",
        "to",
        "transpose",
        "type",
        "type_as",
        "unbind",
        "unflatten",
        "unfold",
        "unsafe_chunk",
        "unsafe_split",
        "unsqueeze",
        "view",
        "view_as",
        "view_as_complex",
        "view_as_real",
        "vsplit",
    ]
)
"""Operations whose result is, or may be, the memory of their first argument."""

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
    """Return whether an operation changes its first argument."""
    if func is torch.Tensor.__setitem__ or name in _AUGMENTED:
        return True
    return (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True


def may_share(func: Any, name: str) -> bool:
    """Return whether an operation's result may be the memory of its first argument."""
    return name in _VIEWS or func in _PROPERTY_VIEWS


def relate(source: Any, result: Any) -> Any:
    """Note that `result`, which is returned, may be the memory of `source`."""
    if not isinstance(source, Located):
        return result
    if source.family is None:
        source.family = [weakref.ref(source)]
    for made in tensors_in(result):
        if isinstance(made, Located):
            made.family = source.family
            source.family.append(weakref.ref(made))
    return result


def forget_copies(target: Located) -> None:
    """Forget what a value that is changed, and all that may be its memory, was sent as."""
    target.copies.clear()
    for other in _relatives(target):
        other.copies.clear()


def spoil(target: Located, changed: torch.Tensor) -> None:
    """Take the data from relatives whose graph does not know of a change, on the home: using one would train wrongly.

    Torch follows a change from a view to its base and to other views of it. It cannot where the value had to be cut off
    its graph, nor can the other ranks know that a relative needs gradients from now on.
    """
    if not (changed.requires_grad and torch.is_grad_enabled()):
        return
    memory, base = changed.untyped_storage().data_ptr(), _base(changed)
    for other in _relatives(target):
        value = other.value
        if value is None or value.untyped_storage().data_ptr() != memory:
            continue
        left_behind = _base(value) is not base and value.requires_grad
        if left_behind or value.requires_grad != other.spec.requires_grad:
            other.value = None


def _relatives(target: Located) -> list[Located]:
    found = [] if target.family is None else [member() for member in target.family]
    return [member for member in found if member is not None and member is not target]


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


_PROPERTY_VIEWS: Final = frozenset(PROPERTIES.values())
