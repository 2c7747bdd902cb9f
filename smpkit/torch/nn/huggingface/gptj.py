"""GPT-J: `GPTJForCausalLM` becomes `smp.nn.DistributedTransformerLMHead`, its attention rotated and beside its MLP."""

from __future__ import annotations

from typing import Any, Final

from smpkit.torch.nn.huggingface.heads import LM_HEAD_CALLS, HuggingFaceLMHead, register_model
from smpkit.torch.nn.huggingface.names import WeightMapping, packed, rename, same, with_causal_masks

__all__ = [
    "translate_gptj_state_dict_to_smdistributed",
    "translate_hf_gptj_state_dict_to_smdistributed",
    "translate_hf_gptj_state_dict_to_smdistributed_gptj",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf_gptj",
]

_BUFFERS: Final = (".attn.bias", ".attn.masked_bias", ".attn.embed_positions")


def _names() -> list[WeightMapping]:
    ours, theirs = "transformer.seq_layers.*", "transformer.h.*"
    return [
        *same("word_embedding", "transformer.wte"),
        *same(f"{ours}.attention.pre_layernorm", f"{theirs}.ln_1"),
        *packed(f"{ours}.attention.query_key_value", [f"{theirs}.attn.{each}_proj" for each in "qkv"]),
        *same(f"{ours}.attention.dense", f"{theirs}.attn.out_proj"),
        *same(f"{ours}.output.dense1", f"{theirs}.mlp.fc_in"),
        *same(f"{ours}.output.dense2", f"{theirs}.mlp.fc_out"),
        *same("layernorm", "transformer.ln_f"),
        *same("lm_head", "lm_head"),
    ]


def translate_hf_state_dict_to_smdistributed_gptj(
    state_dict: dict[str, Any],
    max_seq_len: int | None = None,  # noqa: ARG001 - only masks depend on it
) -> dict[str, Any]:
    """Return the state dict of the distributed model from that of Hugging Face's, which is emptied.

    Args:
        max_seq_len: accepted for compatibility.
    """
    return rename(state_dict, _names(), to_hf=False, dropped=_BUFFERS)


def translate_state_dict_to_hf_gptj(state_dict: dict[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """Return the state dict of Hugging Face's model from the distributed one's, which is emptied.

    Args:
        max_seq_len: add the causal masks for sequences of this length that older versions of `transformers` keep as
            buffers; None for newer ones, which do not.
    """
    return with_causal_masks(rename(state_dict, _names(), to_hf=True), "transformer.h.*.attn", max_seq_len)


translate_hf_gptj_state_dict_to_smdistributed_gptj = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
"""Names that scripts of the time use."""


def _arguments(config: Any) -> dict[str, Any]:
    return {
        "num_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "attention_head_size": config.n_embd // config.n_head,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "vocab_size": config.vocab_size,
        "num_positions": 0,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "causal_mask_size": config.n_positions,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "tie_lm_head": config.tie_word_embeddings,
        "lm_head_bias": True,
        "whole_logits": False,
        "parallel_residual": True,
        "query_key_value_bias": False,
        "attention_dense_bias": False,
        "rotary_dim": config.rotary_dim or config.n_embd // config.n_head,
        "rotary_interleaved": True,
        "attention_in_fp32": True,
        "masks_are_whole": True,
    }


def _refusal(config: Any) -> str | None:
    return None if config.rotary_dim else "it rotates features of all heads together (`rotary_dim` is None)"


register_model(
    "transformers.models.gptj.modeling_gptj.GPTJForCausalLM",
    HuggingFaceLMHead,
    _arguments,
    LM_HEAD_CALLS,
    lambda _: _names(),
    _refusal,
)
