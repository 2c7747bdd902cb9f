"""Weights that lie on another pipeline rank, in the hands of code that this rank runs alone: between steps, in a unit.

Every rank has the parameter objects of the whole model, which optimizers, hooks and state dicts hold; of other ranks'
weights only shape and dtype are right. So code that asks for those, moves or freezes a weight, or takes views of it
goes on as ever, and code that would compute with its numbers is refused: there would be NaN, on some ranks. A change in
place is left to the rank that holds it, while random numbers are drawn all the same: `model.apply(initialise)` gives
all weights the values that they have in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.pipeline.effects import changes_in_place
from smpkit.torch.pipeline.located import OF_SHAPE, PROPERTIES, Located, Running, between_units
from smpkit.torch.pipeline.random import DRAWING
from smpkit.torch.pipeline.specs import map_tensors
from smpkit.torch.state import state

__all__ = ["mark_weights_elsewhere"]

_Plain: Final = torch._C.DisableTorchFunctionSubclass

_SET_GRAD: Final[Any] = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_SET_REQUIRES_GRAD: Final[Any] = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]

_VIEWS_AND_COPIES: Final = frozenset(
    {
        *("detach", "clone", "contiguous", "to", "type", "type_as", "cpu", "cuda"),
        *("float", "double", "half", "bfloat16"),
        *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "expand", "expand_as"),
        *("t", "transpose", "permute", "movedim", "swapaxes", "swapdims", "squeeze", "unsqueeze"),
        *("__getitem__", "select", "narrow", "chunk", "split", "tensor_split", "unbind"),
    }
)
"""What gives the same numbers in another form: of those of another rank, it can give the form."""

_OF_THE_OBJECT: Final = frozenset(
    {
        *("requires_grad_", "detach_", "share_memory_", "retain_grad"),
        *("register_hook", "register_post_accumulate_grad_hook"),
        *("is_shared", "is_pinned", "data_ptr", "storage", "untyped_storage", "_typed_storage", "storage_offset"),
        *("dim_order", "is_same_size", "is_set_to", "is_neg", "is_conj", "_is_view", "__dir__", "__setstate__"),
        *("_has_compatible_shallow_copy_type", "can_cast", "is_tensor", "new_zeros", "new_ones", "new_full"),
        *("new_empty", "new_empty_strided", "new_tensor", "zeros_like", "ones_like", "full_like", "empty_like"),
        *("rand_like", "randn_like", "randint_like"),
    }
)
"""What means the tensor and not its numbers, and what makes another of its shape."""

_LIKE_OTHER: Final = frozenset({"type_as", "expand_as", "view_as", "reshape_as", "to"})
"""Methods that look at no number of their second tensor."""


class _Elsewhere(torch.Tensor):
    """A tensor whose numbers another rank has; `whose` says the weight, and the rank."""

    whose: tuple[str, int]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if Located in types:
            return NotImplemented  # it knows where the operation runs
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_plain = name in ("__get__", "__set__") and func not in PROPERTIES
        if is_plain or func in OF_SHAPE or name in _OF_THE_OBJECT or between_units() is not None:
            with _Plain():
                return func(*args, **kwargs)
        target = args[0] if args else kwargs.get("tensor")
        if not isinstance(target, _Elsewhere):
            if name in _LIKE_OTHER:
                with _Plain():
                    return func(*args, **kwargs)
        elif name in _VIEWS_AND_COPIES or name == "__get__":
            with _Plain():
                return map_tensors(target.same, func(*args, **kwargs))
        elif changes_in_place(func, name, kwargs):
            return target.changed(func, name, args, kwargs)
        raise _refusal(name, [args, kwargs])

    def same(self, made: torch.Tensor) -> torch.Tensor:
        """Return a view or a copy of this tensor as one whose numbers are where this one's are."""
        return _taken(made, _Elsewhere, self.whose) if type(made) is torch.Tensor else made

    def changed(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Return what a change in place gives on this rank: itself, but random numbers are those of one process."""
        initialises = getattr(func, "__module__", "") == nn.init.__name__  # without gradients
        if self.requires_grad and self.is_leaf and torch.is_grad_enabled() and not initialises:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        if name not in DRAWING and not initialises:
            return self
        drawn = torch.empty(self.shape, dtype=self.dtype, device=state.device)
        given = [drawn if each is self else each for each in args]
        func(*given, **{key: drawn if each is self else each for key, each in kwargs.items()})
        return drawn  # as in one process: `trunc_normal_` looks at what it has drawn

    # What optimizers and steps ask of all parameters, without the detour through __torch_function__.
    @property
    def requires_grad(self) -> bool:
        with _Plain():
            return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with _Plain():
            _SET_REQUIRES_GRAD(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        with _Plain():
            return super().grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with _Plain():
            _SET_GRAD(self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name, home = self.whose
        kind = "Parameter" if isinstance(self, nn.Parameter) else "Tensor"
        return f"{kind}(`{name}` on pp_rank {home}, {str(self.dtype).removeprefix('torch.')}{list(self.shape)})"

    def __format__(self, specification: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self))
        if copied is None:
            copied = memo[id(self)] = _taken(self._plain(), type(self), self.whose)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Plain torch must be able to load it.
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _plain(self) -> torch.Tensor:
        """Return what torch would take it for."""
        with _Plain():
            value = self.detach()
            plain = nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value
        plain.__dict__.update({key: value for key, value in vars(self).items() if key != "whose"})
        return plain


class _ParameterElsewhere(_Elsewhere, nn.Parameter):
    """A parameter of another rank."""


def mark_weights_elsewhere(root: nn.Module, holders: Mapping[int, frozenset[int]], rank: int) -> None:
    """Let no code compute with the numbers of weights that this rank does not hold.

    They stay the same objects. Parameters of classes of the user's own are left alone: what those do is not known.

    Args:
        holders: by parameter (its id), the pipeline ranks that hold it.
    """
    for name, parameter in root.named_parameters():
        if rank not in holders[id(parameter)] and type(parameter) is nn.Parameter:
            _taken(parameter, _ParameterElsewhere, (name, min(holders[id(parameter)])))


def _taken(tensor: torch.Tensor, kind: type[_Elsewhere], whose: tuple[str, int]) -> torch.Tensor:
    """Make a tensor one whose numbers are elsewhere; it stays the same object."""
    tensor.__class__ = kind
    tensor.whose = whose  # type: ignore[attr-defined]
    return tensor


def _refusal(name: str, given: Any) -> UsageError:
    found: list[_Elsewhere] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, _Elsewhere):
            found.append(tensor)
        return tensor

    map_tensors(note, given)
    weight, home = found[0].whose
    in_unit = Running.microbatch is not None
    return UsageError(
        f"`{name.strip('_')}` needs the numbers of `{weight}`, which pipeline rank {home} holds and rank"
        f" {state.pp_rank} does not",
        hint="hand the weight to the module as an argument of its forward"
        if in_unit
        else "go through `model.local_parameters()`, or let all ranks call `model.state_dict()`, which has all weights;"
        " a step may use them anywhere",
    )
