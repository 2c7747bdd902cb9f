"""What optimizers hold, and the most that the device held when one has updated the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from smpkit.torch.core import devices
from smpkit.torch.placement.dtensor import local_tensor_of

__all__ = ["Updates", "num_bytes_of"]


class Updates:
    """What the device holds when an optimizer has updated the model: at the end of a step, before the script goes on.

    The script may begin the statistics of the device anew at any time between two steps.

    Args:
        parameters: returns those of the model, as they are now: `fully_shard` puts others in their place.
        any_optimizer: count every optimizer, also one of parameters that are not the model's, such as float32 masters.
    """

    def __init__(
        self, parameters: Callable[[], Iterable[Tensor]], device: torch.device, *, any_optimizer: bool = False
    ) -> None:
        self._parameters, self._device, self._any_optimizer = parameters, device, any_optimizer
        self._sizes: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """By optimizer: the states of one that the script has replaced are gone with it."""
        self.num_updates = 0
        self.peak_bytes = 0
        """The most that the device held until then; 0: not known, or the CPU."""
        self.handle = register_optimizer_step_post_hook(self._on_step)

    @property
    def state_bytes(self) -> int:
        """Of the states of all optimizers that have made a step, and of the masters that they update."""
        return sum(self._sizes.values())

    def remove(self) -> None:
        """Stop listening."""
        self.handle.remove()

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        own = set(map(id, self._parameters()))
        updated = [each for group in optimizer.param_groups for each in group["params"]]
        if not self._any_optimizer and own.isdisjoint(map(id, updated)):
            return  # of another model
        masters = [each for each in updated if id(each) not in own] if self._any_optimizer else []
        owned = {*own, *map(id, masters)}
        self.num_updates += 1
        self.peak_bytes = max(self.peak_bytes, devices.peak_bytes(self._device) or 0)
        states = [values for parameter, values in optimizer.state.items() if id(parameter) in owned]
        tensors = [each for values in states for each in values.values() if isinstance(each, Tensor)]
        self._sizes[optimizer] = sum(map(num_bytes_of, (*tensors, *masters)))


def num_bytes_of(tensor: Tensor) -> int:
    """Return what a tensor, or this rank's part of it, takes."""
    local: Tensor = local_tensor_of(tensor)
    return local.numel() * local.element_size()
