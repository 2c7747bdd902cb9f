"""What SMP v1 called the translation of RoBERTa's state dicts: Family.to_distributed, Family.to_hugging_face."""

from __future__ import annotations

from smpkit.torch.nn.huggingface.families import ROBERTA

__all__ = [
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
    "translate_state_dict_to_smdistributed",
]

translate_hf_state_dict_to_smdistributed_roberta = ROBERTA.to_distributed
translate_state_dict_to_smdistributed = ROBERTA.to_distributed
translate_state_dict_to_hf_roberta = ROBERTA.to_hugging_face
