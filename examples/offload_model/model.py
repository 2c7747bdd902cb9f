"""A language model over bytes, in plain PyTorch: an embedding, blocks, scores."""

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256  # the vocabulary


class Embedding(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(BYTES, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = max(1, width // 64)

    def forward(self, value: Tensor) -> Tensor:
        parts = self.mix(self.norms[0](value)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        value = value + self.out(attended.transpose(1, 2).flatten(2))
        return value + self.narrow(functional.gelu(self.wide(self.norms[1](value))))


def make_model(width: int, layers: int, length: int) -> nn.Sequential:
    return nn.Sequential(Embedding(width, length), *[Block(width) for _ in range(layers)], nn.Linear(width, BYTES))
