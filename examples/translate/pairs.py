"""A file of pairs as a translation model reads them: bytes, as ByT5's tokenizer numbers them, and padding."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

PAD, END, SHIFT = 0, 1, 3
VOCABULARY = 384


def encode(text: str, length: int) -> Tensor:
    """Return the numbers of a text's bytes and the end, `[length]`, padded."""
    numbers = [*(byte + SHIFT for byte in text.encode()[: length - 1]), END]
    return torch.tensor(numbers + [PAD] * (length - len(numbers)))


def decode(numbers: Tensor) -> str:
    text = bytes(number - SHIFT for number in numbers.tolist() if SHIFT <= number < 256 + SHIFT)
    return text.decode(errors="replace")


class Pairs(Dataset[tuple[Tensor, ...]]):
    """What T5 takes: the source, where it is not padding, and the target, -100 where that has ended."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self.pairs = pairs
        self.lengths = [1 + max(len(pair[side].encode()) for pair in pairs) for side in (0, 1)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        source, target = (encode(text, length) for text, length in zip(self.pairs[index], self.lengths, strict=True))
        return source, (source != PAD).long(), target.masked_fill(target == PAD, -100)


def read(file: Path) -> list[tuple[str, str]]:
    """Return the pairs of a file: a source, a tab and a target per line."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [(source, target) for source, _, target in (line.partition("\t") for line in lines)]
