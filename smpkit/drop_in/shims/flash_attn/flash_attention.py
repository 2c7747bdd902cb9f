"""Attention as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smpkit.errors import UnsupportedError

from .bert_padding import pad_input, unpad_input
from .flash_attn_interface import flash_attn_unpadded_qkvpacked_func

__all__ = ["FlashAttention", "FlashMHA"]


class FlashAttention(nn.Module):
    """Attention of queries, keys and values in one tensor.

    Args:
        softmax_scale: what products are multiplied by; one over the root of the head size by default.
        attention_dropout: the share of probabilities to drop in training.
        device, dtype: of no importance: there are no weights.
    """

    def __init__(
        self, softmax_scale: float | None = None, attention_dropout: float = 0.0, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.dropout_p = attention_dropout

    def forward(
        self,
        qkv: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        causal: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        max_s: int | None = None,
        need_weights: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """Return the attention, of the shape of `qkv` without the 3, and None.

        Args:
            qkv: [batch, length, 3, heads, head size], or with `cu_seqlens` [tokens of all, 3, heads, head size].
            key_padding_mask: [batch, length], true for tokens and false for padding; there the result is zero.
            causal: let a token see those before it and itself.
            cu_seqlens: where each of the packed sequences begins, and where the last ends.
            max_s: of no importance here.
            need_weights: must be False.

        Raises:
            UnsupportedError: probabilities are asked for.
        """
        if need_weights:
            hint = "use torch.nn.MultiheadAttention"
            raise UnsupportedError("flash attention does not return probabilities", hint=hint)
        dropout = self.dropout_p if self.training else 0.0
        if cu_seqlens is not None:
            packed = flash_attn_unpadded_qkvpacked_func(
                qkv, cu_seqlens, max_s or 0, dropout, self.softmax_scale, causal
            )
            return packed, None
        mask = torch.ones(qkv.shape[:2], dtype=torch.bool, device=qkv.device)
        tokens, indices, starts, longest = unpad_input(qkv, mask if key_padding_mask is None else key_padding_mask)
        packed = flash_attn_unpadded_qkvpacked_func(tokens, starts, longest, dropout, self.softmax_scale, causal)
        return pad_input(packed, indices, *qkv.shape[:2]), None


class FlashMHA(nn.Module):
    """Multi-head attention of a sequence to itself, with its projections.

    Args:
        embed_dim: size of a token.
        num_heads: a divisor of it.
        bias: whether the projections have one.
        batch_first: must be True.
        attention_dropout: the share of probabilities to drop in training.
        causal: let a token see those before it and itself.
        use_rotary_emb: must be None.
        device, dtype: of the weights.

    Raises:
        UnsupportedError: another order of dimensions, or rotary embeddings.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        batch_first: bool = True,
        attention_dropout: float = 0.0,
        causal: bool = False,
        use_rotary_emb: str | None = None,
        device: Any = None,
        dtype: Any = None,
        **_: Any,
    ) -> None:
        if not batch_first or use_rotary_emb is not None:
            hint = "use batch_first=True and no use_rotary_emb, or FlashAttention"
            raise UnsupportedError("FlashMHA takes the batch first and knows no rotary embeddings here", hint=hint)
        super().__init__()
        self.embed_dim, self.num_heads, self.causal = embed_dim, num_heads, causal
        self.head_dim = embed_dim // num_heads
        self.Wqkv = nn.Linear(embed_dim, 3 * embed_dim, bias=bias, device=device, dtype=dtype)
        self.inner_attn = FlashAttention(attention_dropout=attention_dropout)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(
        self, x: torch.Tensor, key_padding_mask: torch.Tensor | None = None, need_weights: bool = False
    ) -> tuple[torch.Tensor, None]:
        """Return the projected attention of x, [batch, length, embed_dim], and None."""
        qkv = self.Wqkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        context, none = self.inner_attn(qkv, key_padding_mask, self.causal, need_weights=need_weights)
        return self.out_proj(context.flatten(-2)), none
