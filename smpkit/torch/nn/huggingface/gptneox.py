"""GPT-NeoX: `GPTNeoXForCausalLM` becomes `smp.nn.DistributedTransformerLMHead`, its attention rotated."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from smpkit.torch.nn.huggingface.heads import LM_HEAD_CALLS, HuggingFaceLMHead, register_model
from smpkit.torch.nn.huggingface.names import WeightMapping, heads, rename, same, with_causal_masks

__all__ = ["translate_hf_state_dict_to_smdistributed_gptneox", "translate_state_dict_to_hf_gptneox"]

_BUFFERS: Final = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


def _names(num_heads: int, head: str = "lm_head") -> list[WeightMapping]:
    ours, theirs = "transformer.seq_layers.*", "gpt_neox.layers.*"
    return [
        *same("word_embedding", "gpt_neox.embed_in"),
        *same(f"{ours}.attention.pre_layernorm", f"{theirs}.input_layernorm"),
        *heads(f"{ours}.attention.query_key_value", f"{theirs}.attention.query_key_value", num_heads),
        *same(f"{ours}.attention.dense", f"{theirs}.attention.dense"),
        *same(f"{ours}.output.pre_layernorm", f"{theirs}.post_attention_layernorm"),
        *same(f"{ours}.output.dense1", f"{theirs}.mlp.dense_h_to_4h"),
        *same(f"{ours}.output.dense2", f"{theirs}.mlp.dense_4h_to_h"),
        *same("layernorm", "gpt_neox.final_layer_norm"),
        *same("lm_head", head),
    ]


def _names_of(module: nn.Module) -> list[WeightMapping]:
    assert isinstance(module, HuggingFaceLMHead)
    first: Any = module.transformer.seq_layers[0]
    return _names(first.attention.config.num_attention_heads)


def translate_hf_state_dict_to_smdistributed_gptneox(
    state_dict: dict[str, Any],
    max_seq_len: int | None = None,  # noqa: ARG001 - only masks depend on it
    *,
    num_attention_heads: int,
) -> dict[str, Any]:
    """Return the state dict of the distributed model from that of Hugging Face's, which is emptied.

    Args:
        max_seq_len: accepted for compatibility.
        num_attention_heads: of the model: Hugging Face keeps query, key and value of each head together.
    """
    head = "embed_out" if "embed_out.weight" in state_dict else "lm_head"  # the older name
    return rename(state_dict, _names(num_attention_heads, head), to_hf=False, dropped=_BUFFERS)


def translate_state_dict_to_hf_gptneox(
    state_dict: dict[str, Any], max_seq_len: int | None = None, *, num_attention_heads: int
) -> dict[str, Any]:
    """Return the state dict of Hugging Face's model from the distributed one's, which is emptied.

    Args:
        max_seq_len: add the causal masks for sequences of this length that older versions of `transformers` keep as
            buffers, and the older name of the head; None for newer ones.
        num_attention_heads: of the model: Hugging Face keeps query, key and value of each head together.
    """
    names = _names(num_attention_heads, "lm_head" if max_seq_len is None else "embed_out")
    return with_causal_masks(rename(state_dict, names, to_hf=True), "gpt_neox.layers.*.attention", max_seq_len)


def _arguments(config: Any) -> dict[str, Any]:
    head_size = config.hidden_size // config.num_attention_heads
    rope = _rope(config)
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": head_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_positions": 0,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.hidden_dropout,
        "activation": config.hidden_act,
        "layernorm_epsilon": config.layer_norm_eps,
        "causal_mask_size": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "tie_lm_head": config.tie_word_embeddings,
        "whole_logits": False,
        "parallel_residual": config.use_parallel_residual,
        "parallel_layernorm": config.use_parallel_residual,
        "query_key_value_bias": config.attention_bias,
        "attention_dense_bias": config.attention_bias,
        "rotary_dim": int(head_size * rope["partial_rotary_factor"]),
        "rotary_base": rope["rope_theta"],
        "masks_are_whole": True,
    }


def _rope(config: Any) -> dict[str, Any]:
    """Return how positions rotate; older configs keep it under other names."""
    older = {
        "rope_theta": getattr(config, "rotary_emb_base", 10000.0),
        "partial_rotary_factor": getattr(config, "rotary_pct", 1.0),
        "rope_type": (getattr(config, "rope_scaling", None) or {}).get("type", "default"),
    }
    return {**older, **(getattr(config, "rope_parameters", None) or {})}


def _refusal(config: Any) -> str | None:
    kind = _rope(config)["rope_type"]
    return None if kind == "default" else f"its positions rotate by `{kind}`"


register_model(
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXForCausalLM",
    HuggingFaceLMHead,
    _arguments,
    LM_HEAD_CALLS,
    _names_of,
    _refusal,
)
