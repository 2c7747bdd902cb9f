"""What a model is sliced along: layers that are called one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from smpkit.errors import UsageError
from smpkit.torch.offload_model import huggingface
from smpkit.torch.offload_model.shard import ModelShard
from smpkit.torch.offload_model.slicing import Balance, slice_ends

__all__ = ["SlicedModel", "slice_model"]


@dataclass(frozen=True)
class SlicedModel:
    """A model as slices.

    `unpack_tuple`: a tuple that one slice returns becomes the positional arguments of the next, as in FairScale's
    lists; the layers of an `nn.Sequential` get what the layer before returned as one argument.
    """

    module: nn.Module
    """What is registered, so that its state dict has the expected names."""
    slices: list[ModelShard]
    unpack_tuple: bool


def slice_model(model: Any, layers: Sequence[str] | None, num_slices: int, balance: Balance) -> SlicedModel:
    """Take a model apart.

    Args:
        model: an `nn.Sequential`, a list of modules (each a slice of its own), a Hugging Face model that is known, or
            any module together with `layers`.
        layers: paths of the modules that the model calls one after the other; lists of modules count as their members.

    Raises:
        TypeError: nothing, or something that is not known to be a chain; FairScale's words.
        UsageError: a path that leads nowhere.
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
