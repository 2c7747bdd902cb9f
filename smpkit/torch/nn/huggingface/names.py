"""How the state dicts of Hugging Face models and of the modules that replace them correspond.

A list of `WeightMapping` describes one family: which tensors of ours and of theirs are the same, transposed, or packed
into one. `translation` applies it lazily, weight by weight, when a model is replaced; `rename` applies it to a whole
state dict, for the functions that scripts call.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from smpkit.torch.tensor_parallel.registry import TensorOrFactory, Translation

__all__ = [
    "WeightMapping",
    "heads",
    "packed",
    "rename",
    "rename_inside",
    "same",
    "translation",
    "transposed",
    "with_causal_masks",
]

_LAYER: Final = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True)
class WeightMapping:
    """One tensor of ours, and the tensors of theirs that it is made of; `*` stands for the number of the layer."""

    ours: str
    theirs: tuple[str, ...]
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    cut: Callable[[torch.Tensor], Sequence[torch.Tensor]]


# --- kinds of layers --------------------------------------------------------------------------------------------------


def same(ours: str, theirs: str) -> list[WeightMapping]:
    """Map a layer whose weight and bias are the same tensors in both."""
    return [WeightMapping(f"{ours}.{part}", (f"{theirs}.{part}",), _first, _as_list) for part in ("weight", "bias")]


def transposed(ours: str, theirs: str) -> list[WeightMapping]:
    """Map a linear layer whose weight is (in, out) there: GPT-2's `Conv1D`."""
    weight = WeightMapping(
        f"{ours}.weight", (f"{theirs}.weight",), lambda each: each[0].t(), lambda each: [each.t().contiguous()]
    )
    return [weight, WeightMapping(f"{ours}.bias", (f"{theirs}.bias",), _first, _as_list)]


def packed(ours: str, theirs: Sequence[str]) -> list[WeightMapping]:
    """Map linear layers of theirs to one of ours, whose weights are concatenated along the output features."""
    count = len(theirs)
    return [
        WeightMapping(
            f"{ours}.{part}", tuple(f"{each}.{part}" for each in theirs), _concat, lambda each: _chunks(each, count)
        )
        for part in ("weight", "bias")
    ]


def heads(ours: str, theirs: str, num_heads: int) -> list[WeightMapping]:
    """Map a projection whose rows are query, key and value of each head in turn there.

    Ours has all queries, then all keys, then all values: (heads, 3, head size, ...) <-> (3, heads, head size, ...).
    """

    def heads_to_kinds(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = tensors[0]
        return whole.view(num_heads, 3, -1, *whole.shape[1:]).transpose(0, 1).reshape(whole.shape)

    def kinds_to_heads(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return [tensor.view(3, num_heads, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)]

    return [
        WeightMapping(f"{ours}.{part}", (f"{theirs}.{part}",), heads_to_kinds, kinds_to_heads)
        for part in ("weight", "bias")
    ]


def _first(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


def _concat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(tensors))


def _as_list(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return [tensor]


def _chunks(tensor: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    return [each.clone() for each in tensor.chunk(count)]


# --- translations -----------------------------------------------------------------------------------------------------


def translation(names: Callable[[nn.Module], Sequence[WeightMapping]], *, to_hf: bool) -> Translation:
    """Return how state dicts are translated when a module is replaced, or back.

    Args:
        names: of a distributed module.
    """

    def translate(state: Mapping[str, torch.Tensor], module: nn.Module) -> Iterator[tuple[str, TensorOrFactory]]:
        for name in _expand_layers(names(module), state):
            if to_hf and name.ours in state:
                for index, theirs in enumerate(name.theirs):
                    yield theirs, functools.partial(_split_weight, state, name, index)
            elif not to_hf and all(each in state for each in name.theirs):
                yield name.ours, functools.partial(_joined_weight, state, name)

    return translate


def _split_weight(state: Mapping[str, torch.Tensor], name: WeightMapping, index: int) -> torch.Tensor:
    return name.cut(state[name.ours])[index]


def _joined_weight(state: Mapping[str, torch.Tensor], name: WeightMapping) -> torch.Tensor:
    return name.join([state[each] for each in name.theirs])


def rename(
    state: dict[str, Any],
    names: Sequence[WeightMapping],
    *,
    to_hf: bool,
    dropped: Collection[str] = (),
    tied: bool = False,
) -> dict[str, Any]:
    """Translate a whole state dict, removing each tensor from `state` when it is done, to save memory.

    Tensors with unknown names keep them.

    Args:
        dropped: suffixes of names to leave out: masks that older versions of `transformers` keep as buffers.
        tied: the head is the word embedding, if the state dict has no head.
    """
    result: dict[str, Any] = {}
    for name in _expand_layers(names, state):
        if to_hf and name.ours in state:
            result.update(zip(name.theirs, name.cut(state.pop(name.ours)), strict=True))
        elif not to_hf and all(each in state for each in name.theirs):
            result[name.ours] = name.join([state.pop(each) for each in name.theirs])
    if tied and "word_embedding.weight" in result:
        result.setdefault("lm_head.weight", result["word_embedding.weight"])
    rest = {key: value for key, value in state.items() if not key.endswith(tuple(dropped))}
    state.clear()
    return {**result, **rest}


def rename_inside(state: dict[str, Any], names: Sequence[WeightMapping], inside: str, *, to_hf: bool) -> dict[str, Any]:
    """Translate the parts of a state dict that lie in modules named `inside`, at any depth."""
    result: dict[str, Any] = {}
    prefixes: set[str] = set()
    for key in state:
        found = re.search(rf"(^|\.){inside}\.", key)
        if found:
            prefixes.add(key[: found.end()])
    for prefix in sorted(prefixes):
        part = {key.removeprefix(prefix): state.pop(key) for key in list(state) if key.startswith(prefix)}
        result.update({prefix + key: value for key, value in rename(part, names, to_hf=to_hf).items()})
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


def _expand_layers(names: Sequence[WeightMapping], state: Mapping[str, Any]) -> Iterator[WeightMapping]:
    """Yield the mappings, those with `*` once for each layer of `state`."""
    count = _num_layers(state)
    for name in names:
        if "*" not in name.ours:
            yield name
            continue
        for layer in map(str, range(count)):
            theirs = tuple(each.replace("*", layer) for each in name.theirs)
            yield WeightMapping(name.ours.replace("*", layer), theirs, name.join, name.cut)


def _num_layers(state: Mapping[str, Any]) -> int:
    """Return one more than the largest layer number in the names of a state dict."""
    numbers = [int(found.group(1)) for key in state if (found := _LAYER.search(key))]
    return max(numbers, default=-1) + 1
