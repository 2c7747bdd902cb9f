"""The families of Hugging Face's models that become modules of `smp.nn`: all that is special to one is its entry here.

An entry says which classes are replaced, of what the distributed module is made, and what its weights are called there.
To add a family, add one to FAMILIES; `smpkit.torch.nn.huggingface.gpt2` and its like are names that SMP v1 had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.nn.huggingface.calls import CallReader, CallRules
from smpkit.torch.nn.huggingface.heads import ENCODER_CALLS, LM_HEAD_CALLS, HuggingFaceEncoder, HuggingFaceLMHead
from smpkit.torch.nn.huggingface.names import (
    Layers,
    Names,
    by_head,
    names_of_tensors,
    rename,
    translation,
    transposed,
    with_causal_masks,
)
from smpkit.torch.tensor_parallel.layers.attention import DistributedAttentionLayer
from smpkit.torch.tensor_parallel.layers.config import TransformerConfig
from smpkit.torch.tensor_parallel.registry import ReplacementRule, register

__all__ = ["BERT", "FAMILIES", "GPT2", "GPTJ", "GPT_NEO", "GPT_NEOX", "ROBERTA", "Family"]


@dataclass(frozen=True)
class _Kind:
    """What the classes of a family become, how their calls are read, and where its layers are."""

    module: type[nn.Module]
    calls: CallRules
    layers: str


_LANGUAGE_MODEL: Final = _Kind(HuggingFaceLMHead, LM_HEAD_CALLS, "transformer.seq_layers")
_ENCODER: Final = _Kind(HuggingFaceEncoder, ENCODER_CALLS, "seq_layers")


@dataclass(frozen=True)
class Family:
    """How models of one family become distributed ones.

    Args:
        kind: what they become.
        classes: the qualified names of those that are replaced, each with the arguments that are not the family's.
        arguments: fields of the TransformerConfig. A string is the attribute of the model's config to read, a function
            is called with that config, and any other value is taken as it is.
        refusal: why a model of this config cannot be replaced; None if it can.
        layers: the list of layers, in the model without its head.
        in_layers: what the layers in each of them are called there, by our names.
        outside: the same for those outside of the list, but for the head.
        base: the attribute (with a dot) in which a model with a head has the one without.
        older_head: what older versions call the head.
        is_tied: a state dict without a head has the word embedding for one.
        inside: modules in state dicts that are to be translated, at any depth; empty: the whole.
        buffers: ends of the names of buffers that older versions keep.
        masks: the module of a layer in which older versions keep a causal mask.
        windows: how many positions those masks show, by layer in turn; None for all.
    """

    kind: _Kind
    classes: Mapping[str, Mapping[str, Any]]
    arguments: Mapping[str, Any]
    layers: str
    in_layers: Layers
    outside: Layers = field(default_factory=dict)
    base: str = ""
    older_head: str = "lm_head"
    is_tied: bool = False
    inside: str = ""
    buffers: tuple[str, ...] = ()
    masks: str = ""
    windows: Sequence[int | None] = (None,)
    refusal: Callable[[Any], str | None] = lambda _: None

    def to_distributed(
        self,
        state_dict: dict[str, Any],
        max_seq_len: int | None = None,  # noqa: ARG002 - only masks depend on it
        *,
        num_attention_heads: int | None = None,
    ) -> dict[str, Any]:
        """Return the state dict of the distributed model from that of Hugging Face's, which is emptied.

        Args:
            max_seq_len: accepted for compatibility.
            num_attention_heads: of the model, for families that keep query, key and value of each head together
                (GPT-NeoX).

        Raises:
            UsageError: the number of heads is needed.
        """
        head = self.older_head if f"{self.older_head}.weight" in state_dict else "lm_head"
        names = self._names(self.base, head, num_attention_heads)
        made = rename(state_dict, names, to_hf=False, inside=self.inside, dropped=self.buffers)
        if self.is_tied and "word_embedding.weight" in made:
            made.setdefault("lm_head.weight", made["word_embedding.weight"])
        return made

    def to_hugging_face(
        self,
        state_dict: dict[str, Any],
        max_seq_len: int | None = None,
        *,
        num_attention_heads: int | None = None,
        windows: Sequence[int | None] | None = None,
    ) -> dict[str, Any]:
        """Return the state dict of Hugging Face's model from the distributed one's, which is emptied.

        Args:
            max_seq_len: translate for older versions of `transformers`, which keep causal masks for sequences of this
                length as buffers, and may have another name for the head; None for newer ones.
            num_attention_heads: as in the other direction.
            windows: how many positions those masks show, by layer in turn, None in it for all; None for what is usual.

        Raises:
            UsageError: the number of heads is needed.
        """
        head = "lm_head" if max_seq_len is None else self.older_head
        names = self._names(self.base, head, num_attention_heads)
        made = rename(state_dict, names, to_hf=True, inside=self.inside)
        attention = f"{self.base}{self.layers}.*.{self.masks}"
        return with_causal_masks(made, attention, max_seq_len, windows or self.windows) if self.masks else made

    def names_of(self, module: nn.Module) -> Names:
        """Return the names of the tensors of a distributed module."""
        attention = next(each for each in module.modules() if isinstance(each, DistributedAttentionLayer))
        base = "" if getattr(module, "lm_head", None) is None else self.base
        return self._names(base, "lm_head", attention.config.num_attention_heads)

    def _names(self, base: str, head: str, num_heads: int | None) -> Names:
        return {
            **names_of_tensors("", base, self.outside, num_heads),
            **names_of_tensors(f"{self.kind.layers}.*.", f"{base}{self.layers}.*.", self.in_layers, num_heads),
            **names_of_tensors("", "", {"lm_head": head}, num_heads),
        }

    def arguments_of(self, config: Any, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the TransformerConfig for a model's config."""
        return {name: _read(config, how) for name, how in {**self.arguments, **more}.items()}


