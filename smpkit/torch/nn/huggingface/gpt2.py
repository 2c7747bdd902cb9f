"""What SMP v1 called the translation of GPT-2's state dicts: Family.to_distributed, Family.to_hugging_face."""

from __future__ import annotations

from smpkit.torch.nn.huggingface.families import GPT2

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_state_dict_to_hf_gpt2",
]

translate_hf_state_dict_to_smdistributed_gpt2 = GPT2.to_distributed
translate_hf_state_dict_to_smdistributed = GPT2.to_distributed
translate_state_dict_to_hf_gpt2 = GPT2.to_hugging_face
