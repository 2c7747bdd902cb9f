"""Attention with its heads divided over the tensor-parallel ranks.

Each rank computes an equal share of the heads for all samples of the group: the weights of query, key and value are
divided by output features, that of the dense layer by input features, so one sum between ranks ends the block.

Shapes, with B samples of the group, L positions of queries and K of keys (the same, but for cross attention), H for
`hidden_size`, N heads of this rank (`num_attention_heads / tp_size`) of D features (`attention_head_size`)::

    hidden            [B, L, H]     outside of the block the part that the layout says (layouts.py)
    query             [B, N, L, D]
    key, value        [B, N, K, D]
    scores and mask   [B, N, L, K]  a mask may have 1 for B, N and L
    attended          [B, N, L, D], for the dense layer [B, L, N * D]
    output            [B, L, H]     again the part that the layout says
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from smpkit.errors import UsageError
from smpkit.torch.core.arguments import check_probability
from smpkit.torch.core.runtime import state
from smpkit.torch.tensor_parallel.dropout import ParallelDropout, tp_rng
from smpkit.torch.tensor_parallel.layers.config import OPTIONS, TransformerConfig, config_of
from smpkit.torch.tensor_parallel.layers.norms import optional_layernorm
from smpkit.torch.tensor_parallel.layouts import Layout, check_divisible, gather_indices
from smpkit.torch.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from smpkit.torch.tensor_parallel.module import DistributedModule


class DistributedAttentionLayer(DistributedModule):
    """Attention with dropout, residual and layer norm, its heads divided (the class of that name in SMP v1).

    `layernorm(x + dropout(dense(attention(pre_layernorm(x)))))`, with the norms that are asked for.

    Args:
        config: a TransformerConfig, or its fields in SMP v1's order or by name.
        cross_attention: queries come from the input, keys and values from `cross_states`.
        boundary: what comes in and goes out.

    Raises:
        ConfigError: the ranks do not divide the heads, or neither layer norm is asked for.
    """

    options = OPTIONS

    def __init__(
        self,
        num_attention_heads: int | TransformerConfig = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-05,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        boundary: Layout | None = None,
        **options: Any,
    ) -> None:
        config = config_of(type(self), locals(), options)
        super().__init__(boundary=boundary)
        check_divisible("num_attention_heads", config.num_attention_heads)
        self.config = config
        self.cross_attention = cross_attention
        self._make_linears(config)
        self.attention = FlashAttentionLayer(
            config.attention_dropout_prob,
            config.attention_head_size,
            config.scale_attention_scores,
            config.scale_attn_by_layer_idx,
            config.layer_idx,
        )
        self.dropout = ParallelDropout(config.hidden_dropout_prob, self.boundary)
        self.pre_layernorm = optional_layernorm(config.pre_layernorm, config, self.boundary)
        self.layernorm = optional_layernorm(config.post_layernorm, config, self.boundary)

    def _make_linears(self, config: TransformerConfig) -> None:
        hidden, width = config.hidden_size, config.num_attention_heads * config.attention_head_size
        bias = config.query_key_value_bias
        options: dict[str, Any] = {"initializer_range": config.weight_deviation}
        if self.cross_attention:
            # Other states are of another length, which need not divide: they stay whole where sequences are divided.
            of_states = Layout.REPLICATE if self.boundary is Layout.SHARD_SEQUENCE else self.boundary
            self.query = ColumnParallelLinear(hidden, width, bias, boundary=self.boundary, **options)
            self.key_value = ColumnParallelLinear(
                hidden, 2 * width, bias, parts=(width,) * 2, boundary=of_states, **options
            )
        else:
            self.query_key_value = ColumnParallelLinear(
                hidden, 3 * width, bias, parts=(width,) * 3, boundary=self.boundary, **options
            )
        self.dense = RowParallelLinear(width, hidden, config.attention_dense_bias, boundary=self.boundary, **options)

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        """Return hidden states like those that come in.

        Args:
            inputs: `(hidden_states, attention_mask)`, or with `cross_attention` `(hidden_states, cross_states,
                attention_mask)`. States are (batch, length, hidden_size). Masks are added to the scores, or True where
                positions may be attended to; they are None or broadcast to (batch, heads, length, length), with all
                heads or those of this rank: (batch, 1, 1, length) as a rule. Where positions rotate queries and keys,
                they may come third: (batch, length), or (1, length); else they are 0, 1, 2, ...
        """
        names = ("hidden_states", *(("cross_states",) if self.cross_attention else ()), "attention_mask")
        parts = unpack_tuple(type(self).__name__, inputs, names, rotates=bool(self.config.rotary_dim))
        hidden: torch.Tensor = parts.pop("hidden_states")
        normal = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        output: torch.Tensor = hidden + self.dropout(self.dense(self.attended(normal, **parts)))
        return output if self.layernorm is None else self.layernorm(output)

    def attended(
        self,
        hidden: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None,
        cross_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        entered: bool = False,
    ) -> torch.Tensor:
        """Return what this rank's heads have attended to in all samples of the group: what `dense` takes.

        Args:
            hidden: (batch, length, hidden_size), where queries come from.
            attention_mask, position_ids: see `forward`.
            cross_states: (batch, key length, hidden_size), where keys and values come from in cross attention.
            entered: `hidden` is that of all samples already.
        """
        query, key, value = self._heads(hidden, cross_states, entered=entered)
        dtype, length, config = query.dtype, query.shape[2], self.config
        if config.causal_mask_size is not None and length > config.causal_mask_size:
            raise UsageError(
                f"a sequence of {length} is longer than causal_mask_size {config.causal_mask_size}",
                hint="make the layer with a larger causal_mask_size, or truncate",
            )
        if config.rotary_dim:  # before the cast below: the rotation keeps the dtype of its input
            if position_ids is not None:
                position_ids = gather_mask(position_ids, query.shape[0], self.boundary)
            query, key = (rotated(heads, config.rotary_dim, config.rotary_base, position_ids) for heads in (query, key))
        if config.attention_in_fp32 and dtype.itemsize < 4:
            query, key, value = query.float(), key.float(), value.float()
        bias, causal = self._bias(query, key, attention_mask)
        attended = self.attention.attend(query, key, value, bias, causal=causal).to(dtype)
        return attended.transpose(1, 2).flatten(2)  # of [B, L, N, D]

    def _heads(
        self, hidden: torch.Tensor, states: torch.Tensor | None, *, entered: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value (batch, heads of this rank, length, head size) of all samples."""
        if states is None:
            linear = self.query_key_value
            packed = linear.project(hidden) if entered else linear(hidden)
            # [B, L, 3 * N * D] -> three of [B, N, L, D]: each of the packed weights is divided by itself, so the
            # features of this rank are its heads' queries, then their keys, then their values.
            query, key, value = packed.unflatten(-1, (3, -1, self.config.attention_head_size)).permute(2, 0, 3, 1, 4)
            return query, key, value
        query = self.query(hidden).unflatten(-1, (-1, self.config.attention_head_size)).transpose(1, 2)
        packed = self.key_value(states)  # [B, K, 2 * N * D]
        key, value = packed.unflatten(-1, (2, -1, self.config.attention_head_size)).permute(2, 0, 3, 1, 4)
        return query, key, value

    def _bias(
        self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, bool]:
        """Return the tensor to add to the scores, and whether to apply a causal mask as well."""
        config, causal = self.config, self.config.causal_mask_size is not None
        if mask is not None:
            mask = gather_mask(additive_mask(mask, query.dtype), query.shape[0], self.boundary)
            if state.tp_size > 1 and mask.dim() == 4 and mask.shape[1] == config.num_attention_heads > 1:
                mask = mask.tensor_split(state.tp_size, dim=1)[state.tp_rank]
            if config.masks_are_whole and mask.shape[-2] == query.shape[2]:
                causal = False
        if not config.use_alibi and config.window_size is None:
            return mask, causal
        distance = relative_positions(query.shape[2], key.shape[2], query.device)
        window = config.window_size
        bias = visibility_bias(distance, window, query.dtype) if causal or window else query.new_zeros(())
        if config.use_alibi:
            slopes = alibi_slopes(config.num_attention_heads, config.alibi_bias_max, query.device)
            # Slopes are those of the head's number in the whole layer: each rank takes those of its own heads.
            own_slopes = slopes.tensor_split(state.tp_size)[state.tp_rank].to(query.dtype)
            bias = bias + own_slopes.view(1, -1, 1, 1) * -distance.abs().to(query.dtype)
        return bias if mask is None else mask.to(query.dtype) + bias, False


