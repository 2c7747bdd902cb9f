"""How attention knows of positions: rotation, penalties of distance, what may be seen."""

from __future__ import annotations

import math

import torch

__all__ = ["alibi_slopes", "apply_rotary", "relative_positions", "visibility_bias"]


def relative_positions(length: int, key_length: int, device: torch.device) -> torch.Tensor:
    """Return (length, key_length): how far before a query each key is; the last of both are at the same position."""
    queries = torch.arange(key_length - length, key_length, device=device)
    return queries.unsqueeze(1) - torch.arange(key_length, device=device).unsqueeze(0)


def visibility_bias(distance: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return what is added to scores so that positions see the last `window` up to their own; None for all of these."""
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)


def alibi_slopes(num_heads: int, bias_max: float, device: torch.device) -> torch.Tensor:
    """Return the penalty per distance of every head (Press, Smith, Lewis 2022), in float32.

    Slopes are 2 ** (-bias_max * k / n) for head k of n, n the next power of two; of more than there are heads, first
    every second one is taken, then those between.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = torch.exp2(-(torch.arange(1, power + 1, device=device, dtype=torch.float32) * (bias_max / power)))
    if power == num_heads:
        return slopes
    return torch.cat([slopes[1::2], slopes[0::2]])[:num_heads]


def apply_rotary(
    x: torch.Tensor, rotary_dim: int, base: float, positions: torch.Tensor | None = None, *, interleaved: bool
) -> torch.Tensor:
    """Return queries or keys (batch, heads, length, head size), their first features rotated by their positions.

    Angles are computed in float32, as the models do that were trained with them.

    Args:
        positions: (batch, length), or (1, length) for all samples; None: 0, 1, 2, ...
    """
    rotated_part, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    exponents = torch.arange(0, rotary_dim, 2, device=x.device, dtype=torch.int64).float() / rotary_dim
    if positions is None:
        positions = torch.arange(x.shape[2], device=x.device).unsqueeze(0)
    angles = (positions.float().unsqueeze(-1) * (1.0 / (base**exponents))).unsqueeze(1)  # for all heads
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if interleaved:
        even, odd = rotated_part[..., 0::2], rotated_part[..., 1::2]
        rotated_part = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    else:
        first, second = rotated_part.chunk(2, -1)
        rotated_part = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([rotated_part, rest], -1) if rest.shape[-1] else rotated_part
