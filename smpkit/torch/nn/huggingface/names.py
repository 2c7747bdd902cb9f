"""How the state dicts of Hugging Face models and of the modules that replace them correspond.

`Names` describe one family: which tensors of ours are the same as theirs, transposed, or packed. `translation` applies
them lazily, weight by weight, when a model is replaced; `rename` applies them to a whole state dict, for the functions
that scripts call.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.tensor_parallel.registry import TensorOrFactory, Translation

__all__ = ["Layers", "Names", "by_head", "names_of_tensors", "rename", "translation", "transposed", "with_causal_masks"]

_LAYER: Final = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True)
class _Theirs:
    """What a tensor of ours is made of: tensors of theirs, concatenated along the output features if they are several.

    Args:
        names: of their tensors, or of their layers with a weight and a bias.
        transposed: weights are (in, out) there: GPT-2's `Conv1D`.
        by_head: rows are query, key and value of each head in turn there; ours has all queries, then all keys, then all
            values: (heads, 3, head size, ...) <-> (3, heads, head size, ...).
        num_heads: of the model.
    """

    names: tuple[str, ...]
    transposed: bool = False
    by_head: bool = False
    num_heads: int | None = None

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return our tensor."""
        if self.by_head:
            return self._swap(tensors[0], 0)
        whole = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
        return whole.t() if self.transposed and whole.dim() == 2 else whole

    def cut(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return their tensors."""
        if self.by_head:
            return [self._swap(tensor, 1)]
        if self.transposed and tensor.dim() == 2:
            return [tensor.t().contiguous()]
        count = len(self.names)
        return [tensor] if count == 1 else [each.clone() for each in tensor.chunk(count)]

    def _swap(self, whole: torch.Tensor, heads_dim: int) -> torch.Tensor:
        if self.num_heads is None:
            raise UsageError("these weights lie head by head", hint="give the model's `num_attention_heads`")
        sizes = (self.num_heads, 3) if heads_dim == 0 else (3, self.num_heads)
        return whole.view(*sizes, -1, *whole.shape[1:]).transpose(0, 1).reshape(whole.shape)


Layers = Mapping[str, "str | tuple[str, ...] | _Theirs"]
"""By the names of our layers: the one of theirs that is the same, or those that are packed into ours, in this order."""

Names = Mapping[str, _Theirs]
"""By the names of our tensors: what they are made of. `*` stands for the number of the layer."""


def transposed(name: str) -> _Theirs:
    """Map a linear layer whose weight is (in, out) there."""
    return _Theirs((name,), transposed=True)


def by_head(name: str) -> _Theirs:
    """Map a projection whose rows are query, key and value of each head in turn there."""
    return _Theirs((name,), by_head=True)


def names_of_tensors(ours: str, theirs: str, layers: Layers, num_heads: int | None) -> Names:
    """Return the names of the weights and biases of layers, each after a prefix."""
    found = {}
    for name, given in layers.items():
        plain = (given,) if isinstance(given, str) else given
        made_of = plain if isinstance(plain, _Theirs) else _Theirs(plain)
        for part in ("weight", "bias"):
            full = tuple(f"{theirs}{each}.{part}" for each in made_of.names)
            found[f"{ours}{name}.{part}"] = replace(made_of, names=full, num_heads=num_heads)
    return found


# --- translations -----------------------------------------------------------------------------------------------------


def translation(names: Callable[[nn.Module], Names], *, to_hf: bool) -> Translation:
    """Return how state dicts are translated when a module is replaced, or back.

    Args:
        names: of a distributed module.
    """

    def translate(state: Mapping[str, torch.Tensor], module: nn.Module) -> Iterator[tuple[str, TensorOrFactory]]:
        for ours, made_of in _expand_layers(names(module), state):
            if to_hf and ours in state:
                for index, theirs in enumerate(made_of.names):
                    yield theirs, functools.partial(_split_weight, state, ours, made_of, index)
            elif not to_hf and all(each in state for each in made_of.names):
                yield ours, functools.partial(_joined_weight, state, made_of)

    return translate


def _split_weight(state: Mapping[str, torch.Tensor], ours: str, made_of: _Theirs, index: int) -> torch.Tensor:
    return made_of.cut(state[ours])[index]


def _joined_weight(state: Mapping[str, torch.Tensor], made_of: _Theirs) -> torch.Tensor:
    return made_of.join([state[each] for each in made_of.names])


def rename(
    state: dict[str, Any], names: Names, *, to_hf: bool, inside: str = "", dropped: Collection[str] = ()
) -> dict[str, Any]:
    """Translate a whole state dict, removing each tensor from `state` when it is done, to save memory.

    Tensors with unknown names keep them.

    Args:
        inside: translate what lies in modules of this name, at any depth; empty: everything.
        dropped: suffixes of names to leave out: masks that older versions of `transformers` keep as buffers.
    """
    result: dict[str, Any] = {}
    found = (re.search(rf"(^|\.){inside}\." if inside else "", key) for key in state)
    for prefix in sorted({match.string[: match.end()] for match in found if match}):
        part = {key.removeprefix(prefix): state.pop(key) for key in list(state) if key.startswith(prefix)}
        for ours, made_of in _expand_layers(names, part):
            if to_hf and ours in part:
                tensors = zip(made_of.names, made_of.cut(part.pop(ours)), strict=True)
                result.update({prefix + theirs: tensor for theirs, tensor in tensors})
            elif not to_hf and all(each in part for each in made_of.names):
                result[prefix + ours] = made_of.join([part.pop(each) for each in made_of.names])
        result.update({prefix + key: value for key, value in part.items() if not key.endswith(tuple(dropped))})
    result.update(state)
    state.clear()
    return result


def with_causal_masks(
    state: dict[str, Any], attention: str, max_seq_len: int | None, windows: Sequence[int | None] = (None,)
) -> dict[str, Any]:
    """Add to a state dict of theirs the causal masks that older versions keep as buffers.

    Args:
        attention: the name of a layer's attention, with `*` for the number of the layer.
        max_seq_len: of the model; None to add nothing.
        windows: how many positions the layers see, taken in turn; None for all.
    """
    if max_seq_len is None:
        return state
    for layer in range(_num_layers(state)):
        seen = torch.ones(max_seq_len, max_seq_len, dtype=torch.bool, device="cpu").tril()
        window = windows[layer % len(windows)]
        name = attention.replace("*", str(layer))
        state[f"{name}.bias"] = (seen if window is None else seen.triu(1 - window)).view(1, 1, max_seq_len, max_seq_len)
        state[f"{name}.masked_bias"] = torch.tensor(-1e9, device="cpu")
    return state


def _expand_layers(names: Names, state: Mapping[str, Any]) -> Iterator[tuple[str, _Theirs]]:
    """Yield the names, those with `*` once for each layer of `state`."""
    numbers = range(_num_layers(state))
    for ours, made_of in names.items():
        for layer in map(str, numbers if "*" in ours else [0]):
            theirs = tuple(each.replace("*", layer) for each in made_of.names)
            yield ours.replace("*", layer), replace(made_of, names=theirs)


def _num_layers(state: Mapping[str, Any]) -> int:
    """Return one more than the largest layer number in the names of a state dict."""
    numbers = [int(found.group(1)) for key in state if (found := _LAYER.search(key))]
    return max(numbers, default=-1) + 1
