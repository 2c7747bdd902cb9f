"""One slice of the model: layers that are on the device together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["ModelShard"]


class ModelShard(nn.Module):
    """Neighbouring layers, under the names that FairScale gives them.

    Args:
        layers: the slice's layers as an `nn.Sequential`, or a module of the user's list.
        index: of the slice.
        sequential: whether `layers` are called one after the other here; then the first may take several arguments.
    """

    def __init__(self, layers: nn.Module, index: int, *, sequential: bool) -> None:
        super().__init__()
        self.model_shard = layers
        self.index = index
        self._sequential = sequential
        self._load: Callable[[int], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out who brings slices to the device: a copy has another."""
        return self.__dict__ | {"_load": None}

    def attach(self, load: Callable[[int], object]) -> None:
        """Say who brings slices to the device."""
        self._load = load

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the layers where their weights are now; keyword arguments go to the first."""
        layers = self.model_shard
        if not self._sequential or not isinstance(layers, nn.Sequential):
            return layers(*inputs, **kwargs)
        first, *others = layers  # not `children()`, which leaves out a layer that is there twice
        value = first(*inputs, **kwargs)
        for layer in others:
            value = layer(value)
        return value

    def to_device(self) -> None:
        """Start to bring the weights to the device, if they are not there."""
        if self._load is not None:
            self._load(self.index)

    def forward_load(self, non_blocking: bool = True) -> None:
        """Start to bring the weights to the device; FairScale's name. Copies never block."""
        del non_blocking
        self.to_device()

    def forward_drop(self, non_blocking: bool = True) -> None:
        """Do nothing: weights are copied in and never changed there, so nothing comes back; FairScale's name."""
        del non_blocking

    backward_load = forward_load
    backward_drop = forward_drop
