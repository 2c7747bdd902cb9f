"""What SMP v1 called the translation of GPT-J's state dicts: Family.to_distributed, Family.to_hugging_face."""

from __future__ import annotations

from smpkit.torch.nn.huggingface.families import GPTJ

__all__ = [
    "translate_gptj_state_dict_to_smdistributed",
    "translate_hf_gptj_state_dict_to_smdistributed",
    "translate_hf_gptj_state_dict_to_smdistributed_gptj",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf_gptj",
]

translate_hf_state_dict_to_smdistributed_gptj = GPTJ.to_distributed
translate_hf_gptj_state_dict_to_smdistributed_gptj = GPTJ.to_distributed
translate_hf_gptj_state_dict_to_smdistributed = GPTJ.to_distributed
translate_gptj_state_dict_to_smdistributed = GPTJ.to_distributed
translate_state_dict_to_hf_gptj = GPTJ.to_hugging_face
