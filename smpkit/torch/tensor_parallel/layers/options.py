"""`LayerOptions`: variants of transformer layers beyond the arguments that SMP v1 documents."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional

from smpkit.errors import UsageError

__all__ = ["IGNORED_OPTIONS", "LayerOptions", "activation_of"]

IGNORED_OPTIONS: Final = frozenset(
    {
        "distribute_embedding",
        "flash_attention",
        "fused_bias_gelu",
        "fused_dropout",
        "fused_softmax",
        "query_key_layer_scaling",
        "zero_init",
    }
)
"""Arguments of SMP v1 that chose between equivalent kernels, which torch does now: accepted, without effect."""


@dataclass(frozen=True)
class LayerOptions:
    """Variants of a transformer layer, each given by its name to the modules of `smp.nn`.

    Args:
        use_alibi: add ALiBi's penalties of distance to the scores; their slopes halve `alibi_bias_max` times.
        rotary_dim: the number of features of queries and keys, from the first, that positions rotate; 0 for none.
        rotary_interleaved: pairs to rotate are neighbours (GPT-J), not half a head apart (GPT-NeoX).
        rotary_base: of the rotation's wave lengths.
        window_size: how many positions each sees, itself and those before it (GPT-Neo's local attention); None for all.
        scale_attention_scores: divide scores by the root of the head size.
        scale_attn_by_layer_idx: divide them by `layer_idx + 1` as well.
        layer_idx: position of the layer, from 0; a stack counts by itself.
        masks_are_whole: a mask that has a row for each position says all that it sees: none is causal beside it.
        attention_in_fp32: compute attention in float32 at least.
        query_key_value_bias, attention_dense_bias, mlp_bias: whether these linear layers have one.
        parallel_residual: `x + attention(norm(x)) + mlp(norm(x))`, with one exchange for both; needs pre_layernorm.
        parallel_layernorm: with that, the MLP has a norm of its own (GPT-NeoX), or shares the other (GPT-J).
        fp32_residual_addition: add residuals in float32.
    """

    use_alibi: bool = False
    alibi_bias_max: float = 8
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    rotary_base: float = 10000.0
    window_size: int | None = None
    scale_attention_scores: bool = True
    scale_attn_by_layer_idx: bool = False
    layer_idx: int | None = None
    masks_are_whole: bool = False
    attention_in_fp32: bool = False
    query_key_value_bias: bool = True
    attention_dense_bias: bool = True
    mlp_bias: bool = True
    parallel_residual: bool = False
    parallel_layernorm: bool = False
    fp32_residual_addition: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any], owner: str) -> LayerOptions:
        """Return the options in keyword arguments.

        Raises:
            UsageError: a name is unknown, or the values contradict each other.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name in given:
            if name not in known | IGNORED_OPTIONS:
                near = difflib.get_close_matches(name, known | IGNORED_OPTIONS, 1)
                hint = f"did you mean `{near[0]}`?" if near else f"the options are {', '.join(sorted(known))}"
                raise UsageError(f"{owner} has no argument `{name}`", hint=hint)
        options = cls(**{name: value for name, value in given.items() if name in known})
        if options.rotary_dim % 2:
            raise UsageError(f"rotary_dim is {options.rotary_dim}, but features are rotated in pairs")
        if options.scale_attn_by_layer_idx and options.layer_idx is None:
            raise UsageError("scale_attn_by_layer_idx=True needs `layer_idx`")
        return options

    def add(self, residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the sum, in the residual's dtype."""
        if self.fp32_residual_addition:
            return (residual.float() + output.float()).to(residual.dtype)
        return residual + output


def _gelu_by_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


_ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": functional.gelu,
    "gelu_new": _gelu_by_tanh,
    "gelu_fast": _gelu_by_tanh,
    "gelu_pytorch_tanh": _gelu_by_tanh,
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


def activation_of(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an activation by its name: SMP v1's `gelu` and `relu`, and Hugging Face's names of others.

    Raises:
        UsageError: the name is unknown.
    """
    if name not in _ACTIVATIONS:
        raise UsageError(f"the activation `{name}` is unknown", hint=f"use one of {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]