def unpack_tuple(owner: str, inputs: object, names: Sequence[str], *, rotates: bool = False) -> dict[str, Any]:
    """Return the parts of the one tuple that a module of v1's takes, by name; the first is needed.

    Args:
        owner: the module, for the error.
        rotates: whether position ids may come after the mask in a tuple of two.
    """
    takes_positions = rotates and len(names) == 2
    lengths = (2, 3) if takes_positions else (len(names),)
    if not isinstance(inputs, tuple | list) or len(inputs) not in lengths or inputs[0] is None:
        more = ", or with position_ids for a third" if takes_positions else ""
        raise UsageError(
            f"{owner} takes one tuple ({', '.join(names)}){more}", hint="pass None for a mask that is not needed"
        )
    return dict(zip((*names, "position_ids"), inputs, strict=False))


def gather_mask(mask: torch.Tensor, num_samples: int, boundary: Layout) -> torch.Tensor:
    """Return the mask (or positions) of all `num_samples` of the group; it may be that already.

    A rank with samples of its own may have brought one mask for all of them, another than other ranks.
    """
    if state.tp_size == 1 or boundary is not Layout.SHARD_BATCH or mask.shape[0] == num_samples:
        return mask
    gathered, samples = gather_indices(mask, boundary), num_samples // state.tp_size
    return gathered.repeat_interleave(samples, 0) if mask.shape[0] == 1 < samples else gathered


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as what is added to scores; a boolean one is True where positions may be attended to.

    A position that sees nothing (padding on the left, beside a causal mask) gets 0 from torch's attention.
    """
    if mask.dim() != 4:  # it would be taken for one of positions where as many samples or heads are as positions
        raise UsageError(
            f"an attention mask is {list(mask.shape)}, and should be [samples, heads, length, length], with 1 for what"
            " is the same",
            hint="give `mask[:, None, None, :]` of [samples, length], or `mask[None, None]` of [length, length]",
        )
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


class FlashAttentionLayer(nn.Module):
    """Attention on packed query, key and value (the class of that name in SMP v1), through torch's fused kernels.

    Args:
        attention_dropout_prob: dropout on the attention weights, in training.
        attention_head_size: checked against the input if given.
        scale_attention_scores: divide scores by the root of the head size.
        scale_attn_by_layer_idx: divide them by `layer_idx + 1` as well.
        layer_idx: position of the layer, from 0.
        scale: multiply scores with this instead of all that.
        triton_flash_attention, use_alibi: accepted for compatibility; ALiBi comes in the mask.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        check_probability(type(self).__name__, "attention_dropout_prob", attention_dropout_prob)
        if scale_attn_by_layer_idx and layer_idx is None:
            raise UsageError("scale_attn_by_layer_idx=True needs `layer_idx`")
        self.attention_dropout_prob = attention_dropout_prob
        self.attention_head_size = attention_head_size
        self.scale_attention_scores = scale_attention_scores
        self.layer_scale = 1 / (layer_idx + 1) if scale_attn_by_layer_idx and layer_idx is not None else 1.0
        self.scale = scale
        self.triton_flash_attention = triton_flash_attention
        self.use_alibi = use_alibi

    def forward(self, qkv: torch.Tensor, attn_mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        """Return (batch, heads, length, head size) for `qkv` of (batch, length, 3, heads, head size).

        Args:
            qkv: query, key and value.
            attn_mask: added to the scores; broadcast to (batch, heads, length, length).
            causal: let positions see themselves and earlier ones only.
        """
        if qkv.dim() != 5 or qkv.shape[2] != 3 or self.attention_head_size not in (None, qkv.shape[4]):
            size = self.attention_head_size or "head_size"
            raise UsageError(f"qkv is {list(qkv.shape)}, not [batch, length, 3, heads, {size}]")
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return self.attend(query, key, value, attn_mask, causal=causal)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
    ) -> torch.Tensor:
        """Return (batch, heads, length, head size) for each of that shape; see `forward`.

        Keys and values may be more than queries; the last of both are at the same position then.
        """
        # torch takes a mask or `is_causal`, not both, and its causal mask puts the first query beside the first key.
        if causal and (mask is not None or query.shape[2] != key.shape[2]):
            seen = visibility_bias(relative_positions(query.shape[2], key.shape[2], query.device), None, query.dtype)
            mask, causal = seen if mask is None else mask + seen, False
        scale = self.scale
        if scale is None:
            scale = self.layer_scale
            if self.scale_attention_scores:
                scale = 1 / math.sqrt(query.shape[3]) * self.layer_scale
        dropout = self.attention_dropout_prob if self.training else 0.0
        mask = mask if mask is None else mask.to(query.dtype)
        if dropout == 0:
            return functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale)
        with tp_rng(query, equal=False):  # every rank has heads of its own
            return functional.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale)


