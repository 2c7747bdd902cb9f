"""`TransformerConfig`: all that a transformer of `smp.nn` is made of, and how its modules take it.

A module takes SMP v1's arguments, or a config in the place of the first, and hands the config to the modules inside.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.nn import functional

from smpkit.errors import ConfigError, Problem, UsageError
from smpkit.torch.core.arguments import check_probability, check_sizes


@dataclass(frozen=True)
class LayerOptions:
    """Variants of a transformer layer beyond the arguments that SMP v1 documents: the `**options` of its modules.

    Args:
        use_alibi: add ALiBi's penalties of distance to the scores; their slopes halve `alibi_bias_max` times.
        rotary_dim: the number of features of queries and keys, from the first, that positions rotate in pairs of
            neighbours (GPT-J); 0 for none.
        rotary_base: of the rotation's wave lengths.
        window_size: how many positions each sees, itself and those before it (GPT-Neo's local attention); None for all.
        scale_attention_scores: divide scores by the root of the head size.
        scale_attn_by_layer_idx: divide them by `layer_idx + 1` as well.
        layer_idx: position of the layer, from 0; a stack counts by itself.
        masks_are_whole: a mask that has a row for each position says all that it sees: none is causal beside it.
        attention_in_fp32: compute attention in float32 at least.
        query_key_value_bias, attention_dense_bias, mlp_bias: whether these linear layers have one.
        parallel_residual: `x + attention(norm(x)) + mlp(norm(x))`, with one exchange for both; needs pre_layernorm.
    """

    use_alibi: bool = False
    alibi_bias_max: float = 8
    rotary_dim: int = 0
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


@dataclass(frozen=True)
class TransformerConfig(LayerOptions):
    """What a transformer of `smp.nn` is made of, with the fields of LayerOptions. Each module reads what concerns it.

    Args:
        num_layers: of a stack.
        num_attention_heads: all of them; each rank computes an equal share.
        attention_head_size: of one head.
        hidden_size: of the input and output of every layer.
        intermediate_size: between the two linear layers of the MLP; divided over the ranks.
        vocab_size, num_positions, num_token_types: rows of the embeddings; 0 for none of the last two.
        attention_dropout_prob, hidden_dropout_prob: dropout on the attention weights, on what each block returns.
        embedding_dropout_prob: dropout on the embeddings; None for hidden_dropout_prob.
        activation: of the MLP: `gelu` or `relu`, or another of Hugging Face's names (`gelu_new`, `silu`, ...).
        layernorm_epsilon: of the layer norms.
        initializer_range, use_normal_initialization: draw weights from N(0, initializer_range), or as torch does.
        causal_mask_size: the longest sequence, each position of which sees itself and earlier ones; None: it sees all.
        add_cross_attention: attend to other states between attention and MLP.
        pre_layernorm, post_layernorm: normalise the input of a block; the sum of its input and output.
        add_lm_head: return logits, or a loss, rather than hidden states.
        tie_lm_head: the head's weight is the word embedding's.
        lm_head_bias: whether the head has a bias.
        whole_logits: return all classes of this rank's samples; False: this rank's classes of all samples.
        window_sizes: the `window_size` of each layer.

    Raises:
        ConfigError: neither layer norm is asked for.
        UsageError: a value cannot be meant, or values contradict each other.
    """

    num_layers: int = 12
    num_attention_heads: int = 32
    attention_head_size: int = 32
    hidden_size: int = 1024
    intermediate_size: int = 4096
    vocab_size: int = 30522
    num_positions: int = 1024
    num_token_types: int = 0
    attention_dropout_prob: float = 0.1
    hidden_dropout_prob: float = 0.1
    embedding_dropout_prob: float | None = None
    activation: str = "gelu"
    layernorm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    use_normal_initialization: bool = False
    causal_mask_size: int | None = None
    add_cross_attention: bool = False
    pre_layernorm: bool = False
    post_layernorm: bool = True
    add_lm_head: bool = True
    tie_lm_head: bool = True
    lm_head_bias: bool = False
    whole_logits: bool = True
    window_sizes: Sequence[int | None] | None = None

    def __post_init__(self) -> None:
        sizes = ("num_layers", "num_attention_heads", "attention_head_size", "hidden_size", "vocab_size")
        check_sizes("a transformer", **{name: getattr(self, name) for name in sizes})
        counts = ("intermediate_size", "num_positions", "num_token_types", "rotary_dim")
        check_sizes("a transformer", 0, **{name: getattr(self, name) for name in counts})
        for name in ("attention_dropout_prob", "hidden_dropout_prob"):
            check_probability("a transformer", name, getattr(self, name))
        check_probability("a transformer", "embedding_dropout_prob", self.embedding_dropout)
        activation_of(self.activation)
        if not (self.pre_layernorm or self.post_layernorm):
            problem = Problem(("pre_layernorm",), "pre_layernorm and post_layernorm are both False", "set one of them")
            raise ConfigError([problem], subject="distributed module")
        if self.rotary_dim % 2:
            raise UsageError(f"rotary_dim is {self.rotary_dim}, but features are rotated in pairs")
        if self.window_sizes is not None and len(self.window_sizes) != self.num_layers:
            raise UsageError(f"window_sizes has {len(self.window_sizes)} entries for {self.num_layers} layers")
        if self.parallel_residual and (not self.pre_layernorm or self.post_layernorm or self.add_cross_attention):
            raise UsageError(
                "parallel_residual=True needs pre_layernorm=True, post_layernorm=False and no cross attention"
            )

    @property
    def embedding_dropout(self) -> float:
        """Dropout on the embeddings."""
        return self.hidden_dropout_prob if self.embedding_dropout_prob is None else self.embedding_dropout_prob

    @property
    def weight_deviation(self) -> float | None:
        """What linear layers in blocks are drawn with; None for torch's way."""
        return self.initializer_range if self.use_normal_initialization else None

    def of_layer(self, index: int) -> TransformerConfig:
        """Return the config of one layer of a stack."""
        window = self.window_size if self.window_sizes is None else self.window_sizes[index]
        return replace(self, layer_idx=index, window_size=window)

    def of_cross_attention(self) -> TransformerConfig:
        """Drop what depends on positions: those of other states have nothing to do with those of the hidden states."""
        return replace(self, causal_mask_size=None, use_alibi=False, rotary_dim=0, window_size=None)


# --- constructors -----------------------------------------------------------------------------------------------------

_IGNORED: Final = (
    "distribute_embedding",
    "flash_attention",
    "fp32_residual_addition",
    "fused_bias_gelu",
    "fused_dropout",
    "fused_softmax",
    "query_key_layer_scaling",
    "zero_init",
)
"""Arguments of SMP v1 that chose between equivalent kernels, which torch does now: accepted, without effect. Sums of
half precision, too: torch adds in float32 and rounds once."""
OPTIONS: Final = (*(option.name for option in dataclasses.fields(LayerOptions)), *_IGNORED)
"""What the constructors take beside the arguments that they name."""


def config_of(owner: type, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> TransformerConfig:
    """Return the config that a constructor of `owner` was called with, or that its arguments make.

    Args:
        arguments: of the constructor by name, in their order; a config may stand in the place of the first.
        options: further fields of the config, those of LayerOptions.
    """
    known = {option.name for option in dataclasses.fields(TransformerConfig)}
    values = {name: value for name, value in arguments.items() if name in known}
    first = next(iter(values.values()))
    if isinstance(first, TransformerConfig):
        return first
    for name in options:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, (*arguments, *OPTIONS), 1)
            hint = f"did you mean `{near[0]}`?" if near else f"the options are {', '.join(sorted(OPTIONS))}"
            raise UsageError(f"{owner.__name__} has no argument `{name}`", hint=hint)
    return TransformerConfig(**values, **{name: value for name, value in options.items() if name not in _IGNORED})


# --- activations ------------------------------------------------------------------------------------------------------


_gelu_by_tanh: Final = functools.partial(functional.gelu, approximate="tanh")
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
    """Return an activation by its name: SMP v1's `gelu` and `relu`, and Hugging Face's names of others."""
    if name not in _ACTIVATIONS:
        raise UsageError(f"the activation `{name}` is unknown", hint=f"use one of {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]