def _read(config: Any, how: Any) -> Any:
    if isinstance(how, str):
        return getattr(config, how)
    return how(config) if callable(how) else how


def _rule(family: Family, original: str, more: Mapping[str, Any]) -> ReplacementRule:
    """Return how models of one class are replaced."""

    def refusal(module: nn.Module) -> str | None:
        config: Any = module.config
        reason = family.refusal(config)
        if reason is None:
            try:
                TransformerConfig(**family.arguments_of(config, more))
            except UsageError as error:
                reason = error.message
        return reason

    return ReplacementRule(
        original,
        family.kind.module,
        init_hook=lambda config: ((), family.arguments_of(config, more)),
        forward_hook=CallReader(original, family.kind.calls),
        arguments=lambda module: ((module.config,), {}),
        to_distributed=translation(family.names_of, to_hf=False),
        from_distributed=translation(family.names_of, to_hf=True),
        finish=_copy_config,
        refusal=refusal,
    )


def _copy_config(original: nn.Module, distributed: nn.Module) -> None:
    """Copy what scripts read from a model to the distributed module."""
    for name in ("config", "generation_config"):
        if hasattr(original, name):
            object.__setattr__(distributed, name, getattr(original, name))


# --- what several families share --------------------------------------------------------------------------------------


def _rope(config: Any) -> dict[str, Any]:
    """Return how GPT-NeoX's positions rotate; older configs keep it under other names."""
    older = {
        "rope_theta": getattr(config, "rotary_emb_base", 10000.0),
        "partial_rotary_factor": getattr(config, "rotary_pct", 1.0),
        "rope_type": (getattr(config, "rope_scaling", None) or {}).get("type", "default"),
    }
    return {**older, **(getattr(config, "rope_parameters", None) or {})}


def _refuse_rotation(config: Any) -> str | None:
    kind = _rope(config)["rope_type"]
    return None if kind == "default" else f"its positions rotate by `{kind}`"


def _refuse_decoder(config: Any) -> str | None:
    if config.is_decoder or config.add_cross_attention:
        return "it is a decoder"
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    return None if kind == "absolute" else f"its attention knows of positions (`{kind}`)"


