"""Parameters that not every pipeline rank holds: as values between units, outside steps, and tied over ranks.

Every rank has the parameter objects of the whole model, which optimizers, hooks and state dicts hold, but not the data
of all of them.

*Between units* (`F.linear(x, emb.weight)`, `norm(emb.weight)`, `weight.norm()`), an operation among stage tensors runs
where its parameter is. Other parameters that it takes, and those that a module of another rank is given, are sent there
like any other value, once per microbatch, and their gradients back. An operation on parameters alone makes stage
tensors of them (`StageParameters`, `parameters_as_stage_tensors`).

*In code that one rank runs alone*, another rank's weight is a non-resident parameter, of which only shape and dtype are
right (`mark_nonresident_parameters`). Code that asks for those, moves or freezes a weight, or takes views of it works
as ever. Code that would compute with its numbers raises, since some ranks would get NaN. A change in place is left to
the rank that holds the weight, but random numbers are drawn all the same: `model.apply(initialise)` gives all weights
the values that they have in one process.

*Tied tensors* are shared by modules on several ranks: each rank has its own copy, only gradients are added up, and an
optimizer keeps the copies equal. A module that changes its copy in place, a codebook say, would change it on its rank
alone: that raises as soon as it is seen (`find_tied`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import dense_spec_of, map_tensors, storage_of, version_of
from smpkit.torch.distributed.rendezvous import name_ranks
from smpkit.torch.pipeline.changes import changes_in_place
from smpkit.torch.pipeline.random_streams import DRAWING
from smpkit.torch.pipeline.stage_tensor import (
    PROPERTIES,
    SHAPE_FUNCTIONS,
    Current,
    StageTensor,
    make_stage_tensor,
    microbatch_between_units,
)
from smpkit.torch.placement.placement import Placement, names_by_module

if TYPE_CHECKING:
    from smpkit.torch.pipeline.stage_context import StageContext

__all__ = [
    "StageParameters",
    "TiedTensor",
    "find_tied",
    "mark_nonresident_parameters",
    "parameter_change_error",
    "parameters_as_stage_tensors",
]

_CONTAINERS: Final = frozenset({list, tuple})
_SET_REQUIRES_GRAD: Final[Any] = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]

_NoTorchFunction: Final = torch._C.DisableTorchFunctionSubclass

_SET_GRAD: Final[Any] = torch.Tensor.grad.__set__  # type: ignore[union-attr]

_VIEWS_AND_COPIES: Final = frozenset(
    {
        *("detach", "clone", "contiguous", "to", "type", "type_as", "cpu", "cuda"),  # device: names of methods
        *("float", "double", "half", "bfloat16"),
        *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "expand", "expand_as"),
        *("t", "transpose", "permute", "movedim", "swapaxes", "swapdims", "squeeze", "unsqueeze"),
        *("__getitem__", "select", "narrow", "chunk", "split", "tensor_split", "unbind"),
    }
)
"""Operations that return the same data in another shape, dtype or place: here the result is non-resident, too."""

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
"""Methods that read no values of their second tensor."""


class StageParameters:
    """The parameters that one microbatch has used as values, which not every rank holds.

    Args:
        segments: which segment each rank is in.
    """

    def __init__(self, stage: StageContext, segments: list[int]) -> None:
        self._stage = stage
        self._segments = segments
        self._stage_tensors: dict[int, StageTensor] = {}

    def as_argument_on(self, owner: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as an argument of a call on rank `owner`: a stage tensor if that rank does not hold it.

        Raises:
            UsageError: the tensor was made inside a unit, and was not returned by it.
        """
        if type(tensor) is not StageTensor and tensor.grad_fn is not None:
            _refuse_leak(tensor.grad_fn, self._stage)
        remote = id(tensor) in self._stage.parameter_owners and not self._stage.holds(owner, tensor)
        return self.stage_tensor(tensor) if remote else tensor

    def stage_tensor(self, parameter: torch.Tensor) -> StageTensor:
        """Return a parameter as a value whose owner is the first rank that holds it."""
        stage_tensor = self._stage_tensors.get(id(parameter))
        if stage_tensor is None:
            owner = self._stage.parameter_owners[id(parameter)]
            value = parameter if owner == self._stage.rank else None
            spec = dense_spec_of(parameter)
            stage_tensor = make_stage_tensor(spec, self._stage.device, owner, value, self._segments[owner])
            self._stage_tensors[id(parameter)] = stage_tensor
        return stage_tensor

    def release(self) -> None:
        """Forget them at the end of the microbatch."""
        self._stage_tensors.clear()


