"""What SMP v1 called the translation of BERT's state dicts: Family.to_distributed, Family.to_hugging_face."""

from __future__ import annotations

from smpkit.torch.nn.huggingface.families import BERT

__all__ = [
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
    "translate_state_dict_to_smdistributed",
]

translate_hf_state_dict_to_smdistributed_bert = BERT.to_distributed
translate_state_dict_to_smdistributed = BERT.to_distributed
translate_state_dict_to_hf_bert = BERT.to_hugging_face
