"""A small GPT in plain PyTorch: nothing in this file knows about smpkit."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # tokens are bytes, so any text is its own tokenizer


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    context: int = 64
    width: int = 128
    heads: int = 4
    layers: int = 4


class Block(nn.Module):
    """Attention and a feed-forward network, each on a normalised residual stream `[batch, time, width]`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.merge = nn.Linear(shape.width, shape.width, bias=False)
        self.norm2 = nn.LayerNorm(shape.width)
        self.grow = nn.Linear(shape.width, 4 * shape.width)
        self.shrink = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, time, width))
        hidden = functional.gelu(self.grow(self.norm2(x)))
        return x + self.shrink(hidden)


class GPT(nn.Module):
    """Bytes `[batch, time]` in, scores of the next byte `[batch, time, 256]` out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
