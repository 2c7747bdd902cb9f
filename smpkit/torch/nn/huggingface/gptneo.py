"""What SMP v1 called the translation of GPT-Neo's state dicts: Family.to_distributed, Family.to_hugging_face."""

from __future__ import annotations

from smpkit.torch.nn.huggingface.families import GPT_NEO

__all__ = ["translate_hf_state_dict_to_smdistributed_gptneo", "translate_state_dict_to_hf_gptneo"]

translate_hf_state_dict_to_smdistributed_gptneo = GPT_NEO.to_distributed
translate_state_dict_to_hf_gptneo = GPT_NEO.to_hugging_face
