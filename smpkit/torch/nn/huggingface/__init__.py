"""`smp.nn.huggingface`: how Hugging Face's models and their state dicts become distributed ones.

Importing it imports no transformers. Its modules `gpt2`, `bert` and so on have the functions that scripts of SMP v1
call: each name of `_TRANSLATIONS` is Family.to_distributed, each `translate_state_dict_to_hf_...` is
Family.to_hugging_face.

Models whose own configuration says how they can be divided (Llama, Mistral, Qwen, ...) need nothing from here: see
smpkit.torch.tensor_parallel.plan.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from smpkit.torch.nn.huggingface import families
from smpkit.torch.nn.huggingface.families import BERT, GPT2, GPT_NEO, GPTJ, ROBERTA, Family

__all__ = ["bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta"]

_TRANSLATIONS = {
    "bert": (BERT, ["translate_state_dict_to_smdistributed"]),
    "gpt2": (GPT2, ["translate_hf_state_dict_to_smdistributed"]),
    "gptj": (
        GPTJ,
        [
            "translate_gptj_state_dict_to_smdistributed",
            "translate_hf_gptj_state_dict_to_smdistributed",
            "translate_hf_gptj_state_dict_to_smdistributed_gptj",
        ],
    ),
    "gptneo": (GPT_NEO, ["translate_hf_gptneo_state_dict_to_smdistributed"]),
    "roberta": (ROBERTA, ["translate_state_dict_to_smdistributed"]),
}
"""By module: its family, and the names besides `translate_hf_state_dict_to_smdistributed_...`."""


def _module_of(name: str, family: Family, more: list[str]) -> Any:
    module = sys.modules[f"{__name__}.{name}"] = ModuleType(f"{__name__}.{name}")
    to_distributed = dict.fromkeys([f"translate_hf_state_dict_to_smdistributed_{name}", *more], family.to_distributed)
    vars(module).update(to_distributed, **{f"translate_state_dict_to_hf_{name}": family.to_hugging_face})
    return module


def _same(state_dict: dict[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:  # noqa: ARG001
    """Return the state dict: tensor parallelism leaves GPT-NeoX's names as they are."""
    return state_dict


bert, gpt2, gptj, gptneo, roberta = (_module_of(name, *entry) for name, entry in _TRANSLATIONS.items())
vars(gpt2).update({name: getattr(families, name) for name in families.__all__ if "hf_" in name})
gptneox: Any = ModuleType(f"{__name__}.gptneox")
sys.modules[gptneox.__name__] = gptneox
gptneox.translate_hf_state_dict_to_smdistributed_gptneox = gptneox.translate_state_dict_to_hf_gptneox = _same
