"""What SMP v1 called the translation of GPT-NeoX's state dicts: Family.to_distributed, Family.to_hugging_face."""

from __future__ import annotations

from smpkit.torch.nn.huggingface.families import GPT_NEOX

__all__ = ["translate_hf_state_dict_to_smdistributed_gptneox", "translate_state_dict_to_hf_gptneox"]

translate_hf_state_dict_to_smdistributed_gptneox = GPT_NEOX.to_distributed
translate_state_dict_to_hf_gptneox = GPT_NEOX.to_hugging_face
