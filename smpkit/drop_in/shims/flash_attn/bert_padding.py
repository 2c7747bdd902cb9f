"""Between padded batches and packed sequences."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["index_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:  # noqa: A002
    """Return the rows of `input` with these numbers."""
    return input[indices]


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return the tokens that the mask keeps, their numbers, where sequences begin, and the longest length.

    Args:
        hidden_states: [batch, length, ...].
        attention_mask: [batch, length], true for tokens and false for padding.
    """
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    starts = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, starts, int(lengths.max())


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Return what `unpad_input` took apart, [batch, seqlen, ...], with zeros as padding."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
