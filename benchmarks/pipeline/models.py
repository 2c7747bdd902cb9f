"""What is run through the pipelines: layers that sleep instead of computing, and a small GPT that computes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FORWARD_SECONDS = 0.020
BACKWARD_SECONDS = 0.040
_AWAKE_SECONDS = 0.0005


def rest(seconds: float) -> None:
    """Take as long as said: a sleep ends when the kernel gets to it, so the last of it is waited for awake."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - _AWAKE_SECONDS))
    while time.perf_counter() < end:
        pass


class _OnWay(torch.autograd.Function):
    """Sleeps in forward, and in the half of backward that makes the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        rest(forward_seconds)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rest(ctx.seconds)
        return gradient, None, None


class _ForWeight(torch.autograd.Function):
    """Hands a weight on, and sleeps in the half of backward that makes its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        rest(ctx.seconds)
        return gradient, None


def sleep(value: Tensor, weight: Tensor, forward_seconds: float, half_seconds: float) -> Tensor:
    """Sleep in forward, and in backward once for the gradient of the value and once for that of the weight."""
    way: Tensor = _OnWay.apply(value, forward_seconds, half_seconds)
    # An operation of torch's, whose backward both libraries can run in two halves.
    return way * _ForWeight.apply(weight, half_seconds)


class SleepLayer(nn.Module):
    """Part of a stage: it makes a value of `num_floats` from a small input, or hands such a value on."""

    def __init__(self, num_floats: int, part: float = 1.0) -> None:
        super().__init__()
        self.num_floats, self.part = num_floats, part
        self.weight = nn.Parameter(torch.ones(1, 1))  # a matrix: gradients of vectors are not worth a second half

    def forward(self, value: Tensor) -> Tensor:
        if value.shape[-1] != self.num_floats:
            value = value.new_zeros(1, self.num_floats)
        return sleep(value, self.weight, self.part * FORWARD_SECONDS, self.part * BACKWARD_SECONDS / 2)


class Scale(nn.Module):
    """As little work as a layer with a weight can do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight


def sleep_loss(output: Tensor, _target: Tensor) -> Tensor:
    """Touch all of the output, as a loss does."""
    return output.mean()


@dataclass(frozen=True)
class GPTSize:
    """The GPT and its batch."""

    vocabulary: int = 4096
    context: int = 128
    width: int = 256
    num_layers: int = 8
    num_heads: int = 4
    num_microbatches: int = 8
    microbatch_size: int = 2


TINY = GPTSize(64, 16, 32, num_layers=6, num_heads=2, num_microbatches=4)
ON_A_GPU = GPTSize(32_768, 1024, 1024, num_layers=16, num_heads=16, microbatch_size=4)
"""Enough for a microbatch to take longer than the launches of its kernels."""


class Embedding(nn.Module):
    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places.weight[: tokens.shape[1]]


class Block(nn.Module):
    """A transformer layer: normalise, attend, normalise, multiply."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.before_attention = nn.LayerNorm(size.width)
        self.attention = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.before_mlp = nn.LayerNorm(size.width)
        self.grow = nn.Linear(size.width, 4 * size.width)
        self.shrink = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self._attend(self.attention(self.before_attention(x))))
        return x + self.shrink(functional.gelu(self.grow(self.before_mlp(x))))

    def _attend(self, mixed: Tensor) -> Tensor:
        batch, context, width = mixed.shape[0], mixed.shape[1], mixed.shape[2] // 3
        parts = mixed.view(batch, context, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return attended.transpose(1, 2).reshape(batch, context, width)


class Head(nn.Module):
    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.logits = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def gpt(size: GPTSize) -> nn.Sequential:
    """Build the GPT as a list of layers, the form that every contestant can cut; the same weights each time."""
    torch.manual_seed(11)
    return nn.Sequential(Embedding(size), *[Block(size) for _ in range(size.num_layers)], Head(size))


def gpt_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt_batch(size: GPTSize) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (size.num_microbatches * size.microbatch_size, size.context + 1)
    tokens = torch.randint(size.vocabulary, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def cut(num_layers: int, num_chunks: int) -> list[range]:
    """Cut a GPT's layers (with embedding and head) into contiguous chunks; the head counts as a layer and a half.

    In two chunks of nine: embedding and five blocks, three blocks and the head.
    """
    costs = [0.0, *[1.0] * num_layers, 1.5]
    middles = [end - cost / 2 for end, cost in zip(accumulate(costs), costs, strict=True)]
    ends = [sum(middle <= sum(costs) * (chunk + 1) / num_chunks for middle in middles) for chunk in range(num_chunks)]
    return [range(start, end) for start, end in pairwise([0, *ends])]
