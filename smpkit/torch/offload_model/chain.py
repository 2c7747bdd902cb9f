"""Slice a model: find the layers that it calls one after the other, and cut them into slices of about equal size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Literal

from torch import nn
from torch.nn.parameter import is_lazy

from smpkit.errors import UsageError
from smpkit.plan.partition.cut import cut
from smpkit.torch.offload_model import huggingface

__all__ = ["Balance", "ModelShard", "SlicedModel", "check_count", "slice_ends", "slice_model"]

Balance = Literal["params", "bytes"] | Sequence[float]
"""What makes slices equal: the number of parameters, their bytes, or a cost given for each layer (measured seconds)."""
_RESOLUTION: Final = 1 << 40  # `cut` compares integers: costs are scaled to a sum of 2^40 and rounded


@dataclass(frozen=True)
class SlicedModel:
    """A model as slices."""

    module: nn.Module
    """To be registered as a submodule, so that the state dict has the expected names."""
    slices: list[ModelShard]
    unpack_tuple: bool
    """Whether a tuple that one slice returns becomes the positional arguments of the next, as in FairScale's lists; the
    layers of an `nn.Sequential` get what the layer before returned as one argument."""


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
        """Leave out the function that loads slices: a copy gets another."""
        return self.__dict__ | {"_load": None}

    def attach(self, load: Callable[[int], object]) -> None:
        """Set the function that loads a slice, given its index."""
        self._load = load

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the layers with their current weights; keyword arguments go to the first."""
        layers = self.model_shard
        if not self._sequential or not isinstance(layers, nn.Sequential):
            return layers(*inputs, **kwargs)
        first, *others = layers  # not `children()`, which lists a layer only once
        value = first(*inputs, **kwargs)
        for layer in others:
            value = layer(value)
        return value

    def to_device(self) -> None:
        """Start to copy the weights to the device, if they are not there."""
        if self._load is not None:
            self._load(self.index)

    def forward_load(self, non_blocking: bool = True) -> None:
        """Start to copy the weights to the device; FairScale's name. Copies never block."""
        del non_blocking
        self.to_device()

    def forward_drop(self, non_blocking: bool = True) -> None:
        """Do nothing: weights are never changed on the device, so nothing is copied back. FairScale's name."""
        del non_blocking

    backward_load = forward_load
    backward_drop = forward_drop


def slice_model(model: Any, layers: Sequence[str] | None, num_slices: int, balance: Balance) -> SlicedModel:
    """Slice a model.

    Args:
        model: an `nn.Sequential`, a list of modules (each a slice of its own), a Hugging Face model that is known, or
            any module together with `layers`.
        layers: paths of the modules that the model calls one after the other; lists of modules count as their members.

    Raises:
        TypeError: no model, or one whose layers are unknown; FairScale's words.
        UsageError: a path to no module, or parameters that lie in none of the layers.
    """
    if layers is not None:
        return _from_paths(model, layers, num_slices, balance)
    if not isinstance(model, nn.Module) and not model:
        raise TypeError("`model` argument to `OffloadModel` cannot be None.")
    if isinstance(model, list):
        return _from_list(model)
    if isinstance(model, nn.Sequential):
        if len(model) == 0:
            raise TypeError("`model` argument to `OffloadModel` cannot be None.")
        slices = _slice_layers(list(model), num_slices, balance)
        return SlicedModel(nn.Sequential(*slices), slices, unpack_tuple=False)
    known_layers = huggingface.known_layers(model)
    if known_layers is not None:
        return SlicedModel(model, _slice_layers(known_layers, num_slices, balance), unpack_tuple=False)
    raise TypeError(
        "`model` argument to `OffloadModel` must be of type `nn.Sequential`."
        f" It is a {type(model).__name__}: give the paths of the layers that it calls one after the other"
        f" (layers=[...]), or a list of modules. Of Hugging Face's models it knows {', '.join(huggingface.KNOWN)}."
    )


