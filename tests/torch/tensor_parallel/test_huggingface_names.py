"""State dicts of Hugging Face models become those of distributed models and come back the same, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import smpkit.torch as smp
from smpkit.errors import UsageError
from tests.models_of_others import DIVISIBLE

Translate = Callable[..., dict[str, Any]]

hf = smp.nn.huggingface
HEADS: dict[str, Any] = {"num_attention_heads": 4}
FAMILIES: dict[str, tuple[Translate, Translate, dict[str, Any]]] = {
    "GPT2": (hf.gpt2.translate_hf_state_dict_to_smdistributed_gpt2, hf.gpt2.translate_state_dict_to_hf_gpt2, {}),
    "GPTJ": (hf.gptj.translate_hf_state_dict_to_smdistributed_gptj, hf.gptj.translate_state_dict_to_hf_gptj, {}),
    "GPTNeo": (
        hf.gptneo.translate_hf_state_dict_to_smdistributed_gptneo,
        hf.gptneo.translate_state_dict_to_hf_gptneo,
        {},
    ),
    "GPTNeoX": (
        hf.gptneox.translate_hf_state_dict_to_smdistributed_gptneox,
        hf.gptneox.translate_state_dict_to_hf_gptneox,
        HEADS,
    ),
    "Bert": (hf.bert.translate_hf_state_dict_to_smdistributed_bert, hf.bert.translate_state_dict_to_hf_bert, {}),
    "Roberta": (
        hf.roberta.translate_hf_state_dict_to_smdistributed_roberta,
        hf.roberta.translate_state_dict_to_hf_roberta,
        {},
    ),
}


def state_of(name: str) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in DIVISIBLE[name].build().state_dict().items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back(name: str) -> None:
    there, to_hf, more = FAMILIES[name]
    state = state_of(name)
    ours = there(dict(state), **more)
    assert any("seq_layers.1.output.dense2.weight" in key for key in ours)
    assert not any(".h.1." in key or "layer.1." in key for key in ours)
    again = to_hf(dict(ours), **more)
    assert again.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(again[key], value), key


def test_the_input_is_consumed() -> None:
    state = state_of("GPT2")
    hf.gpt2.translate_hf_state_dict_to_smdistributed_gpt2(state)
    assert not state


def test_a_head_left_out_because_it_is_tied() -> None:
    """Files of safetensors hold shared tensors once."""
    state = state_of("GPT2")
    del state["lm_head.weight"]
    ours = hf.gpt2.translate_hf_state_dict_to_smdistributed(state)
    assert torch.equal(ours["lm_head.weight"], ours["word_embedding.weight"])


def test_causal_masks_of_older_versions() -> None:
    ours = hf.gpt2.translate_hf_state_dict_to_smdistributed_gpt2(state_of("GPT2"))
    theirs = hf.gpt2.translate_state_dict_to_hf_gpt2(dict(ours), max_seq_len=5)
    mask = theirs["transformer.h.1.attn.bias"]
    assert mask.shape == (1, 1, 5, 5)
    assert torch.equal(mask[0, 0], torch.ones(5, 5).tril().bool())
    again = hf.gpt2.translate_hf_state_dict_to_smdistributed_gpt2(theirs, max_seq_len=5)
    assert again.keys() == ours.keys()


def test_local_masks() -> None:
    ours = hf.gptneo.translate_hf_state_dict_to_smdistributed_gptneo(state_of("GPTNeo"))
    theirs = hf.gptneo.translate_state_dict_to_hf_gptneo(ours, max_seq_len=6, windows=(None, 3))
    local = theirs["transformer.h.1.attn.attention.bias"][0, 0]
    assert local[5].tolist() == [False, False, False, True, True, True]
    assert theirs["transformer.h.0.attn.attention.bias"][0, 0, 5].all()


def test_the_older_name_of_a_head() -> None:
    state = state_of("GPTNeoX")
    state["embed_out.weight"] = state.pop("lm_head.weight")
    head = state["embed_out.weight"]
    ours = hf.gptneox.translate_hf_state_dict_to_smdistributed_gptneox(dict(state), **HEADS)
    assert torch.equal(ours["lm_head.weight"], head)
    assert "embed_out.weight" in hf.gptneox.translate_state_dict_to_hf_gptneox(ours, max_seq_len=4, **HEADS)


def test_heads_that_lie_together_need_their_number() -> None:
    with pytest.raises(UsageError, match="give the model's `num_attention_heads`"):
        hf.gptneox.translate_hf_state_dict_to_smdistributed_gptneox(state_of("GPTNeoX"))
