"""Parameters in the hands of code between units: `F.linear(x, emb.weight)`, `norm(emb.weight)`, `weight.norm()`.

Every rank has the parameter object, and not every rank its data. Among stage tensors an operation runs where its
parameter is; what else it takes, and what a module of another rank is given, travels there like any other value, once
per microbatch, and its gradient back. An operation on parameters alone makes stage tensors of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any, Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.pipeline.effects import changes_in_place
from smpkit.torch.pipeline.located import (
    PROPERTIES,
    SHAPE_FUNCTIONS,
    StageTensor,
    make_stage_tensor,
    microbatch_between_units,
)
from smpkit.torch.pipeline.specs import dense_spec_of

if TYPE_CHECKING:
    from smpkit.torch.pipeline.stage import StageContext

__all__ = ["StageParameters", "parameter_change_error", "parameters_as_stage_tensors"]

_CONTAINERS: Final = frozenset({list, tuple})
_SET_REQUIRES_GRAD: Final[Any] = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


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
        """Return a tensor as a call on rank `owner` may have it: itself, unless it is a parameter that is not there.

        Raises:
            UsageError: the tensor came out of a unit by a way of its own.
        """
        if type(tensor) is not StageTensor and tensor.grad_fn is not None:
            _refuse_leak(tensor.grad_fn, self._stage)
        return self.as_stored_on(owner, tensor)

    def as_stored_on(self, owner: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same without a look at where the tensor came from: the call may have changed it since."""
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
        """Let go of them."""
        self._stage_tensors.clear()


def _refuse_leak(grad_fn: Any, stage: StageContext) -> None:
    """Raise if a tensor that every rank should have was made of weights that only some hold.

    Between units these are stage tensors, so a plain tensor of them was made inside a unit, and did not come out as
    its result: other ranks have none, or an older one.
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
    """Return the arguments of an operation with stage tensors in place of parameters; None if it needs none.

    It needs none inside a unit, among stage tensors (which say where it runs), and for a question about shapes.
    """
    microbatch = microbatch_between_units()
    if microbatch is None or kwargs.get("out") is not None:
        return None
    remote = microbatch.stage.parameter_owners
    found = False
    for argument in args:
        for part in argument if type(argument) in _CONTAINERS else (argument,):
            if type(part) is StageTensor:
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
    """Return whether a function takes a parameter's value, and not the parameter itself."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func in PROPERTIES
    return not changes_in_place(func, name, {}) and name != "__set__" and func not in SHAPE_FUNCTIONS


def _refuse_change(func: Callable[..., Any], args: tuple[Any, ...], remote: Container[int]) -> None:
    """Raise if an operation between units changes a parameter that not every rank holds.

    Nor does every rank know when: a microbatch's backward runs after the forward of those that come next.

    Raises:
        UsageError: it changes the parameter's values, or whether it needs gradients.
    """
    target = args[0]
    if id(target) not in remote:
        return
    name = getattr(func, "__name__", "")
    if func is torch.Tensor.requires_grad_ or func == _SET_REQUIRES_GRAD:  # made anew each time
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
