"""`FlashAttention`, on torch's `scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smpkit.drop_in.removed_names import announce
from smpkit.errors import UnsupportedError

__all__ = ["FlashAttention"]

announce("flash_attn")


class FlashAttention(nn.Module):
    """Attention of queries, keys and values in one tensor, without masks."""

    def __init__(
        self, softmax_scale: float | None = None, attention_dropout: float = 0.0, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.softmax_scale, self.dropout_p = softmax_scale, attention_dropout

    def forward(
        self, qkv: torch.Tensor, key_padding_mask: torch.Tensor | None = None, causal: bool = False, **others: Any
    ) -> tuple[torch.Tensor, None]:
        """Return attention [batch, length, heads, head size] of [batch, length, 3, heads, head size], and None."""
        for name, value in {"key_padding_mask": key_padding_mask, **others}.items():
            if value is not None and value is not False:
                raise UnsupportedError(
                    f"smpkit's stand-in for FlashAttention takes no `{name}`",
                    hint="call torch.nn.functional.scaled_dot_product_attention",
                )
        query, key, value = qkv.transpose(1, 3).unbind(2)  # each [batch, heads, length, head size]
        dropout = self.dropout_p if self.training else 0.0
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, scale=self.softmax_scale
        )
        return output.transpose(1, 2), None
