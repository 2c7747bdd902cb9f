"""The families of Hugging Face's models that become modules of `smp.nn`: all that is special to one is its entry here.

An entry says which classes are replaced, of what the distributed module is made, and what its weights are called there.
To add a family, add one to FAMILIES. Models whose own configuration says how they can be divided need none.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.nn.huggingface.heads import HuggingFaceEncoder, HuggingFaceLMHead, refuse_others
from smpkit.torch.nn.huggingface.names import Layers, Names, names_of_tensors, rename, translation, transposed
from smpkit.torch.recompute.api import set_activation_checkpointing
from smpkit.torch.tensor_parallel.layers.config import TransformerConfig
from smpkit.torch.tensor_parallel.layers.transformer import DistributedTransformer, DistributedTransformerLayer
from smpkit.torch.tensor_parallel.registry import CallArguments, ReplacementRule, argument_names, register

__all__ = [
    "BERT",
    "FAMILIES",
    "GPT2",
    "GPTJ",
    "GPT_NEO",
    "ROBERTA",
    "Family",
    "get_hf_gpt2_transformer_layer_hooks",
    "translate_hf_block_state_dict_to_smdistributed",
    "translate_layer_state_dict_to_hf_gpt2_block",
]


@dataclass(frozen=True)
class Family:
    """How models of one family become distributed ones.

    Args:
        module: what they become.
        classes: the qualified names of those that are replaced, each with the arguments that are not the family's.
        arguments: fields of the TransformerConfig. A string is the attribute of the model's config to read, a function
            is called with that config, and any other value is taken as it is.
        layers: the list of layers, in the model without its head.
        in_layers: what the layers in each of them are called there, by our names.
        outside: the same for those outside of the list, but for the head.
        base: the attribute (with a dot) in which a model with a head has the one without.
        is_tied: a state dict without a head has the word embedding for one.
        inside: modules in state dicts that are to be translated, at any depth; empty: the whole.
        refusal: why a model of this config cannot be replaced; None if it can.
    """

    module: type[nn.Module]
    classes: Mapping[str, Mapping[str, Any]]
    arguments: Mapping[str, Any]
    layers: str
    in_layers: Layers
    outside: Layers = field(default_factory=dict)
    base: str = ""
    is_tied: bool = False
    inside: str = ""
    refusal: Callable[[Any], str | None] = lambda _: None

    def to_distributed(self, state_dict: dict[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Return the state dict of the distributed model from that of Hugging Face's, which is emptied.

        Scripts pass `max_seq_len`, because older models kept causal masks of this size.
        """
        renamed = rename(state_dict, self.names(self.base), to_hf=False, inside=self.inside)
        if self.is_tied and "word_embedding.weight" in renamed:
            renamed.setdefault("lm_head.weight", renamed["word_embedding.weight"])
        return renamed

    def to_hugging_face(self, state_dict: dict[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Return the state dict of Hugging Face's model from the distributed one's, which is emptied."""
        return rename(state_dict, self.names(self.base), to_hf=True, inside=self.inside)

    def names(self, base: str) -> Names:
        """Return the names of the tensors of a distributed module; `base` is empty for a model without a head."""
        ours = "transformer.seq_layers" if issubclass(self.module, HuggingFaceLMHead) else "seq_layers"
        return {
            **names_of_tensors("", base, self.outside),
            **names_of_tensors(f"{ours}.*.", f"{base}{self.layers}.*.", self.in_layers),
            **names_of_tensors("", "", {"lm_head": "lm_head"}),
        }

    def arguments_of(self, config: Any, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the TransformerConfig for a model's config."""
        return {name: _read(config, how) for name, how in {**self.arguments, **more}.items()}


def _read(config: Any, how: Any) -> Any:
    if isinstance(how, str):
        return getattr(config, how)
    return how(config) if callable(how) else how


def _rule(family: Family, original: str, more: Mapping[str, Any]) -> ReplacementRule:
    def refusal(module: nn.Module) -> str | None:
        config: Any = module.config
        reason = family.refusal(config)
        if reason is None:
            try:
                TransformerConfig(**family.arguments_of(config, more))
            except UsageError as error:
                reason = error.message
        return reason

    names = family.names(family.base if more.get("add_lm_head", True) else "")
    return ReplacementRule(
        original,
        family.module,
        init_hook=lambda config: ((), family.arguments_of(config, more)),
        arguments=lambda module: ((module.config,), {}),
        to_distributed=translation(names, to_hf=False),
        from_distributed=translation(names, to_hf=True),
        finish=_hand_over,
        refusal=refusal,
    )


def _hand_over(original: nn.Module, distributed: nn.Module) -> None:
    for name in ("config", "generation_config"):
        if hasattr(original, name):
            object.__setattr__(distributed, name, getattr(original, name))
    _go_on_checkpointing(original, distributed)


def _go_on_checkpointing(original: nn.Module, distributed: nn.Module) -> None:
    # Hugging Face's Trainer calls `gradient_checkpointing_enable()` before it wraps the model.
    if any(getattr(module, "gradient_checkpointing", False) for module in original.modules()):
        stacks = (module.seq_layers for module in distributed.modules() if isinstance(module, DistributedTransformer))
        set_activation_checkpointing(next(stacks, distributed))


# --- what several families share --------------------------------------------------------------------------------------


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
    module=HuggingFaceEncoder,
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
    module=HuggingFaceLMHead,
    arguments={
        **_LIKE_GPT2,
        "num_positions": "n_positions",
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
        "output.pre_layernorm": "ln_2",
        "output.dense1": transposed("mlp.c_fc"),
        "output.dense2": transposed("mlp.c_proj"),
    },
    is_tied=True,
    refusal=lambda config: "it has cross attention" if config.add_cross_attention else None,
)

GPTJ: Final = Family(
    classes={"transformers.models.gptj.modeling_gptj.GPTJForCausalLM": {}},
    module=HuggingFaceLMHead,
    arguments={
        **_LIKE_GPT2,
        "lm_head_bias": True,
        "parallel_residual": True,
        "query_key_value_bias": False,
        "attention_dense_bias": False,
        "rotary_dim": "rotary_dim",
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
    refusal=lambda config: (
        None if config.rotary_dim else "it rotates features of all heads together (`rotary_dim` is None)"
    ),
)

GPT_NEO: Final = Family(
    classes={"transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoForCausalLM": {}},
    module=HuggingFaceLMHead,
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
    is_tied=True,
)

FAMILIES: Final = (BERT, ROBERTA, GPT2, GPTJ, GPT_NEO)

for _family in FAMILIES:
    for _original, _more in _family.classes.items():
        register(_rule(_family, _original, _more))

# --- GPT-2's blocks, one by one ---------------------------------------------------------------------------------------
# A public script of SMP v1 registers them, and keeps the rest of the model as it is:
#
#     smp.set_tensor_parallelism(model.transformer.h)
#     smp.tp_register_with_module(GPT2Block, DistributedTransformerLayer, *get_hf_gpt2_transformer_layer_hooks())
#
# They keep their names, `transformer.h.0` say; what is inside of one is a layer of `smp.nn`.

_MODULE: Final = "transformers.models.gpt2.modeling_gpt2"
_IN_BLOCK: Final = names_of_tensors("", "", GPT2.in_layers)
_IN_LIST: Final = names_of_tensors("*.", "*.", GPT2.in_layers)


def get_hf_gpt2_transformer_layer_hooks() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the hooks for `__init__`, for `forward` and for its result, as `smp.tp_register` takes them."""
    return _arguments_of_layer, _arguments_of_call, _result_of_block


def translate_hf_block_state_dict_to_smdistributed(
    state_dict: dict[str, Any],
    max_seq_len: int | None = None,  # noqa: ARG001  as in Family.to_distributed
) -> dict[str, Any]:
    """Return the state dict of a model whose blocks are distributed from that of Hugging Face's, which is emptied."""
    return rename(state_dict, _IN_LIST, to_hf=False, inside="h")


def translate_layer_state_dict_to_hf_gpt2_block(
    state_dict: dict[str, Any],
    max_seq_len: int | None = None,  # noqa: ARG001  as in Family.to_distributed
) -> dict[str, Any]:
    """Return the state dict of Hugging Face's model from that of one whose blocks are distributed, which is emptied."""
    return rename(state_dict, _IN_LIST, to_hf=True, inside="h")


def _arguments_of_layer(config: Any, layer_idx: int | None = None) -> CallArguments:
    arguments = {**GPT2.arguments_of(config, {}), "layer_idx": layer_idx}
    taken = argument_names(DistributedTransformerLayer)
    return (), {name: value for name, value in arguments.items() if name in taken}


def _arguments_of_call(*args: Any, **kwargs: Any) -> CallArguments:
    call = _signature_of_block().bind(None, *args, **kwargs).arguments
    others = {**call.pop("kwargs", {}), **call}
    hidden, mask = others.pop("hidden_states"), others.pop("attention_mask", None)
    if others.pop("past_key_values", None) is not None:
        raise UnsupportedError("a block of GPT-2 that is distributed keeps no cache", hint="set `use_cache = False`")
    for name in ("self", "use_cache", "position_ids", "cache_position"):  # of no importance to a block without a cache
        others.pop(name, None)
    refuse_others(others, None)
    return ((hidden, mask),), {}


def _result_of_block(result: tuple[torch.Tensor, ...]) -> Any:
    """Return hidden states, or in releases whose blocks return more the tuple that begins with them."""
    return result[0] if _signature_of_block().return_annotation is torch.Tensor else (result[0],)


def _signature_of_block() -> inspect.Signature:
    """Return the signature of a block's forward: arguments and result differ from release to release."""
    return inspect.signature(importlib.import_module(_MODULE).GPT2Block.forward)


def _arguments_of_block(block: Any) -> CallArguments:
    return (block.attn.config, block.attn.layer_idx), {}


def _refusal(block: Any) -> str | None:
    if not hasattr(block.attn, "config"):
        return "this release of transformers does not keep the configuration in it"
    return GPT2.refusal(block.attn.config)


register(
    ReplacementRule(
        f"{_MODULE}.GPT2Block",
        DistributedTransformerLayer,
        *get_hf_gpt2_transformer_layer_hooks(),
        arguments=_arguments_of_block,
        to_distributed=translation(_IN_BLOCK, to_hf=False),
        from_distributed=translation(_IN_BLOCK, to_hf=True),
        finish=_go_on_checkpointing,
        refusal=_refusal,
    )
)
