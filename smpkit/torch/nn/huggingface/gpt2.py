"""GPT-2: `GPT2LMHeadModel` and `GPT2Model` become `smp.nn.DistributedTransformerLMHead`."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from smpkit.torch.nn.huggingface.heads import LM_HEAD_CALLS, HuggingFaceLMHead, register_model
from smpkit.torch.nn.huggingface.names import WeightMapping, rename, same, transposed, with_causal_masks

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_state_dict_to_hf_gpt2",
]

_BUFFERS: Final = (".attn.bias", ".attn.masked_bias", ".crossattention.bias", ".crossattention.masked_bias")


def _names(prefix: str) -> list[WeightMapping]:
    ours, theirs = "transformer.seq_layers.*", f"{prefix}h.*"
    return [
        *same("word_embedding", f"{prefix}wte"),
        *same("position_embedding", f"{prefix}wpe"),
        *same(f"{ours}.attention.pre_layernorm", f"{theirs}.ln_1"),
        *transposed(f"{ours}.attention.query_key_value", f"{theirs}.attn.c_attn"),
        *transposed(f"{ours}.attention.dense", f"{theirs}.attn.c_proj"),
        *same(f"{ours}.cross_attention.pre_layernorm", f"{theirs}.ln_cross_attn"),
        *transposed(f"{ours}.cross_attention.query", f"{theirs}.crossattention.q_attn"),
        *transposed(f"{ours}.cross_attention.key_value", f"{theirs}.crossattention.c_attn"),
        *transposed(f"{ours}.cross_attention.dense", f"{theirs}.crossattention.c_proj"),
        *same(f"{ours}.output.pre_layernorm", f"{theirs}.ln_2"),
        *transposed(f"{ours}.output.dense1", f"{theirs}.mlp.c_fc"),
        *transposed(f"{ours}.output.dense2", f"{theirs}.mlp.c_proj"),
        *same("layernorm", f"{prefix}ln_f"),
        *same("lm_head", "lm_head"),
    ]


def translate_hf_state_dict_to_smdistributed_gpt2(
    state_dict: dict[str, Any],
    max_seq_len: int | None = None,  # noqa: ARG001 - only masks depend on it
) -> dict[str, Any]:
    """Return the state dict of the distributed model from that of Hugging Face's, which is emptied.

    Args:
        max_seq_len: accepted for compatibility.
    """
    return rename(state_dict, _names("transformer."), to_hf=False, dropped=_BUFFERS, tied=True)


def translate_state_dict_to_hf_gpt2(state_dict: dict[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """Return the state dict of Hugging Face's model from the distributed one's, which is emptied.

    Args:
        max_seq_len: add the causal masks for sequences of this length that older versions of `transformers` keep as
            buffers; None for newer ones, which do not.
    """
    return with_causal_masks(
        rename(state_dict, _names("transformer."), to_hf=True), "transformer.h.*.attn", max_seq_len
    )


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
"""The name before version 1.10."""


def _arguments(config: Any) -> dict[str, Any]:
    return {
        "num_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "attention_head_size": config.n_embd // config.n_head,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "vocab_size": config.vocab_size,
        "num_positions": config.n_positions,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "causal_mask_size": config.n_positions,
        "add_cross_attention": config.add_cross_attention,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "tie_lm_head": config.tie_word_embeddings,
        "whole_logits": False,
        "scale_attention_scores": config.scale_attn_weights,
        "scale_attn_by_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "attention_in_fp32": config.reorder_and_upcast_attn,
        "masks_are_whole": True,
    }


def _names_of(module: nn.Module) -> list[WeightMapping]:
    assert isinstance(module, HuggingFaceLMHead)
    return _names("" if module.lm_head is None else "transformer.")


_PLACE: Final = "transformers.models.gpt2.modeling_gpt2"
register_model(f"{_PLACE}.GPT2LMHeadModel", HuggingFaceLMHead, _arguments, LM_HEAD_CALLS, _names_of)
register_model(
    f"{_PLACE}.GPT2Model",
    HuggingFaceLMHead,
    lambda config: {**_arguments(config), "add_lm_head": False, "tie_lm_head": False},
    LM_HEAD_CALLS,
    _names_of,
)
