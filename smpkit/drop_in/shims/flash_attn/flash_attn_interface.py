"""Attention over packed sequences of different lengths."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional

from smpkit.errors import UnsupportedError, UsageError

__all__ = ["flash_attn_unpadded_func", "flash_attn_unpadded_kvpacked_func", "flash_attn_unpadded_qkvpacked_func"]


def flash_attn_unpadded_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> torch.Tensor:
    """Return the attention of each sequence to itself, [tokens of all, heads, head size].

    Args:
        q, k, v: the sequences one after the other, [tokens of all, heads, head size].
        cu_seqlens_q, cu_seqlens_k: where each begins, and where the last ends, [sequences + 1].
        max_seqlen_q, max_seqlen_k, deterministic: of no importance here.
        dropout_p: the share of probabilities to drop.
        softmax_scale: what products are multiplied by; one over the root of the head size by default.
        causal: let token i of `q` see tokens 0 to i of `k`.
        return_attn_probs: must be False.

    Raises:
        UnsupportedError: probabilities are asked for.
        UsageError: the places do not fit the tokens.
    """
    if return_attn_probs:
        hint = "compute them from q and k, as that flag is for tests only"
        raise UnsupportedError("flash attention on torch does not return probabilities", hint=hint)
    starts_q, starts_k = _starts(cu_seqlens_q, q, "cu_seqlens_q"), _starts(cu_seqlens_k, k, "cu_seqlens_k")
    if len(starts_q) != len(starts_k):
        raise UsageError(f"cu_seqlens_q has {len(starts_q) - 1} sequences and cu_seqlens_k {len(starts_k) - 1}")
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": softmax_scale, "is_causal": causal}
    lengths_q, lengths_k = _lengths(starts_q), _lengths(starts_k)
    if lengths_q and len(set(lengths_q)) == len(set(lengths_k)) == 1 and lengths_k[0]:
        parts = (each.unflatten(0, (len(lengths_q), -1)) for each in (q, k, v))
        attended = functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in parts), **options)
        return attended.transpose(1, 2).flatten(0, 1)
    results = []
    for each_q, each_k, each_v in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True):
        parts = (each.transpose(0, 1).unsqueeze(0) for each in (each_q, each_k, each_v))
        attended = functional.scaled_dot_product_attention(*parts, **options)
        results.append(attended.squeeze(0).transpose(0, 1))
    return torch.cat(results) if results else torch.zeros_like(q)


def flash_attn_unpadded_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> torch.Tensor:
    """As `flash_attn_unpadded_func`, with keys and values in one tensor, [tokens of all, 2, heads, head size]."""
    k, v = kv.unbind(1)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_unpadded_func(q, k, v, *lengths, dropout_p, softmax_scale, causal, return_attn_probs)


def flash_attn_unpadded_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> torch.Tensor:
    """As `flash_attn_unpadded_func`, with all three in one tensor, [tokens of all, 3, heads, head size]."""
    q, k, v = qkv.unbind(1)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_unpadded_func(q, k, v, *lengths, dropout_p, softmax_scale, causal, return_attn_probs)


def _starts(given: torch.Tensor, tokens: torch.Tensor, name: str) -> list[int]:
    starts: list[int] = given.tolist()
    if not starts or starts[0] != 0 or starts[-1] != len(tokens) or min(_lengths(starts), default=0) < 0:
        raise UsageError(f"{name} must rise from 0 to the number of tokens, {len(tokens)}, got {starts[:8]}")
    return starts


def _lengths(starts: list[int]) -> list[int]:
    return [end - start for start, end in itertools.pairwise(starts)]
