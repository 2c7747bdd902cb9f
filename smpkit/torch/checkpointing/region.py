"""One checkpointed call: run it, keep its inputs and nothing else, and run it again in backward.

Lowered to torch's non-reentrant checkpoint, which keeps what it is handed as positional tensors through the ambient
saved-tensor hooks (so that offloading sees them) and holds on to everything else. So every tensor that the call reads,
wherever it stands among the arguments or on the module, is taken out, each once, and handed over by position.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from smpkit.torch.checkpointing.surroundings import ModuleStateSnapshot
from smpkit.torch.containers import map_leaves
from smpkit.torch.offload.active import offload_inputs
from smpkit.torch.pipeline.random import replayed_operation_streams, will_be_recomputed
from smpkit.torch.pipeline.specs import map_tensors
from smpkit.torch.state import state

__all__ = ["CheckpointRegion", "run_checkpointed"]


def run_checkpointed(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    preserve_rng_state: bool,
) -> Any:
    """Call `function`; its backward computes again what it would otherwise keep.

    Args:
        function: calls `modules` and nothing else.
        name: path of the (first) module as in `state_dict`, for those who take the inputs away from the device.
        preserve_rng_state: whether recomputation draws the same random numbers.
    """
    if torch.compiler.is_compiling():  # torch.compile around us knows torch's checkpoint, and nothing of ours
        return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    region = CheckpointRegion(function, modules, args, kwargs, preserve_rng_state)
    if not _needs_backward(region.tensors, modules):
        return function(*args, **kwargs)
    tensors, region.tensors = region.tensors, []  # from here on only torch holds them, and those who offload
    # Inside another checkpointed call these are not kept: that one makes them again.
    with contextlib.nullcontext() if will_be_recomputed() else offload_inputs(name):
        return torch_checkpoint(
            region, *tensors, use_reentrant=False, preserve_rng_state=preserve_rng_state and not state.tracing
        )


class _TensorSlot:
    """Stands for an input tensor; no dataclass, which would count as a container of the user's."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class CheckpointRegion:
    """A checkpointed call without its tensors, which torch keeps."""

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        preserve_rng_state: bool,
    ) -> None:
        self.tensors: list[Tensor] = []
        self._function = function
        self._slots: dict[int, _TensorSlot] = {}
        self._args, self._kwargs = map_tensors(self._slot, (args, kwargs))
        self._snapshot = ModuleStateSnapshot(modules, self._slot, generators=preserve_rng_state)
        self._slots.clear()  # ids mean nothing once the tensors are gone
        self._operations = replayed_operation_streams()
        self._is_done = False

    def _slot(self, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):  # weights stay where they are
            return tensor
        slot = self._slots.get(id(tensor))
        if slot is None:
            slot = self._slots[id(tensor)] = _TensorSlot(len(self.tensors))
            self.tensors.append(tensor)
        return slot

    def __call__(self, *tensors: Tensor) -> Any:
        def kept(value: Any) -> Any:
            return tensors[value.index] if type(value) is _TensorSlot else value

        def filled(value: Any) -> Any:  # most arguments are tensors: no need to look for containers
            return tensors[value.index] if type(value) is _TensorSlot else map_leaves(kept, value)

        args = [filled(value) for value in self._args]
        kwargs = {key: filled(value) for key, value in self._kwargs.items()}
        if self._is_done:
            with self._operations(), self._snapshot.restored(kept):
                return self._function(*args, **kwargs)
        with self._operations():
            output = self._function(*args, **kwargs)
        self._is_done = True
        self._snapshot.end_forward()
        return output


def _needs_backward(tensors: Iterable[Tensor], modules: Sequence[nn.Module]) -> bool:
    """Return whether there is anything to compute again: a frozen stem has no backward."""
    return any(tensor.requires_grad for tensor in tensors) or any(
        parameter.requires_grad for module in modules for parameter in module.parameters()
    )