def _from_list(modules: list[Any]) -> SlicedModel:
    wrong = next((module for module in modules if not isinstance(module, nn.Module)), None)
    if wrong is not None:
        raise TypeError(
            f"`model` argument to `OffloadModel` must be of type `nn.Sequential`. It is a list with {wrong!r} in it."
        )
    _check_layers(modules)
    slices = [ModelShard(module, index, sequential=False) for index, module in enumerate(modules)]
    return SlicedModel(nn.Sequential(*slices), slices, unpack_tuple=True)


def _from_paths(model: Any, paths: Sequence[str], num_slices: int, balance: Balance) -> SlicedModel:
    if not isinstance(model, nn.Module) or isinstance(paths, str) or not paths:
        raise UsageError(
            f"layers is {paths!r} of a {type(model).__name__}; it must be a list of module paths of a module",
            hint='for example layers=["embedding", "blocks", "head"]',
        )
    found: list[nn.Module] = []
    for path in paths:
        try:
            module = model.get_submodule(path)
        except AttributeError as error:
            names = ", ".join(name for name, _ in model.named_children())
            raise UsageError(f"layers names `{path}`, but {error}", hint=f"the model's children are {names}") from None
        found += module if isinstance(module, nn.ModuleList | nn.Sequential) else [module]
    if not found:
        raise UsageError(f"layers names {list(paths)}, which hold no modules")
    inside = {id(parameter) for layer in found for parameter in layer.parameters()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    if outside:
        raise UsageError(
            f"{len(outside)} parameters lie in none of the layers, the first is `{outside[0]}`",
            hint="name the modules that hold them, in the order in which they are called",
        )
    return SlicedModel(model, _slice_layers(found, num_slices, balance), unpack_tuple=False)


def _slice_layers(layers: Sequence[nn.Module], num_slices: int, balance: Balance) -> list[ModelShard]:
    _check_layers(layers)
    ends = slice_ends(layers, num_slices, balance)
    starts = [0, *ends[:-1]]
    return [
        ModelShard(nn.Sequential(*layers[start:end]), index, sequential=True)
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def _check_layers(layers: Sequence[nn.Module]) -> None:
    for layer in layers:
        if any(isinstance(module, ModelShard) for module in layer.modules()):
            raise UsageError(f"a slice of another OffloadModel is in this {type(layer).__name__}; only one can move it")
        parameters: list[tuple[str, Any]] = list(layer.named_parameters())
        name = next((name for name, parameter in parameters if is_lazy(parameter)), None)
        if name is not None:
            raise UsageError(
                f"`{name}` of a {type(layer).__name__} has no shape yet",
                hint="run the model once before it is wrapped: lazy modules learn their shapes from inputs",
            )


def slice_ends(layers: Sequence[nn.Module], num_slices: int, balance: Balance = "params") -> list[int]:
    """Return where each slice ends, so that the largest slice is as small as possible; no slice is empty.

    Args:
        layers: in the order in which they are called.
        num_slices: how many are wanted; more than there are layers means one layer each.
        balance: see `Balance`.

    Raises:
        UsageError: a count below 1, an unknown balance, or costs that do not fit the layers.
    """
    check_count("num_slices", num_slices)
    total = [0, *accumulate(_costs(layers, balance))]
    count = min(num_slices, len(layers))
    return cut(len(layers), lambda _, start, end: total[end] - total[start], [True] * count)


def check_count(name: str, value: Any) -> None:
    """Raise UsageError unless an argument is a whole number, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}; it must be a whole number, at least 1")


def _costs(layers: Sequence[nn.Module], balance: Balance) -> list[int]:
    if balance == "params":
        return [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    if balance == "bytes":
        return [sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers]
    given: Any = balance
    if not isinstance(given, list | tuple) or not all(isinstance(cost, int | float) for cost in given):
        raise UsageError(f"balance is {given!r}; it must be 'params', 'bytes' or a list with a cost for each layer")
    if len(balance) != len(layers) or not all(0 <= cost < math.inf for cost in balance):  # also refuses NaN
        raise UsageError(f"balance must give {len(layers)} layers a cost of at least 0 each; it is {list(balance)}")
    whole = sum(balance) or 1.0
    return [round(cost / whole * _RESOLUTION) for cost in balance]
