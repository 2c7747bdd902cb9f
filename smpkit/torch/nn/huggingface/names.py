"""How the state dicts of Hugging Face models and of the modules that replace them correspond.

`Names` describe one family: which tensors of ours are the same as theirs, transposed, or packed. `translation` applies
them lazily, weight by weight, when a model is replaced; `rename` applies them to a whole state dict, for the functions
that scripts call.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from smpkit.torch.tensor_parallel.registry import TensorOrFactory, Translation

_LAYER: Final = re.compile(r"(?:^|\.)(\d+)\.")
_MASKS: Final = (".attn.bias", ".attn.masked_bias", ".attn.attention.bias", ".attn.attention.masked_bias")
"""Ends of the names of causal masks, which state dicts of older releases of transformers hold."""


@dataclass(frozen=True)
class _Theirs:
    """What a tensor of ours is made of: tensors of theirs, concatenated along the output features if they are several.

    Args:
        names: of their tensors, or of their layers with a weight and a bias.
        transposed: weights are (in, out) there: GPT-2's `Conv1D`.
    """

    names: tuple[str, ...]
    transposed: bool = False

    def join(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return our tensor, from a state dict with theirs."""
        tensors = [state[name] for name in self.names]
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return whole.t() if self.transposed and whole.dim() == 2 else whole

    def part(self, state: Mapping[str, torch.Tensor], ours: str, index: int) -> torch.Tensor:
        """Return one of their tensors, from a state dict with ours."""
        whole = state[ours]
        if self.transposed and whole.dim() == 2:
            return whole.t().contiguous()
        return whole if len(self.names) == 1 else whole.chunk(len(self.names))[index].clone()


Layers = Mapping[str, "str | tuple[str, ...] | _Theirs"]
"""By the names of our layers: the one of theirs that is the same, or those that are packed into ours, in this order."""

Names = Mapping[str, _Theirs]
"""By the names of our tensors: what they are made of. `*` stands for the number of the layer."""


def transposed(name: str) -> _Theirs:
    """Map a linear layer whose weight is (in, out) there."""
    return _Theirs((name,), transposed=True)


def names_of_tensors(ours: str, theirs: str, layers: Layers) -> Names:
    """Return the names of the weights and biases of layers, each after a prefix."""
    names = {}
    for name, source in layers.items():
        made_of = source if isinstance(source, _Theirs) else _Theirs((source,) if isinstance(source, str) else source)
        for part in ("weight", "bias"):
            full = tuple(f"{theirs}{layer}.{part}" for layer in made_of.names)
            names[f"{ours}{name}.{part}"] = replace(made_of, names=full)
    return names


def translation(names: Names, *, to_hf: bool) -> Translation:
    """Return how state dicts are translated when a module is replaced, or back."""

    def translate(state: Mapping[str, torch.Tensor], _: nn.Module) -> Iterator[tuple[str, TensorOrFactory]]:
        for _sources, translated in _translated(names, state, to_hf=to_hf):
            yield from translated.items()

    return translate


def rename(state: dict[str, Any], names: Names, *, to_hf: bool, inside: str = "") -> dict[str, Any]:
    """Translate a whole state dict, removing each tensor from `state` when it is done, to save memory.

    Tensors with unknown names keep them.

    Args:
        to_hf: whether it has our names.
        inside: translate what lies in modules of this name, at any depth; empty: everything.
    """
    renamed: dict[str, Any] = {}
    matches = (re.search(rf"(^|\.){inside}\." if inside else "", key) for key in state)
    for prefix in sorted({match.string[: match.end()] for match in matches if match}):
        part = {key.removeprefix(prefix): state.pop(key) for key in list(state) if key.startswith(prefix)}
        for sources, translated in _translated(names, part, to_hf=to_hf):
            renamed.update({prefix + name: make() for name, make in translated.items()})
            for source in sources:
                del part[source]
        renamed.update({prefix + key: value for key, value in part.items() if not key.endswith(_MASKS)})
    renamed.update(state)
    state.clear()
    return renamed


def _translated(
    names: Names, state: Mapping[str, Any], *, to_hf: bool
) -> Iterator[tuple[Sequence[str], dict[str, Callable[[], torch.Tensor]]]]:
    """Yield which tensors of `state` become others, and by name what makes these."""
    for ours, made_of in [*_expand_layers(names, state)]:
        if to_hf and ours in state:
            parts = enumerate(made_of.names)
            yield [ours], {theirs: functools.partial(made_of.part, state, ours, index) for index, theirs in parts}
        elif not to_hf and all(theirs in state for theirs in made_of.names):
            yield made_of.names, {ours: functools.partial(made_of.join, state)}


def _expand_layers(names: Names, state: Mapping[str, Any]) -> Iterator[tuple[str, _Theirs]]:
    """Yield the names, those with `*` once for each layer of `state`."""
    numbers = {match.group(1): None for key in state if (match := _LAYER.search(key))}
    for ours, made_of in names.items():
        for layer in numbers if "*" in ours else [""]:
            theirs = tuple(name.replace("*", layer) for name in made_of.names)
            yield ours.replace("*", layer), replace(made_of, names=theirs)
