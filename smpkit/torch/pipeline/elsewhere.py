"""Non-resident parameters: weights of other pipeline ranks, in code that this rank runs alone.

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
from smpkit.torch.pipeline.located import PROPERTIES, SHAPE_FUNCTIONS, Current, StageTensor, microbatch_between_units
from smpkit.torch.pipeline.random import DRAWING
from smpkit.torch.pipeline.specs import map_tensors
from smpkit.torch.state import state

__all__ = ["mark_nonresident_parameters"]

_NoTorchFunction: Final = torch._C.DisableTorchFunctionSubclass

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
"""Operations that return the same data in another form: for data of another rank they return the form alone."""

_METADATA_FUNCTIONS: Final = frozenset(
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
"""Functions that need metadata alone, and those that make another tensor of the same shape."""

_LIKE_OTHER: Final = frozenset({"type_as", "expand_as", "view_as", "reshape_as", "to"})
"""Methods that look at no number of their second tensor."""


class _NonResident(torch.Tensor):
    """A tensor whose data another rank holds; `name_and_owner` is the name of the weight and that rank."""

    name_and_owner: tuple[str, int]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if StageTensor in types:
            return NotImplemented  # it knows where the operation runs
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_plain = name in ("__get__", "__set__") and func not in PROPERTIES
        if is_plain or func in SHAPE_FUNCTIONS or name in _METADATA_FUNCTIONS or microbatch_between_units() is not None:
            with _NoTorchFunction():
                return func(*args, **kwargs)
        target = args[0] if args else kwargs.get("tensor")
        if not isinstance(target, _NonResident):
            if name in _LIKE_OTHER:
                with _NoTorchFunction():
                    return func(*args, **kwargs)
        elif name in _VIEWS_AND_COPIES or name == "__get__":
            with _NoTorchFunction():
                return map_tensors(target.mark_derived, func(*args, **kwargs))
        elif changes_in_place(func, name, kwargs):
            return target.apply_in_place(func, name, args, kwargs)
        raise _refusal(name, [args, kwargs])

    def mark_derived(self, made: torch.Tensor) -> torch.Tensor:
        """Mark a view or a copy of this tensor as non-resident, too."""
        return _as_nonresident(made, _NonResident, self.name_and_owner) if type(made) is torch.Tensor else made

    def apply_in_place(
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
        with _NoTorchFunction():
            return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with _NoTorchFunction():
            _SET_REQUIRES_GRAD(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        with _NoTorchFunction():
            return super().grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with _NoTorchFunction():
            _SET_GRAD(self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name, owner = self.name_and_owner
        kind = "Parameter" if isinstance(self, nn.Parameter) else "Tensor"
        return f"{kind}(`{name}` on pp_rank {owner}, {str(self.dtype).removeprefix('torch.')}{list(self.shape)})"

    def __format__(self, specification: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self))
        if copied is None:
            copied = memo[id(self)] = _as_nonresident(self._as_torch_tensor(), type(self), self.name_and_owner)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Plain torch must be able to load it.
        return self._as_torch_tensor().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _as_torch_tensor(self) -> torch.Tensor:
        """Return what torch would take it for."""
        with _NoTorchFunction():
            value = self.detach()
            plain = nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value
        plain.__dict__.update({key: value for key, value in vars(self).items() if key != "name_and_owner"})
        return plain


class _NonResidentParameter(_NonResident, nn.Parameter):
    """A parameter of another rank."""


def mark_nonresident_parameters(root: nn.Module, holders: Mapping[int, frozenset[int]], rank: int) -> None:
    """Let no code compute with the numbers of weights that this rank does not hold.

    They stay the same objects. Parameters of classes of the user's own are left alone: what those do is not known.

    Args:
        holders: by parameter (its id), the pipeline ranks that hold it.
    """
    for name, parameter in root.named_parameters():
        if rank not in holders[id(parameter)] and type(parameter) is nn.Parameter:
            _as_nonresident(parameter, _NonResidentParameter, (name, min(holders[id(parameter)])))


def _as_nonresident(tensor: torch.Tensor, kind: type[_NonResident], name_and_owner: tuple[str, int]) -> torch.Tensor:
    """Make a tensor a non-resident one; it stays the same object."""
    tensor.__class__ = kind
    tensor.name_and_owner = name_and_owner  # type: ignore[attr-defined]
    return tensor


def _refusal(name: str, given: Any) -> UsageError:
    found: list[_NonResident] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, _NonResident):
            found.append(tensor)
        return tensor

    map_tensors(note, given)
    weight, owner = found[0].name_and_owner
    in_unit = Current.microbatch is not None
    return UsageError(
        f"`{name.strip('_')}` needs the numbers of `{weight}`, which pipeline rank {owner} holds and rank"
        f" {state.pp_rank} does not",
        hint="hand the weight to the module as an argument of its forward"
        if in_unit
        else "go through `model.local_parameters()`, or let all ranks call `model.state_dict()`, which has all weights;"
        " a step may use them anywhere",
    )