# --- positions: what may be seen, penalties of distance, rotation ----------------------------------------------------


def relative_positions(length: int, key_length: int, device: torch.device) -> torch.Tensor:
    """Return (length, key_length): how far before a query each key is; the last of both are at the same position."""
    queries = torch.arange(key_length - length, key_length, device=device)
    return queries.unsqueeze(1) - torch.arange(key_length, device=device).unsqueeze(0)


def visibility_bias(distance: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return what is added to scores so that positions see the last `window` up to their own; None for all of these."""
    # -inf cannot make a row NaN: every position sees itself, at distance 0.
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


def rotated(x: torch.Tensor, rotary_dim: int, base: float, positions: torch.Tensor | None) -> torch.Tensor:
    """Return queries or keys (batch, heads, length, head size), pairs of their first features rotated by positions.

    Angles are computed in float32, as the models do that were trained with them.

    Args:
        positions: (batch, length), or (1, length) for all samples; None: 0, 1, 2, ...
    """
    exponents = torch.arange(0, rotary_dim, 2, device=x.device, dtype=torch.int64).float() / rotary_dim
    if positions is None:
        positions = torch.arange(x.shape[2], device=x.device).unsqueeze(0)
    angles = (positions.float().unsqueeze(-1) * (1.0 / (base**exponents))).unsqueeze(1)  # for all heads
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([turned, x[..., rotary_dim:]], -1)
