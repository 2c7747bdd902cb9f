"""Find weights that nothing has written, whatever would have: an initialiser, a checkpoint, an assignment.

`mark_unwritten()` fills what constructors allocate with NaN, which is what remains of the memory that nothing writes.
A model may be wrapped like that, because scripts load checkpoints afterwards; it must not be trained like that.

`remember_weights` takes a checksum of what a constructor made, so that `has_remembered_weights` tells later whether
anything has been written since. Moves and casts write nothing new, so they take another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smpkit.errors import UsageError
from smpkit.torch.core.microbatches import StepProgress
from smpkit.torch.core.step_participants import StepParticipant
from smpkit.torch.placement.delayed import is_delayed
from smpkit.torch.placement.dtensor import local_tensor_of

__all__ = [
    "UnwrittenCheck",
    "checksum_of_bits",
    "has_remembered_weights",
    "mark_unwritten",
    "remember_weights",
    "remembering_moves",
]


# --- never written ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mark_unwritten() -> Iterator[None]:
    """Fill what is allocated in this block with NaN, where it has a floating-point dtype."""
    if _NanInAllocations.is_on:  # an inner constructor: once is enough
        yield
        return
    _NanInAllocations.is_on = True
    try:
        with _NanInAllocations():
            yield
    finally:
        _NanInAllocations.is_on = False


_ALLOCATIONS: Final = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


class _NanInAllocations(TorchFunctionMode):
    is_on = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS and made.is_floating_point():
            with torch.no_grad():
                made.fill_(torch.nan)
        return made


class UnwrittenCheck(StepParticipant):
    """Refuses to run a model with weights that nothing has written; scripts may load them until the first step.

    Args:
        module: the user's model, as it is wrapped; what is written by now is not looked at again.
        holds: tells whether this rank holds a parameter.
    """

    def __init__(self, module: nn.Module, holds: Callable[[torch.Tensor], bool]) -> None:
        self._module = module
        self._holds = holds
        self._suspects = [name for name, each in module.named_parameters() if _is_unwritten(each)]

    def begin_step(self, step: StepProgress) -> None:  # noqa: ARG002 - that of all parts
        if self._suspects:
            self._check()

    def begin_outside_step(self, training: bool) -> None:  # noqa: ARG002 - that of all parts
        if self._suspects:
            self._check()

    def _check(self) -> None:
        """Raise UsageError if one of the parameters that this rank holds has not been written until its first use."""
        parameters = dict(self._module.named_parameters())
        names = [name for name in self._suspects if self._holds(parameters[name]) and _is_unwritten(parameters[name])]
        if names:
            listed = ", ".join(f"`{name}`" for name in names[:5]) + (", ..." if len(names) > 5 else "")
            raise UsageError(
                f"{len(names)} of {len(parameters)} parameters were never initialised: nothing has written them since"
                f" their memory was allocated, and they hold NaN ({listed})",
                hint="initialise them, or load weights before the first step (`model.load_state_dict`,"
                " `smp.resume_from_checkpoint`); a script that switches initialisation off does so for all modules,"
                " and tensor parallelism makes fresh weights only for those that it replaces",
            )
        self._suspects = []


def _is_unwritten(parameter: torch.Tensor) -> bool:
    if is_delayed(parameter) or parameter.is_meta or not parameter.is_floating_point():
        return False
    return bool(local_tensor_of(parameter.detach()).isnan().any())


# --- not written since it was made ------------------------------------------------------------------------------------


_ATTRIBUTE: Final = "_smp_weights_as_made"


def remember_weights(module: nn.Module) -> None:
    """Remember what weights a module has now."""
    # An attribute, so that copies of the module have it too.
    object.__setattr__(module, _ATTRIBUTE, _checksums(module))


def has_remembered_weights(module: nn.Module) -> bool:
    """Tell whether a module has the weights that were remembered; False if none were."""
    return _ATTRIBUTE in vars(module) and vars(module)[_ATTRIBUTE] == _checksums(module)


def remembering_moves(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return an `nn.Module._apply` that remembers what moved or cast weights are now."""

    def remembering(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        unchanged = has_remembered_weights(self)
        result = apply(self, *args, **kwargs)
        if unchanged:
            remember_weights(self)
        return result

    return remembering


def _checksums(module: nn.Module) -> dict[str, int]:
    return {
        name: 0 if is_delayed(each) or each.is_meta else checksum_of_bits(each)
        for name, each in module.named_parameters()
    }


_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum_of_bits(tensor: torch.Tensor) -> int:
    """Return a checksum of the bits, not the values: NaN is then equal to itself, and the sum is exact in any order."""
    bits = tensor.detach().contiguous().view(_INTEGERS[min(tensor.element_size(), 8)])
    return int(bits.sum(dtype=torch.int64))