def _refuse_leak(grad_fn: Any, stage: StageContext) -> None:
    """Raise if a tensor that every rank should have was made of weights that only some hold.

    Between units such weights are stage tensors, so a plain tensor of them was made inside a unit and not returned:
    other ranks have none, or an older one.
    """
    seen, stack = {grad_fn}, [grad_fn]
    while stack:
        node = stack.pop()
        weight = getattr(node, "variable", None)
        if weight is not None and id(weight) in stage.parameter_owners:
            raise UsageError(
                f"a tensor that a module on pipeline rank {stage.rank} made was used outside it, where other ranks do"
                " not have it: it was kept as an attribute, or in a list that a hook fills, instead of returned",
                hint="return it from the module's forward along with its result",
            )
        after = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(after)
        stack += after


def parameters_as_stage_tensors(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Return the arguments of an operation with stage tensors in place of parameters; None to leave them as they are.

    They stay inside a unit, beside stage tensors (which say where the operation runs), and for functions of the shape.
    """
    microbatch = microbatch_between_units()
    if microbatch is None or kwargs.get("out") is not None:
        return None
    remote = microbatch.stage.parameter_owners
    found = False
    for argument in args:
        for part in argument if type(argument) in _CONTAINERS else (argument,):
            if type(part) is StageTensor:
                if getattr(func, "__name__", "") == "__set__":
                    raise _assignment_error(func, args[0])
                return None
            found = found or id(part) in remote
    if not found:
        return None
    if not _is_operation(func):
        _refuse_change(func, args, remote)
        return None

    def replaced(argument: Any) -> Any:
        if type(argument) in _CONTAINERS:
            return type(argument)([replaced(part) for part in argument])
        return microbatch.weights.stage_tensor(argument) if id(argument) in remote else argument

    return tuple([replaced(argument) for argument in args])


def _is_operation(func: Callable[..., Any]) -> bool:
    """Return whether a function computes with a parameter's values, and does not change the parameter."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func in PROPERTIES
    return not changes_in_place(func, name, {}) and name != "__set__" and func not in SHAPE_FUNCTIONS


def _refuse_change(func: Callable[..., Any], args: tuple[Any, ...], remote: Container[int]) -> None:
    """Raise UsageError if an operation between units changes the values or `requires_grad` of such a parameter.

    Ranks could not even agree when: a microbatch's backward runs after the forward of later ones.
    """
    target = args[0]
    if id(target) not in remote:
        return
    name = getattr(func, "__name__", "")
    # `==`, since torch makes a new object of the setter at each access.
    if func is torch.Tensor.requires_grad_ or func == _SET_REQUIRES_GRAD:
        if target.requires_grad is not bool(args[1] if len(args) > 1 else True):
            raise UsageError(
                f"a step froze or unfroze a parameter of shape {list(target.shape)} while its microbatches ran",
                hint="do so before the step is called; make steps of their own of the parts that train others",
            )
    elif changes_in_place(func, name, {}):
        raise parameter_change_error(name, target)


def parameter_change_error(name: str, parameter: torch.Tensor) -> UsageError:
    """Return the error for a change between units of a parameter that not every rank holds."""
    return UsageError(
        f"`{name}` changed in place, between modules, a parameter of shape {list(parameter.shape)} that not every"
        " pipeline rank holds",
        hint="change parameters between steps, or in the forward of the module that owns them",
    )


def _assignment_error(func: Any, tensor: torch.Tensor) -> UsageError:
    """Return the error for a placeholder as the data of a tensor: those are its memory, and a placeholder has none."""
    return UsageError(
        f"`.{func.__self__.__name__}` of a tensor of shape {list(tensor.shape)} was assigned, between modules, a value"
        " that only one pipeline rank holds",
        hint="change a weight in the forward of a torch.nn.Module that owns it and all that it is made of (both"
        " encoders of a momentum encoder) and lies on one rank (smp.set_partition)",
    )


class _NonResident(torch.Tensor):
    """A tensor whose data another rank holds."""

    name_and_owner: tuple[str, int]
    """The name of the weight, and the pp_rank that holds it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if StageTensor in types:
            return NotImplemented  # let the stage tensor say where the operation runs
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
        """Change nothing, but draw the random numbers that the change draws in one process."""
        initialises = getattr(func, "__module__", "") == nn.init.__name__  # those run without gradients
        if self.requires_grad and self.is_leaf and torch.is_grad_enabled() and not initialises:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        if name not in DRAWING and not initialises:
            return self
        drawn = torch.empty(self.shape, dtype=self.dtype, device=state.device)
        given = [drawn if each is self else each for each in args]
        func(*given, **{key: drawn if each is self else each for key, each in kwargs.items()})
        return drawn  # `trunc_normal_` reads what it has drawn

    # Optimizers and steps read these of all parameters: without the detour through __torch_function__.
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
        # A saved file must load with plain torch.
        return self._as_torch_tensor().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _as_torch_tensor(self) -> torch.Tensor:
        """Return it as a plain tensor or parameter, with the values that this rank has."""
        with _NoTorchFunction():
            value = self.detach()
            plain = nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value
        plain.__dict__.update({key: value for key, value in vars(self).items() if key != "name_and_owner"})
        return plain


class _NonResidentParameter(_NonResident, nn.Parameter):
    """A parameter of another rank."""


def mark_nonresident_parameters(placement: Placement) -> None:
    """Make code raise that computes with the numbers of weights that this rank does not hold.

    They stay the same objects. Parameters of the user's own classes are left alone, since those may behave otherwise.
    """
    for each in placement:
        if not each.is_here and type(each.parameter) is nn.Parameter:
            _as_nonresident(each.parameter, _NonResidentParameter, (each.name, each.first_pp_rank))


def _as_nonresident(tensor: torch.Tensor, kind: type[_NonResident], name_and_owner: tuple[str, int]) -> torch.Tensor:
    # Assign the class, so that the object stays the same: optimizers, hooks and state dicts refer to it.
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


@dataclass(frozen=True)
class TiedTensor:
    """A parameter or buffer of a module on this rank that shares memory with one of another rank's module."""

    name: str
    module: nn.Module
    key: str
    ranks: list[int]

    @property
    def version(self) -> int:
        """How often it has been changed in place."""
        held = {**self.module._parameters, **self.module._buffers}
        tensor = held.get(self.key)
        return 0 if tensor is None else version_of(tensor)

    def in_place_error(self, rank: int) -> UsageError:
        """Return the error for a change in place on rank `rank`."""
        return UsageError(
            f"`{self.name}`, which modules on pipeline {name_ranks(self.ranks)} share, was changed in place by one on"
            f" rank {rank}: the others keep it as it was",
            hint="put the modules that share it on one rank: auto_partition: false, and smp.set_partition for each",
        )


def find_tied(root: nn.Module, placement: Placement) -> list[TiedTensor]:
    """Return the tensors that this rank's modules share with those of others; needs the whole model on every rank."""
    ranks_by_memory: dict[object, set[int]] = {}
    found: list[tuple[str, nn.Module, str, object, set[int]]] = []
    for module, names in names_by_module(root).items():
        pp_ranks = {owner for name in names if (owner := placement.pp_rank_of(name)) is not None}
        if not pp_ranks:
            continue
        own: list[tuple[str, torch.Tensor]] = list(module.named_parameters(recurse=False))
        for key, tensor in [*own, *module.named_buffers(recurse=False)]:
            # Without memory (delayed initialisation, no elements) only the object can be the same.
            memory = id(tensor) if tensor.is_meta or not tensor.numel() else storage_of(tensor)
            ranks_by_memory.setdefault(memory, set()).update(pp_ranks)
            found.append((f"{names[0]}.{key}", module, key, memory, pp_ranks))
    return [
        TiedTensor(name, module, key, sorted(ranks_by_memory[memory]))
        for name, module, key, memory, pp_ranks in found
        if state.pp_rank in pp_ranks and len(ranks_by_memory[memory]) > 1
    ]
