"""Transformers in plain PyTorch, on the whole state dict of our modules: what the distributed ones must equal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

State = Mapping[str, Tensor]
Sizes = Mapping[str, Any]
Other = tuple[Tensor | None, Tensor | None]
"""The states of an encoder, and the mask that is added to their scores."""


def below(state: State, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))


def norm(state: State, name: str, x: Tensor) -> Tensor:
    weight = state.get(f"{name}.weight")
    return x if weight is None else F.layer_norm(x, weight.shape, weight, state[f"{name}.bias"])


def rotate(x: Tensor, dim: int) -> Tensor:
    """Turn each pair of features as a complex number."""
    length = x.shape[-2]
    # In float32 and multiplied in this order, as the models do that we follow.
    angles = torch.arange(length).float()[:, None] * (1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)))
    turn = torch.complex(angles.cos().double(), angles.sin().double())
    pairs = x[..., :dim].unflatten(-1, (-1, 2)).contiguous()
    turned = torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2)
    return torch.cat([turned, x[..., dim:]], -1)


def attend(state: State, x: Tensor, states: Tensor | None, mask: Tensor | None, sizes: Sizes) -> Tensor:
    heads, causal = sizes["num_attention_heads"], sizes.get("causal_mask_size") is not None and states is None
    if states is None:
        query, key, value = linear(state, "query_key_value", x).chunk(3, -1)
    else:
        query, (key, value) = linear(state, "query", x), linear(state, "key_value", states).chunk(2, -1)
    query, key, value = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (query, key, value))
    if sizes.get("rotary_dim"):
        query, key = (rotate(each, sizes["rotary_dim"]) for each in (query, key))
    scores = query @ key.transpose(-1, -2)
    if sizes.get("scale_attention_scores", True):
        scores = scores / math.sqrt(query.shape[-1])
    steps = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])[None, :]
    if sizes.get("use_alibi"):
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]).double()
        scores = scores - slopes[:, None, None] * steps.abs()
    if causal:
        scores = scores.masked_fill(steps < 0, -math.inf)
    if sizes.get("window_size"):
        scores = scores.masked_fill(steps >= sizes["window_size"], -math.inf)
    if mask is not None:
        scores = scores + mask
    return linear(state, "dense", (scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def attention(state: State, x: Tensor, states: Tensor | None, mask: Tensor | None, sizes: Sizes) -> Tensor:
    return norm(state, "layernorm", x + attend(state, norm(state, "pre_layernorm", x), states, mask, sizes))


def mlp(state: State, x: Tensor, sizes: Sizes) -> Tensor:
    x = linear(state, "dense1", x)
    return linear(state, "dense2", F.relu(x) if sizes.get("activation") == "relu" else F.gelu(x))


def output(state: State, x: Tensor, sizes: Sizes) -> Tensor:
    return norm(state, "layernorm", x + mlp(state, norm(state, "pre_layernorm", x), sizes))


def layer(state: State, x: Tensor, mask: Tensor | None, other: Other, sizes: Sizes) -> Tensor:
    ours, last = below(state, "attention."), below(state, "output.")
    if sizes.get("parallel_residual"):
        normal = norm(ours, "pre_layernorm", x)
        return x + attend(ours, normal, None, mask, sizes) + mlp(last, normal, sizes)
    x = attention(ours, x, None, mask, sizes)
    if other[0] is not None:
        x = attention(below(state, "cross_attention."), x, *other, sizes)
    return output(last, x, sizes)


def transformer(state: State, x: Tensor, mask: Tensor | None, other: Other, sizes: Sizes) -> Tensor:
    x = norm(state, "input_layernorm", x)
    for index in range(sizes["num_layers"]):
        own = dict(sizes)
        if "window_sizes" in sizes:
            own["window_size"] = sizes["window_sizes"][index]
        x = layer(below(state, f"seq_layers.{index}."), x, mask, other, own)
    return norm(state, "layernorm", x)


def added(kept: Tensor | None) -> Tensor | None:
    return None if kept is None else (1 - kept[:, None, None].double()) * torch.finfo(torch.float64).min


def language_model(state: State, inputs: tuple[Tensor | None, ...], sizes: Sizes) -> Any:
    ids, mask, types, positions = inputs[:4]
    assert ids is not None
    states, cross_mask = inputs[4:6] if sizes.get("add_cross_attention") else (None, None)
    labels = inputs[-1]
    x = F.embedding(ids, state["word_embedding.weight"])
    if "position_embedding.weight" in state:
        at = torch.arange(ids.shape[1])[None] if positions is None else positions
        x = x + F.embedding(at, state["position_embedding.weight"])
    if "token_type_embedding.weight" in state:
        x = x + F.embedding(torch.zeros_like(ids) if types is None else types, state["token_type_embedding.weight"])
    x = norm(state, "embedding_layernorm", x)
    x = transformer(below(state, "transformer."), x, added(mask), (states, added(cross_mask)), sizes)
    x = norm(state, "layernorm", x)
    if not sizes.get("add_lm_head", True):
        return x
    logits = F.linear(x, state.get("lm_head.weight", state["word_embedding.weight"]), state.get("lm_head.bias"))
    if labels is None:
        return logits
    if sizes.get("causal_mask_size") is not None:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits
