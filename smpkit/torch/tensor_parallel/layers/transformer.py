"""Transformer layers and stacks of them, divided over the tensor-parallel ranks.

::

    hidden ──► attention ──► (cross attention) ──► output layer ──► hidden      DistributedTransformerLayer
    outer layout ──to_stack_layout──► layer 0 ... layer n-1 ──from_stack_layout──► outer layout   DistributedTransformer

Shapes: hidden states are [batch, length, hidden_size], of which a rank holds what the layout says (layouts.py); between
the linear layers of the output layer they are [batch of the group, length, intermediate_size / tp_size]. Masks and
position ids are those of attention.py. A layer takes and returns one tuple, as in SMP v1: a stack is a plain
`nn.Sequential` then, which can be cut and checkpointed anywhere.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from smpkit.errors import UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.layers.attention import DistributedAttentionLayer, additive_mask, gather_mask
from smpkit.torch.tensor_parallel.layers.config import TransformerConfig, activation_of, takes_arguments
from smpkit.torch.tensor_parallel.layers.dropout import ParallelDropout
from smpkit.torch.tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from smpkit.torch.tensor_parallel.layers.norms import optional_layernorm
from smpkit.torch.tensor_parallel.layouts import (
    Layout,
    check_divisible,
    enter_region,
    leave_region,
    stack_layout,
)
from smpkit.torch.tensor_parallel.module import DistributedModule

__all__ = [
    "DistributedTransformer",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "from_stack_layout",
    "to_stack_layout",
]

LayerInputs = tuple[torch.Tensor | None, ...]

_LAYER: Final = (
    "num_attention_heads attention_head_size hidden_size intermediate_size attention_dropout_prob hidden_dropout_prob"
    " activation layernorm_epsilon initializer_range use_normal_initialization causal_mask_size add_cross_attention"
    " pre_layernorm post_layernorm"
)
"""SMP v1's arguments of a layer."""


class DistributedTransformerOutputLayer(DistributedModule):
    """The two linear layers of a transformer layer, with dropout, residual and layer norm (SMP v1's class).

    `layernorm(x + dropout(dense2(activation(dense1(pre_layernorm(x))))))`, with the norms that are asked for.

    Args:
        config: a TransformerConfig, or its fields in SMP v1's order or by name.
        boundary: what comes in and goes out.

    Raises:
        ConfigError: the ranks do not divide intermediate_size, or neither layer norm is asked for.
    """

    @takes_arguments(
        "hidden_size intermediate_size hidden_dropout_prob activation layernorm_epsilon initializer_range"
        " use_normal_initialization pre_layernorm post_layernorm fp32_residual_addition"
    )
    def __init__(self, config: TransformerConfig, *, boundary: Layout | None = None) -> None:
        super().__init__(boundary=boundary)
        check_divisible("intermediate_size", config.intermediate_size)
        self.config = config
        self.activation = activation_of(config.activation)
        hidden, between = config.hidden_size, config.intermediate_size
        made: dict[str, Any] = {"boundary": self.boundary, "initializer_range": config.weight_deviation}
        self.dense1 = ColumnParallelLinear(hidden, between, config.mlp_bias, **made)
        self.dense2 = RowParallelLinear(between, hidden, config.mlp_bias, **made)
        self.dropout = ParallelDropout(config.hidden_dropout_prob, self.boundary)
        shares_norm = config.parallel_residual and not config.parallel_layernorm
        self.pre_layernorm = optional_layernorm(config.pre_layernorm and not shares_norm, config, self.boundary)
        self.layernorm = optional_layernorm(config.post_layernorm, config, self.boundary)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states like those that come in: (batch, length, hidden_size)."""
        normal = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        output: torch.Tensor = self.dropout(self.dense2(self.activation(self.dense1(normal))))
        output = self.config.add(hidden, output)
        return output if self.layernorm is None else self.layernorm(output)

    def partial_output(self, entered: torch.Tensor) -> torch.Tensor:
        """Return what this rank's part adds to the output of all samples, before `leave_region` and the bias."""
        return self.dense2.partial_output(self.activation(self.dense1.project(entered)))


