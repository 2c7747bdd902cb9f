"""The task: six digits, a mark, and the same digits in order, upwards or downwards."""

from __future__ import annotations

import torch
from torch import Tensor

DIGITS, MARK, VOCABULARY = 6, 10, 12
IGNORED = -100  # labels that transformers leaves out of the loss


def draw(count: int, generator: torch.Generator, *, downwards: bool) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, each `[count, 2 × DIGITS + 1]`; only the answer has labels."""
    question = torch.randint(10, (count, DIGITS), generator=generator)
    answer = question.sort(dim=1, descending=downwards).values
    tokens = torch.cat([question, torch.full((count, 1), MARK), answer], dim=1)
    labels = tokens.clone()
    labels[:, : DIGITS + 1] = IGNORED
    return tokens, labels


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return which share of the answers' digits is right, each given those before it."""
    return (logits[:, DIGITS:-1].argmax(-1) == labels[:, DIGITS + 1 :]).float().mean()
