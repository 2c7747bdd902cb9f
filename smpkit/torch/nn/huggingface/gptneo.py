"""GPT-Neo: `GPTNeoForCausalLM` becomes `smp.nn.DistributedTransformerLMHead`, some layers with local attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from smpkit.torch.nn.huggingface.heads import LM_HEAD_CALLS, HuggingFaceLMHead, register_model
from smpkit.torch.nn.huggingface.names import WeightMapping, packed, rename, same, with_causal_masks

__all__ = ["translate_hf_state_dict_to_smdistributed_gptneo", "translate_state_dict_to_hf_gptneo"]

_BUFFERS: Final = (".attn.attention.bias", ".attn.attention.masked_bias")


def _names() -> list[WeightMapping]:
    ours, theirs = "transformer.seq_layers.*", "transformer.h.*"
    return [
        *same("word_embedding", "transformer.wte"),
        *same("position_embedding", "transformer.wpe"),
        *same(f"{ours}.attention.pre_layernorm", f"{theirs}.ln_1"),
        *packed(f"{ours}.attention.query_key_value", [f"{theirs}.attn.attention.{each}_proj" for each in "qkv"]),
        *same(f"{ours}.attention.dense", f"{theirs}.attn.attention.out_proj"),
        *same(f"{ours}.output.pre_layernorm", f"{theirs}.ln_2"),
        *same(f"{ours}.output.dense1", f"{theirs}.mlp.c_fc"),
        *same(f"{ours}.output.dense2", f"{theirs}.mlp.c_proj"),
        *same("layernorm", "transformer.ln_f"),
        *same("lm_head", "lm_head"),
    ]


def translate_hf_state_dict_to_smdistributed_gptneo(
    state_dict: dict[str, Any],
    max_seq_len: int | None = None,  # noqa: ARG001 - only masks depend on it
) -> dict[str, Any]:
    """Return the state dict of the distributed model from that of Hugging Face's, which is emptied.

    Args:
        max_seq_len: accepted for compatibility.
    """
    return rename(state_dict, _names(), to_hf=False, dropped=_BUFFERS, tied=True)


def translate_state_dict_to_hf_gptneo(
    state_dict: dict[str, Any], max_seq_len: int | None = None, *, windows: Sequence[int | None] = (None, 256)
) -> dict[str, Any]:
    """Return the state dict of Hugging Face's model from the distributed one's, which is emptied.

    Args:
        max_seq_len: add the causal masks for sequences of this length that older versions of `transformers` keep as
            buffers; None for newer ones, which do not.
        windows: how far the attention of the layers sees in those masks, in turn; None in it for everything.
    """
    renamed = rename(state_dict, _names(), to_hf=True)
    return with_causal_masks(renamed, "transformer.h.*.attn.attention", max_seq_len, windows)


def _arguments(config: Any) -> dict[str, Any]:
    return {
        "num_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "attention_head_size": config.hidden_size // config.num_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_positions": config.max_position_embeddings,
        "attention_dropout_prob": float(config.attention_dropout),
        "hidden_dropout_prob": float(config.resid_dropout),
        "embedding_dropout_prob": float(config.embed_dropout),
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "causal_mask_size": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "tie_lm_head": config.tie_word_embeddings,
        "whole_logits": False,
        "window_sizes": [config.window_size if kind == "local" else None for kind in config.attention_layers],
        "scale_attention_scores": False,
        "query_key_value_bias": False,
        "attention_in_fp32": True,
    }


register_model(
    "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoForCausalLM",
    HuggingFaceLMHead,
    _arguments,
    LM_HEAD_CALLS,
    lambda _: _names(),
)
