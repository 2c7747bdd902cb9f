"""Transformer layers and stacks of them, divided over the tensor-parallel ranks.

::

    hidden ──► attention ──► (cross attention) ──► output layer ──► hidden      DistributedTransformerLayer
    boundary ──► layer 0 ... layer n-1, which take and return `inner` ──► boundary           DistributedTransformer

Shapes: hidden states are [batch, length, hidden_size], of which a rank holds what the layout says (layouts.py); between
the linear layers of the output layer they are [batch of the group, length, intermediate_size / tp_size]. Masks and
position ids are those of attention.py. A layer takes and returns one tuple, as in SMP v1: a stack is a plain
`nn.Sequential` then, which can be cut and checkpointed anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from smpkit.torch.core.runtime import state
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.dropout import ParallelDropout
from smpkit.torch.tensor_parallel.layers.attention import (
    DistributedAttentionLayer,
    additive_mask,
    gather_mask,
    unpack_tuple,
)
from smpkit.torch.tensor_parallel.layers.config import OPTIONS, TransformerConfig, activation_of, config_of
from smpkit.torch.tensor_parallel.layers.norms import optional_layernorm
from smpkit.torch.tensor_parallel.layouts import Layout, check_divisible, enter_region, stack_layout
from smpkit.torch.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, sum_shares
from smpkit.torch.tensor_parallel.module import DistributedModule

LayerInputs = tuple[torch.Tensor | None, ...]


class DistributedTransformerOutputLayer(DistributedModule):
    """The two linear layers of a transformer layer, with dropout, residual and layer norm (SMP v1's class).

    `layernorm(x + dropout(dense2(activation(dense1(pre_layernorm(x))))))`, with the norms that are asked for.

    Args:
        config: a TransformerConfig, or its fields in SMP v1's order or by name.
        boundary: what comes in and goes out.

    Raises:
        ConfigError: the ranks do not divide intermediate_size, or neither layer norm is asked for.
    """

    options = OPTIONS

    def __init__(
        self,
        hidden_size: int | TransformerConfig = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-05,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        *,
        boundary: Layout | None = None,
        **options: Any,
    ) -> None:
        config = config_of(type(self), locals(), options)
        super().__init__(boundary=boundary)
        check_divisible("intermediate_size", config.intermediate_size)
        self.config = config
        self.activation = activation_of(config.activation)
        hidden, between = config.hidden_size, config.intermediate_size
        linear: dict[str, Any] = {"boundary": self.boundary, "initializer_range": config.weight_deviation}
        self.dense1 = ColumnParallelLinear(hidden, between, config.mlp_bias, **linear)
        self.dense2 = RowParallelLinear(between, hidden, config.mlp_bias, **linear)
        self.dropout = ParallelDropout(config.hidden_dropout_prob, self.boundary)
        has_norm = config.pre_layernorm and not config.parallel_residual  # both branches read attention's
        self.pre_layernorm = optional_layernorm(has_norm, config, self.boundary)
        self.layernorm = optional_layernorm(config.post_layernorm, config, self.boundary)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states like those that come in: (batch, length, hidden_size)."""
        normal = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        output: torch.Tensor = hidden + self.dropout(self.dense2(self.activation(self.dense1(normal))))
        return output if self.layernorm is None else self.layernorm(output)


class DistributedTransformerLayer(DistributedModule):
    """Attention, perhaps cross attention, and the output layer (the class of that name in SMP v1).

    Args:
        config: a TransformerConfig, or its fields in SMP v1's order or by name.
        boundary: what comes in and goes out.
    """

    options = OPTIONS

    def __init__(
        self,
        num_attention_heads: int | TransformerConfig = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-05,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        boundary: Layout | None = None,
        **options: Any,
    ) -> None:
        config = config_of(type(self), locals(), options)
        super().__init__(boundary=boundary)
        self.config = config
        self.attention = DistributedAttentionLayer(config, boundary=self.boundary)
        self.cross_attention = None
        if config.add_cross_attention:
            other = config.of_cross_attention()
            self.cross_attention = DistributedAttentionLayer(other, cross_attention=True, boundary=self.boundary)
        self.output = DistributedTransformerOutputLayer(config, boundary=self.boundary)

    def forward(self, inputs: LayerInputs) -> LayerInputs:
        """Return the tuple that comes in, with other hidden states.

        Args:
            inputs: `(hidden_states, attention_mask)`, or with cross attention `(hidden_states, cross_states,
                attention_mask, cross_mask)`, or with rotation `(hidden_states, attention_mask, position_ids)`; see
                DistributedAttentionLayer.
        """
        cross, rotates = self.config.add_cross_attention, bool(self.config.rotary_dim)
        parts = unpack_layer_inputs(inputs, cross=cross, rotates=rotates)
        if self.config.parallel_residual:
            return (self._parallel_branches(**parts), *inputs[1:])
        states, cross_mask = parts.pop("cross_states", None), parts.pop("cross_mask", None)
        hidden = self.attention(tuple(parts.values()))
        if self.cross_attention is not None and states is not None:
            hidden = self.cross_attention((hidden, states, cross_mask))
        return (self.output(hidden), *inputs[1:])

    def _parallel_branches(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the layer's output where attention and MLP read the same input.

        Both branches are linear in the end, so their shares are added on each rank first, and need one exchange into
        the region and one out of it.
        """
        attention, mlp = self.attention, self.output
        assert attention.pre_layernorm is not None
        entered = enter_region(attention.pre_layernorm(hidden_states), self.boundary)
        attended = attention.attended(entered, attention_mask=attention_mask, position_ids=position_ids, entered=True)
        shares = attention.dense.project(attended) + mlp.dense2.project(mlp.activation(mlp.dense1.project(entered)))
        output: torch.Tensor = mlp.dropout(sum_shares(shares, self.boundary, attention.dense.bias, mlp.dense2.bias))
        return hidden_states + output


class DistributedTransformer(DistributedModule):
    """A stack of transformer layers in `seq_layers` (the class of that name in SMP v1).

    With `pre_layernorm` and `post_layernorm` both set, its input and its output are normalised, too. Between layers the
    values are what `optimize` asks for; see smpkit.torch.tensor_parallel.layouts.

    Args:
        config: a TransformerConfig, or its fields in SMP v1's order or by name.
        boundary: what comes in and goes out, and lies between the layers; None for what the configuration says.
    """

    options = OPTIONS

    def __init__(
        self,
        num_layers: int | TransformerConfig = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-05,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        window_sizes: Sequence[int | None] | None = None,
        boundary: Layout | None = None,
        **options: Any,
    ) -> None:
        config = config_of(type(self), locals(), options)
        super().__init__(boundary=boundary)
        self.inner = boundary or stack_layout()
        self.add_cross_attention, self.rotates = config.add_cross_attention, bool(config.rotary_dim)
        both = config.pre_layernorm and config.post_layernorm
        self.input_layernorm = optional_layernorm(both, config, self.inner)
        self.seq_layers = nn.Sequential()
        for index in range(config.num_layers):
            self.seq_layers.append(DistributedTransformerLayer(config.of_layer(index), boundary=self.inner))
        self.layernorm = optional_layernorm(both, config, self.inner)

    def forward(self, inputs: LayerInputs) -> LayerInputs:
        """Return the tuple that comes in, with other hidden states; see DistributedTransformerLayer."""
        parts = unpack_layer_inputs(inputs, cross=self.add_cross_attention, rotates=self.rotates)
        hidden: torch.Tensor = parts.pop("hidden_states")
        num_samples = hidden.shape[0] * (state.tp_size if self.boundary is Layout.SHARD_BATCH else 1)
        for name, value in parts.items():
            if value is not None and name != "cross_states":
                added = value if name == "position_ids" else additive_mask(value, hidden.dtype)
                parts[name] = gather_mask(added, num_samples, self.boundary)
        is_divided = self.inner is not self.boundary  # sequences; cross states are of another length, and stay whole
        hidden = collectives.scatter_to_tp(hidden, 1) if is_divided else hidden
        if self.input_layernorm is not None:
            hidden = self.input_layernorm(hidden)
        hidden = self.seq_layers((hidden, *parts.values()))[0]
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        return (collectives.gather_from_tp(hidden, 1) if is_divided else hidden, *inputs[1:])


def unpack_layer_inputs(inputs: LayerInputs, *, cross: bool, rotates: bool) -> dict[str, Any]:
    """Return the parts of a layer's one argument by name, in their order."""
    names = ["hidden_states", "attention_mask"]
    if cross:
        names = ["hidden_states", "cross_states", "attention_mask", "cross_mask"]
    return unpack_tuple("a transformer layer", inputs, names, rotates=rotates)
