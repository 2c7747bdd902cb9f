"""BERT: the encoder in all its models becomes `smp.nn.DistributedTransformer`."""

from __future__ import annotations

from typing import Any

from smpkit.torch.nn.huggingface.heads import ENCODER_CALLS, HuggingFaceEncoder, register_model
from smpkit.torch.nn.huggingface.names import WeightMapping, packed, rename_inside, same

__all__ = [
    "register_encoder",
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
    "translate_state_dict_to_smdistributed",
]


def encoder_names() -> list[WeightMapping]:
    """Return the names of the tensors of an encoder, from the encoder on."""
    ours, theirs = "seq_layers.*", "layer.*"
    kinds = ("query", "key", "value")
    return [
        *packed(f"{ours}.attention.query_key_value", [f"{theirs}.attention.self.{kind}" for kind in kinds]),
        *same(f"{ours}.attention.dense", f"{theirs}.attention.output.dense"),
        *same(f"{ours}.attention.layernorm", f"{theirs}.attention.output.LayerNorm"),
        *same(f"{ours}.output.dense1", f"{theirs}.intermediate.dense"),
        *same(f"{ours}.output.dense2", f"{theirs}.output.dense"),
        *same(f"{ours}.output.layernorm", f"{theirs}.output.LayerNorm"),
    ]


def translate_hf_state_dict_to_smdistributed_bert(
    state_dict: dict[str, Any],
    max_seq_len: int | None = None,  # noqa: ARG001 - only masks depend on it
) -> dict[str, Any]:
    """Return the state dict of the distributed model from that of Hugging Face's, which is emptied.

    Args:
        max_seq_len: accepted for compatibility.
    """
    return rename_inside(state_dict, encoder_names(), "encoder", to_hf=False)


def translate_state_dict_to_hf_bert(
    state_dict: dict[str, Any],
    max_seq_len: int | None = None,  # noqa: ARG001 - only masks depend on it
) -> dict[str, Any]:
    """Return the state dict of Hugging Face's model from the distributed one's, which is emptied.

    Args:
        max_seq_len: accepted for compatibility: there are no causal masks.
    """
    return rename_inside(state_dict, encoder_names(), "encoder", to_hf=True)


translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
"""The name in scripts of the time."""


def _arguments(config: Any) -> dict[str, Any]:
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": config.hidden_act,
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": False,
        "post_layernorm": True,
    }


def _refusal(config: Any) -> str | None:
    if config.is_decoder or config.add_cross_attention:
        return "it is a decoder"
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    return None if kind == "absolute" else f"its attention knows of positions (`{kind}`)"


def register_encoder(original: str) -> None:
    """Let an encoder that is made as BERT's be replaced."""
    register_model(original, HuggingFaceEncoder, _arguments, ENCODER_CALLS, lambda _: encoder_names(), _refusal)


register_encoder("transformers.models.bert.modeling_bert.BertEncoder")
