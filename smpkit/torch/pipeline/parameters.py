"""Weights that not every pipeline rank holds: as values in a step, and wherever else code meets them.

Every rank has the parameter objects of the whole model, which optimizers, hooks and state dicts hold, but not the data
of all of them.

*Between the layers of a step* a weight, or a view of one (`x @ emb.weight.T`), may be an argument of a layer, or an
operand beside a layer's output. It is then a value like any other, of the first rank that holds it: it is sent once per
microbatch to each rank that needs it, and its gradient back.

*Everywhere else* another rank's weight is non-resident: its shape and dtype are right, its numbers are not. Whatever is
computed with it is non-resident, too. Only code that asks for numbers raises (`.item()`, a branch), and so does code
that writes them into a tensor of this rank. A change in place is left to the rank that holds the weight.

*Weights and buffers that modules on several ranks share* have a copy on each of them. The optimizer keeps the copies of
a weight equal; a module that changes its own in place would change it on its rank alone (`SharedTensor`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from smpkit.errors import UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import map_tensors, tensors_in, version_of
from smpkit.torch.core.warn import warn_user
from smpkit.torch.distributed.rendezvous import name_ranks
from smpkit.torch.pipeline.stage_tensor import (
    FROM_SHAPE,
    NUMBER_FUNCTIONS,
    PROPERTIES,
    Current,
    StageTensor,
    changes_in_place,
    microbatch_between_units,
)
from smpkit.torch.placement.placement import Placement, names_by_module

if TYPE_CHECKING:
    from smpkit.torch.pipeline.stage_context import StageContext

T = torch.Tensor
_DATA: Final[Any] = T.data
_NoTorchFunction: Final = torch._C.DisableTorchFunctionSubclass
_GETS_OR_SETS: Final = frozenset({"__get__", "__set__"})
_FREEZES: Final = frozenset({T.requires_grad_, T.requires_grad.__set__})  # type: ignore[attr-defined]

_FROM_SHAPE: Final = FROM_SHAPE | {torch.rand_like, torch.randn_like, torch.randint_like}

_NEEDS_NUMBERS: Final = NUMBER_FUNCTIONS | {
    *(T.nonzero, torch.nonzero, torch.argwhere, T.unique, torch.unique, T.unique_consecutive, torch.unique_consecutive),
    *(T.masked_select, torch.masked_select, T.bincount, torch.bincount),
    *(T.backward, torch.autograd.backward, torch.autograd.grad),
    T.data_ptr,  # safetensors, and with it `save_pretrained` of transformers and peft, writes files from there
}
"""Functions whose result has a value, or a shape, that depends on the numbers of a tensor."""

_DRAWING_IN_PLACE: Final = frozenset(
    {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"}
)


# --- between the layers of a step -------------------------------------------------------------------------------------


def refuse_made_of_weights(tensor: torch.Tensor, stage: StageContext) -> None:
    """Raise if a tensor that every rank should have was made of weights that only some hold.

    What else it was made of may get a gradient, on one rank alone: `has_gradient_of_a_step` tells.
    """
    leaves = list(leaves_of(tensor)) if tensor.requires_grad else []
    if not isinstance(tensor, NonResident) and not any(id(leaf) in stage.parameter_owners for leaf in leaves):
        for leaf in leaves:
            if state.model is not None and leaf not in state.model.placement and leaf not in _beyond_model:
                _beyond_model[leaf] = None
                leaf.register_post_accumulate_grad_hook(_note_gradient)  # type: ignore[no-untyped-call]
        return
    stage.failed_alone = True  # to a rank that holds none of these weights, it may look like any other tensor
    raise UsageError(
        f"a tensor of shape {list(tensor.shape)} was used between modules that not every pipeline rank has: a module"
        " made it and kept it, as an attribute or in a list that a hook fills, or it was computed from weights, as by"
        " `layer.forward(x)`",
        hint="return it from the module's forward along with its result; write `layer(x)`; compute with weights in the"
        " module that holds them, or hand a weight itself to a layer, or to an operation beside a layer's output",
    )


def leaves_of(tensor: torch.Tensor, through: Callable[[Any], bool] = lambda _: True) -> Iterator[torch.Tensor]:
    """Yield the leaves of the graph that a tensor was computed by, or the tensor itself if it has no graph.

    Args:
        through: whether to look behind a node of the graph.
    """
    if tensor.grad_fn is None:
        yield tensor
        return
    seen, stack = {tensor.grad_fn}, [tensor.grad_fn]
    while stack:
        node: Any = stack.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        following = node.next_functions if through(node) else ()
        after = [source for source, _ in following if source is not None and source not in seen]
        seen.update(after)
        stack += after


_beyond_model: Final[Any] = WeakIdKeyDictionary()
"""Leaves that steps have used and that are no parameters of the model, with the gradient that a step gave each."""


def _note_gradient(leaf: torch.Tensor) -> None:
    if state.step is not None and leaf.grad is not None:
        _beyond_model[leaf] = TensorWeakRef(leaf.grad)


def has_gradient_of_a_step(tensor: torch.Tensor) -> bool:
    """Tell whether the backward of a step has given `tensor`, which is no parameter of the model, the gradient it has.

    Gradients of the script's own backwards, outside of steps, are those of every rank of a pipeline.
    """
    gradient = _beyond_model.get(tensor)
    return gradient is not None and tensor.grad is not None and gradient() is tensor.grad


def parameter_change_error(name: str, parameter: torch.Tensor) -> UsageError:
    return UsageError(
        f"`{name}` changed in place, between modules, a parameter of shape {list(parameter.shape)} that not every"
        " pipeline rank holds",
        hint="change parameters between steps, or in the forward of the module that owns them",
    )


def refuse_as_data(func: Any, args: tuple[Any, ...]) -> None:
    """Raise if the setter `func` is to give a tensor the memory of a placeholder, which has none."""
    if len(args) == 2 and isinstance(args[1], StageTensor | NonResident) and not isinstance(args[0], StageTensor):
        raise UsageError(
            f"`.{func.__self__.__name__}` of a tensor of shape {list(args[0].shape)} was assigned, between modules, a"
            " value that only one pipeline rank holds",
            hint="change a weight in the forward of a torch.nn.Module that owns it and all that it is made of (both"
            " encoders of a momentum encoder) and lies on one rank (smp.set_partition)",
        )


# --- everywhere else --------------------------------------------------------------------------------------------------


class NonResident(torch.Tensor):
    """A weight or buffer whose data another rank holds, or what was computed with it."""

    name_and_owner: tuple[str, int]
    """The name of the weight or buffer, and the pp_rank that holds it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if StageTensor in types:
            return NotImplemented  # let the stage tensor say where the operation runs
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _NEEDS_NUMBERS:
            raise _refusal(name, (args, kwargs))
        if func is T.is_contiguous:  # as where it has data: safetensors asks this first, and then for the numbers
            return True
        if func in _FREEZES:
            _refuse_freezing(*args, **kwargs)
        elif (changes_in_place(func, name, kwargs) and func is not T.detach_) or kwargs.get("out") is not None:
            return _leave_unchanged(func, name, args, kwargs)
        try:
            with _NoTorchFunction():
                result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            raise _refusal(name, (args, kwargs)) from error  # a buffer, of which there is not even a filler here
        if func in _FROM_SHAPE or (name in _GETS_OR_SETS and func not in PROPERTIES):
            return result
        origin = next(_nonresident_in((args, kwargs))).name_and_owner
        return map_tensors(
            lambda value: _as_nonresident(value, NonResident, origin) if type(value) is T else value, result
        )

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.unbind())  # else rows would come without the mark

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name, owner = self.name_and_owner
        kind = "Parameter" if isinstance(self, nn.Parameter) else "Tensor"
        return f"{kind}(`{name}` on pp_rank {owner}, {str(self.dtype).removeprefix('torch.')}{list(self.shape)})"

    def __format__(self, specification: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with _NoTorchFunction():
                value = self.detach()
                plain = nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value
            plain.__dict__.update(vars(self))
            memo[id(self)] = _as_nonresident(plain, type(self), self.name_and_owner)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal("pickle", self)


class _NonResidentParameter(NonResident, nn.Parameter):
    """A parameter of another rank."""


def mark_nonresident(root: nn.Module, placement: Placement) -> None:
    """Let reads of the numbers of weights and buffers raise that this rank does not hold.

    They stay the same objects. Weights of the user's own classes are left alone: they may behave otherwise.
    """
    for placed in placement:
        if not placed.is_here and type(placed.parameter) is nn.Parameter:
            _as_nonresident(placed.parameter, _NonResidentParameter, (placed.name, placed.first_pp_rank))
    for name, buffer in root.named_buffers():
        # Else torch raises without a name, and `average.add_(buffer)` does nothing at all.
        owner = placement.pp_rank_of(name.rpartition(".")[0])
        if buffer.is_meta and type(buffer) is T and owner not in (None, state.pp_rank):
            _as_nonresident(buffer, NonResident, (name, owner))
    # Torch's own setter does not ask the value's class, and would copy the NaN that stand for its numbers.
    nn.Parameter.data = property(_DATA.__get__, _set_data)  # type: ignore[assignment]
    state.reset_hooks.append(lambda: setattr(nn.Parameter, "data", _DATA))


def _set_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    is_between_units = microbatch_between_units() is not None  # there `refuse_as_data` has a better hint
    if isinstance(value, NonResident) and not isinstance(parameter, NonResident) and not is_between_units:
        raise _refusal("data", value)
    _DATA.__set__(parameter, value)


def _as_nonresident(tensor: torch.Tensor, kind: type[NonResident], name_and_owner: tuple[str, int]) -> torch.Tensor:
    # Assign the class, so that the object stays the same: optimizers, hooks and state dicts refer to it.
    tensor.__class__ = kind
    tensor.name_and_owner = name_and_owner  # type: ignore[attr-defined]
    return tensor


def _refuse_freezing(parameter: torch.Tensor, requires_grad: bool = True) -> None:
    """Raise if a step freezes or unfreezes a parameter while its microbatches run."""
    microbatch = microbatch_between_units()
    if microbatch is not None and parameter.requires_grad is not requires_grad:
        microbatch.stage.failed_alone = True
        # Ranks could not agree when: a microbatch's backward runs after the forward of later ones.
        raise UsageError(
            f"a step froze or unfroze a parameter of shape {list(parameter.shape)} while its microbatches ran",
            hint="do so before the step is called; make steps of their own of the parts that train others",
        )


def _leave_unchanged(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave a change in place to the rank that holds the weight."""
    target = args[0] if args else kwargs.get("tensor")
    if not isinstance(target, NonResident) or kwargs.get("out") is not None:
        raise _refusal(name, (args, kwargs))  # its numbers would go into a tensor of this rank
    microbatch = microbatch_between_units()
    if microbatch is not None:
        microbatch.stage.failed_alone = True
        raise parameter_change_error(name, target)
    initialises = getattr(func, "__module__", "") == nn.init.__name__  # those run without gradients
    if target.requires_grad and target.is_leaf and torch.is_grad_enabled() and not initialises:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if initialises or name in _DRAWING_IN_PLACE:
        warn_user(
            "weights were initialised that other pipeline ranks hold: each rank draws for its own weights alone, so"
            " they get other values than in one process; initialise before smp.DistributedModel"
        )
    return target


def refuse_nonresident(name: str, output: Any) -> None:
    """Raise if the module `name` has returned what it has computed with a weight of another rank."""
    if next(_nonresident_in(output), None) is not None:
        raise _refusal(name, output)


def _nonresident_in(value: Any) -> Iterator[NonResident]:
    return (tensor for tensor in tensors_in(value) if isinstance(tensor, NonResident))


def _refusal(name: str, arguments: Any) -> UsageError:
    weight, owner = next(_nonresident_in(arguments)).name_and_owner
    if Current.microbatch is not None:
        Current.microbatch.stage.failed_alone = True
        hint = "hand the weight to the module as an argument of its forward"
    else:
        hint = (
            "go through `model.local_parameters()`, or let all ranks call `model.state_dict()`, which has all weights;"
            " a step may hand them to layers and operations"
        )
    return UsageError(
        f"`{name.strip('_')}` needs the numbers of `{weight}`, which pipeline rank {owner} holds and rank"
        f" {state.pp_rank} does not",
        hint=hint,
    )


# --- shared by modules on several ranks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedTensor:
    """A weight or buffer of a module on this rank that is one of another rank's module, too."""

    name: str
    module: nn.Module
    key: str
    ranks: list[int]

    @property
    def version(self) -> int:
        """How often this rank's copy has been changed in place."""
        tensor = getattr(self.module, self.key, None)
        return version_of(tensor) if isinstance(tensor, torch.Tensor) else 0

    def refuse_change(self, rank: int) -> NoReturn:
        raise UsageError(
            f"`{self.name}`, which modules on pipeline {name_ranks(self.ranks)} share, was changed in place by one on"
            f" rank {rank}: the others keep it as it was",
            hint="put the modules that share it on one rank: auto_partition: false, and smp.set_partition for each",
        )


def shared_tensors(root: nn.Module, placement: Placement) -> list[SharedTensor]:
    """Return what this rank's modules share with those of others, before modules leave this rank."""
    ranks_of: defaultdict[int, set[int]] = defaultdict(set)
    here: list[tuple[str, nn.Module, str, int]] = []
    for module, names in names_by_module(root).items():
        pp_ranks = {rank for name in names if (rank := placement.pp_rank_of(name)) is not None}
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, tensor in tensors if pp_ranks else ():
            ranks_of[id(tensor)] |= pp_ranks
            if state.pp_rank in pp_ranks:
                here.append((f"{names[0]}.{key}", module, key, id(tensor)))
    return [
        SharedTensor(name, module, key, sorted(ranks_of[tensor]))
        for name, module, key, tensor in here
        if len(ranks_of[tensor]) > 1
    ]
