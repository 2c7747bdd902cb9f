"""A Llama for long sequences: the loss never holds the scores of all tokens at once."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp


@dataclass(frozen=True)
class Shape:
    """By default that of TinyLlama, 1.1 billion parameters."""

    width: int = 2048
    inner: int = 5632
    layers: int = 22
    heads: int = 32
    key_heads: int = 4
    vocabulary: int = 32_000


class Layer(nn.Module):
    """Grouped-query attention and a gated MLP, each on a residual; `[batch, sequence, width]`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size, keys = shape.width // shape.heads, shape.width // shape.heads * shape.key_heads
        self.norms = nn.ModuleList([nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)])
        self.queries, self.out = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.keys, self.values = (nn.Linear(shape.width, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.queries, self.keys, self.values)
        )
        seen = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def turned(heads: Tensor) -> Tensor:
    """Turn pairs of `[batch, heads, sequence, size]` by angles that grow with the place in the sequence (RoPE)."""
    places = torch.arange(heads.shape[-2], device=heads.device)
    rates = 500_000.0 ** (-torch.arange(0, heads.shape[-1], 2, device=heads.device) / heads.shape[-1])
    angles = places[:, None] * rates
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Head(nn.Module):
    """The scores of some tokens, and the sum of their losses."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.width)
        self.scores = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(self.norm(hidden)).float(), targets, reduction="sum")


class LongLlama(nn.Module):
    """Takes tokens `[batch, sequence + 1]` and returns the mean loss of the next ones.

    32,768 tokens × 32,000 scores are 4 GiB in float32, and their softmax and gradient as much again. So the head takes
    `chunk` tokens at a time, and is computed again in backward.
    """

    def __init__(self, shape: Shape, recompute: bool = True, chunk: int = 2048) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.Sequential(*(Layer(shape) for _ in range(shape.layers)))
        self.head = Head(shape)
        self.chunk = chunk
        if recompute:
            smp.set_activation_checkpointing(self.layers, strategy="each")

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(tokens[:, :-1])).flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        parts = zip(hidden.split(self.chunk), targets.split(self.chunk), strict=True)
        return torch.stack([smp.checkpoint(self.head, *part) for part in parts]).sum() / len(targets)


SMALL = Shape(width=256, inner=704, layers=8, heads=8, key_heads=2, vocabulary=256)
"""For a CPU, over bytes."""


# --- what `smpkit plan --model model:NAME` looks at: a model, and one sequence ----------------------------------------


def large(recompute: bool = True) -> tuple[LongLlama, Tensor]:
    return LongLlama(Shape(), recompute), torch.zeros(1, 32_769, dtype=torch.long)


def large_kept() -> tuple[LongLlama, Tensor]:
    return large(recompute=False)


def small(recompute: bool = True) -> tuple[LongLlama, Tensor]:
    return LongLlama(SMALL, recompute), torch.zeros(1, 8193, dtype=torch.long)


def small_kept() -> tuple[LongLlama, Tensor]:
    return small(recompute=False)