def _head_size(config: Any) -> int:
    return int(config.hidden_size // config.num_attention_heads)


_ALL: Final[dict[str, Any]] = {
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "attention_head_size": _head_size,
    "hidden_size": "hidden_size",
    "initializer_range": "initializer_range",
    "use_normal_initialization": True,
}
_DECODER: Final[dict[str, Any]] = {
    **_ALL,
    "vocab_size": "vocab_size",
    "num_positions": 0,
    "causal_mask_size": "max_position_embeddings",
    "pre_layernorm": True,
    "post_layernorm": False,
    "tie_lm_head": "tie_word_embeddings",
    "whole_logits": False,
}
_LIKE_GPT2: Final[dict[str, Any]] = {
    **_DECODER,
    "intermediate_size": lambda config: config.n_inner or 4 * config.n_embd,
    "attention_dropout_prob": "attn_pdrop",
    "hidden_dropout_prob": "resid_pdrop",
    "embedding_dropout_prob": "embd_pdrop",
    "activation": "activation_function",
    "layernorm_epsilon": "layer_norm_epsilon",
    "masks_are_whole": True,
}

# --- the table --------------------------------------------------------------------------------------------------------

BERT: Final = Family(
    classes={"transformers.models.bert.modeling_bert.BertEncoder": {}},
    kind=_ENCODER,
    arguments={
        **_ALL,
        "intermediate_size": "intermediate_size",
        "attention_dropout_prob": "attention_probs_dropout_prob",
        "hidden_dropout_prob": "hidden_dropout_prob",
        "activation": "hidden_act",
        "layernorm_epsilon": "layer_norm_eps",
        "pre_layernorm": False,
        "post_layernorm": True,
    },
    inside="encoder",
    layers="layer",
    in_layers={
        "attention.query_key_value": tuple(f"attention.self.{kind}" for kind in ("query", "key", "value")),
        "attention.dense": "attention.output.dense",
        "attention.layernorm": "attention.output.LayerNorm",
        "output.dense1": "intermediate.dense",
        "output.dense2": "output.dense",
        "output.layernorm": "output.LayerNorm",
    },
    refusal=_refuse_decoder,
)

ROBERTA: Final = replace(BERT, classes={"transformers.models.roberta.modeling_roberta.RobertaEncoder": {}})

GPT2: Final = Family(
    classes={
        "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel": {},
        "transformers.models.gpt2.modeling_gpt2.GPT2Model": {"add_lm_head": False, "tie_lm_head": False},
    },
    kind=_LANGUAGE_MODEL,
    arguments={
        **_LIKE_GPT2,
        "num_positions": "n_positions",
        "add_cross_attention": "add_cross_attention",
        "scale_attention_scores": "scale_attn_weights",
        "scale_attn_by_layer_idx": "scale_attn_by_inverse_layer_idx",
        "attention_in_fp32": "reorder_and_upcast_attn",
    },
    base="transformer.",
    outside={"word_embedding": "wte", "position_embedding": "wpe", "layernorm": "ln_f"},
    layers="h",
    in_layers={
        "attention.pre_layernorm": "ln_1",
        "attention.query_key_value": transposed("attn.c_attn"),
        "attention.dense": transposed("attn.c_proj"),
        "cross_attention.pre_layernorm": "ln_cross_attn",
        "cross_attention.query": transposed("crossattention.q_attn"),
        "cross_attention.key_value": transposed("crossattention.c_attn"),
        "cross_attention.dense": transposed("crossattention.c_proj"),
        "output.pre_layernorm": "ln_2",
        "output.dense1": transposed("mlp.c_fc"),
        "output.dense2": transposed("mlp.c_proj"),
    },
    buffers=(".attn.bias", ".attn.masked_bias", ".crossattention.bias", ".crossattention.masked_bias"),
    masks="attn",
    is_tied=True,
)

GPTJ: Final = Family(
    classes={"transformers.models.gptj.modeling_gptj.GPTJForCausalLM": {}},
    kind=_LANGUAGE_MODEL,
    arguments={
        **_LIKE_GPT2,
        "lm_head_bias": True,
        "parallel_residual": True,
        "query_key_value_bias": False,
        "attention_dense_bias": False,
        "rotary_dim": "rotary_dim",
        "rotary_interleaved": True,
        "attention_in_fp32": True,
    },
    base="transformer.",
    outside={"word_embedding": "wte", "layernorm": "ln_f"},
    layers="h",
    in_layers={
        "attention.pre_layernorm": "ln_1",
        "attention.query_key_value": tuple(f"attn.{kind}_proj" for kind in "qkv"),
        "attention.dense": "attn.out_proj",
        "output.dense1": "mlp.fc_in",
        "output.dense2": "mlp.fc_out",
    },
    buffers=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions"),
    masks="attn",
    refusal=lambda config: (
        None if config.rotary_dim else "it rotates features of all heads together (`rotary_dim` is None)"
    ),
)

GPT_NEO: Final = Family(
    classes={"transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoForCausalLM": {}},
    kind=_LANGUAGE_MODEL,
    arguments={
        **_DECODER,
        "intermediate_size": lambda config: config.intermediate_size or 4 * config.hidden_size,
        "num_positions": "max_position_embeddings",
        "attention_dropout_prob": "attention_dropout",
        "hidden_dropout_prob": "resid_dropout",
        "embedding_dropout_prob": "embed_dropout",
        "activation": "activation_function",
        "layernorm_epsilon": "layer_norm_epsilon",
        "window_sizes": lambda config: [
            config.window_size if kind == "local" else None for kind in config.attention_layers
        ],
        "scale_attention_scores": False,
        "query_key_value_bias": False,
        "attention_in_fp32": True,
    },
    base="transformer.",
    outside={"word_embedding": "wte", "position_embedding": "wpe", "layernorm": "ln_f"},
    layers="h",
    in_layers={
        "attention.pre_layernorm": "ln_1",
        "attention.query_key_value": tuple(f"attn.attention.{kind}_proj" for kind in "qkv"),
        "attention.dense": "attn.attention.out_proj",
        "output.pre_layernorm": "ln_2",
        "output.dense1": "mlp.c_fc",
        "output.dense2": "mlp.c_proj",
    },
    buffers=(".attn.attention.bias", ".attn.attention.masked_bias"),
    masks="attn.attention",
    windows=(None, 256),
    is_tied=True,
)

GPT_NEOX: Final = Family(
    classes={"transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXForCausalLM": {}},
    kind=_LANGUAGE_MODEL,
    arguments={
        **_DECODER,
        "intermediate_size": "intermediate_size",
        "attention_dropout_prob": "attention_dropout",
        "hidden_dropout_prob": "hidden_dropout",
        "activation": "hidden_act",
        "layernorm_epsilon": "layer_norm_eps",
        "parallel_residual": "use_parallel_residual",
        "parallel_layernorm": "use_parallel_residual",
        "query_key_value_bias": "attention_bias",
        "attention_dense_bias": "attention_bias",
        "rotary_dim": lambda config: int(_head_size(config) * _rope(config)["partial_rotary_factor"]),
        "rotary_base": lambda config: _rope(config)["rope_theta"],
        "masks_are_whole": True,
    },
    base="gpt_neox.",
    outside={"word_embedding": "embed_in", "layernorm": "final_layer_norm"},
    layers="layers",
    in_layers={
        "attention.pre_layernorm": "input_layernorm",
        "attention.query_key_value": by_head("attention.query_key_value"),
        "attention.dense": "attention.dense",
        "output.pre_layernorm": "post_attention_layernorm",
        "output.dense1": "mlp.dense_h_to_4h",
        "output.dense2": "mlp.dense_4h_to_h",
    },
    older_head="embed_out",
    buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    masks="attention",
    refusal=_refuse_rotation,
)

FAMILIES: Final = (BERT, ROBERTA, GPT2, GPTJ, GPT_NEO, GPT_NEOX)

for _family in FAMILIES:
    for _original, _more in _family.classes.items():
        register(_rule(_family, _original, _more))
