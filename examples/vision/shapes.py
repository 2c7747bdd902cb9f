"""Pictures of discs, squares and triangles, drawn when they are asked for: always the same for the same index."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

NAMES = ("disc", "square", "triangle")


class Shapes(Dataset[tuple[Tensor, int]]):
    """Noisy pictures `[3, size, size]` of one coloured shape somewhere, and which it is."""

    def __init__(self, count: int, seed: int, size: int = 32) -> None:
        self.count, self.seed, self.size = count, seed, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        kind = index % len(NAMES)
        place = torch.tensor([6, 11, 11]) + torch.tensor([4, 10, 10]) * torch.rand(3, generator=generator)
        radius, x, y = place.tolist()
        grid = torch.arange(self.size)
        across, down = grid[None, :] - x, grid[:, None] - y
        if kind == 0:
            inside = across**2 + down**2 < radius**2
        elif kind == 1:
            inside = torch.maximum(across.abs(), down.abs()) < radius * 0.9
        else:
            inside = (down.abs() < radius) & (across.abs() < (down + radius) / 2)
        colour = 0.5 + torch.rand(3, 1, 1, generator=generator)
        return inside * colour + 0.3 * torch.randn(3, self.size, self.size, generator=generator), kind