class DistributedTransformerLayer(DistributedModule):
    """Attention, perhaps cross attention, and the output layer (the class of that name in SMP v1).

    Args:
        config: a TransformerConfig, or its fields in SMP v1's order or by name.
        boundary, in_stack: as in DistributedAttentionLayer.
    """

    @takes_arguments(_LAYER)
    def __init__(self, config: TransformerConfig, *, boundary: Layout | None = None, in_stack: bool = False) -> None:
        super().__init__(boundary=boundary)
        self.config = config
        where: dict[str, Any] = {"boundary": self.boundary, "in_stack": in_stack}
        self.attention = DistributedAttentionLayer(config, **where)
        self.cross_attention = (
            DistributedAttentionLayer(config.of_cross_attention(), cross_attention=True, **where)
            if config.add_cross_attention
            else None
        )
        self.output = DistributedTransformerOutputLayer(config, boundary=self.boundary)
        self.dropout = ParallelDropout(config.hidden_dropout_prob, self.boundary) if config.parallel_residual else None

    def forward(self, inputs: LayerInputs) -> LayerInputs:
        """Return the tuple that comes in, with other hidden states.

        Args:
            inputs: `(hidden_states, attention_mask)`, or with cross attention `(hidden_states, cross_states,
                attention_mask, cross_mask)`, or with rotation `(hidden_states, attention_mask, position_ids)`; see
                DistributedAttentionLayer.
        """
        cross, rotates = self.cross_attention is not None, bool(self.config.rotary_dim)
        hidden, states, mask, cross_mask, positions = unpack_inputs(inputs, cross=cross, rotates=rotates)
        if self.config.parallel_residual:
            return (self._parallel_branches(hidden, mask, positions), *inputs[1:])
        hidden = self.attention((hidden, mask) if positions is None else (hidden, mask, positions))
        if self.cross_attention is not None and states is not None:
            hidden = self.cross_attention((hidden, states, cross_mask))
        return (self.output(hidden), *inputs[1:])

    def _parallel_branches(
        self, hidden: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the layer's output where attention and MLP read the same input.

        Both branches are linear in the end, so their shares are added on each rank first and need one exchange out of
        the region; and one into it, or two where each branch has a norm of its own.
        """
        attention, output = self.attention, self.output
        assert attention.pre_layernorm is not None
        entered = enter_region(attention.pre_layernorm(hidden), self.boundary)
        other = entered if output.pre_layernorm is None else enter_region(output.pre_layernorm(hidden), self.boundary)
        shares = attention.partial_output(entered, None, mask, positions, entered=True) + output.partial_output(other)
        result = leave_region(shares, self.boundary)
        # After the sum between ranks: every rank has the whole biases, and would add them tp_size times before it.
        for linear in (attention.dense, output.dense2):
            result = result if linear.bias is None else result + linear.bias
        assert self.dropout is not None
        return self.config.add(hidden, self.dropout(result))


class DistributedTransformer(DistributedModule):
    """A stack of transformer layers in `seq_layers` (the class of that name in SMP v1).

    With `pre_layernorm` and `post_layernorm` both set, its input and its output are normalised, too. Between layers the
    values are what `optimize` asks for; see smpkit.torch.tensor_parallel.layouts.

    Args:
        config: a TransformerConfig, or its fields in SMP v1's order or by name.
        boundary: what comes in and goes out.
        inner: what the layers take and return; None for what the configuration says.
    """

    @takes_arguments(f"num_layers {_LAYER}", "window_sizes")
    def __init__(
        self, config: TransformerConfig, *, boundary: Layout | None = None, inner: Layout | None = None
    ) -> None:
        super().__init__(boundary=boundary)
        self.inner = stack_layout() if inner is None else inner
        self.add_cross_attention = config.add_cross_attention
        self.rotates = bool(config.rotary_dim)
        both = config.pre_layernorm and config.post_layernorm
        self.input_layernorm = optional_layernorm(both, config, self.inner)
        self.seq_layers = nn.Sequential()
        for index in range(config.num_layers):
            layer = DistributedTransformerLayer(config.of_layer(index), boundary=self.inner, in_stack=True)
            self.seq_layers.append(layer)
        self.layernorm = optional_layernorm(both, config, self.inner)

    def forward(self, inputs: LayerInputs) -> LayerInputs:
        """Return the tuple that comes in, with other hidden states; see DistributedTransformerLayer."""
        hidden, states, mask, cross_mask, positions = unpack_inputs(
            inputs, cross=self.add_cross_attention, rotates=self.rotates
        )
        mask, cross_mask = (None if each is None else additive_mask(each, hidden.dtype) for each in (mask, cross_mask))
        mask, cross_mask, positions = (
            None if each is None else gather_mask(each, hidden.shape[0], self.boundary)
            for each in (mask, cross_mask, positions)
        )
        hidden = to_stack_layout(hidden, self.boundary, self.inner)
        if self.input_layernorm is not None:
            hidden = self.input_layernorm(hidden)
        if not self.add_cross_attention:
            hidden = self.seq_layers((hidden, mask) if positions is None else (hidden, mask, positions))[0]
        else:
            if states is not None:
                states = to_stack_layout(states, self.boundary, self.inner, whole=True)
            hidden = self.seq_layers((hidden, states, mask, cross_mask))[0]
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        return (from_stack_layout(hidden, self.boundary, self.inner), *inputs[1:])


def unpack_inputs(
    inputs: LayerInputs, *, cross: bool, rotates: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return hidden states, cross states, mask, cross mask and positions of a layer's one argument.

    Raises:
        UsageError: it is not such a tuple.
    """
    if cross:
        expected: tuple[int, ...] = (4,)
        names = "(hidden_states, cross_states, attention_mask, cross_mask)"
    elif rotates:
        expected = (2, 3)
        names = "(hidden_states, attention_mask), or with position_ids for a third"
    else:
        expected = (2,)
        names = "(hidden_states, attention_mask)"
    if not isinstance(inputs, (tuple, list)) or len(inputs) not in expected or inputs[0] is None:  # type: ignore[redundant-expr]
        raise UsageError(
            f"a transformer layer takes one tuple {names}",
            hint="pass None for a mask that is not needed",
        )
    if cross:
        return inputs[0], inputs[1], inputs[2], inputs[3], None
    positions = inputs[2] if len(inputs) == 3 else None
    return inputs[0], None, inputs[1], None, positions


def to_stack_layout(x: torch.Tensor, outer: Layout, inner: Layout, *, whole: bool = False) -> torch.Tensor:
    """Change values from the layout outside of a stack to the one between its layers.

    Args:
        x: (batch, length, ...).
        whole: keep sequences whole where the layout inside divides them.

    Raises:
        UsageError: no stack has these two layouts outside and inside.
    """
    if has_torch_function_unary(x):  # a StageTensor: the call runs on the pipeline rank that has the value
        made: torch.Tensor = handle_torch_function(to_stack_layout, (x,), x, outer, inner, whole=whole)
        return made
    if outer is inner or state.tp_size == 1:
        return x
    if (outer, inner) == (Layout.REPLICATE, Layout.SHARD_SEQUENCE):
        return x if whole else collectives.scatter_to_tp(x, 1)
    raise UsageError(f"a stack cannot have boundary {outer.value} outside and {inner.value} between its layers")


def from_stack_layout(x: torch.Tensor, outer: Layout, inner: Layout) -> torch.Tensor:
    """Change values back to the layout outside of a stack, at its end."""
    if has_torch_function_unary(x):
        made: torch.Tensor = handle_torch_function(from_stack_layout, (x,), x, outer, inner)
        return made
    if outer is inner or state.tp_size == 1:
        return x
    return collectives.gather_from_tp(x, 1)
