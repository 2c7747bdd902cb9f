"""RoBERTa: the encoder in all its models becomes `smp.nn.DistributedTransformer`, as BERT's does."""

from __future__ import annotations

from smpkit.torch.nn.huggingface.bert import (
    register_encoder,
    translate_hf_state_dict_to_smdistributed_bert,
    translate_state_dict_to_hf_bert,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
    "translate_state_dict_to_smdistributed",
]

translate_hf_state_dict_to_smdistributed_roberta = translate_hf_state_dict_to_smdistributed_bert
translate_state_dict_to_hf_roberta = translate_state_dict_to_hf_bert
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
"""The name in scripts of the time."""

register_encoder("transformers.models.roberta.modeling_roberta.RobertaEncoder")
