"""State dicts of Hugging Face models become those of distributed models and come back the same, tensor by tensor."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import smpkit.torch as smp
from smpkit.errors import UnsupportedError
from smpkit.torch.nn.huggingface.families import BERT
from tests.models_of_others import DIVISIBLE, divisible
from tests.torch.steps import on_ranks
from tests.train import batch

hf = smp.nn.huggingface


def state_of(name: str) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in DIVISIBLE[name].build().state_dict().items()}


@pytest.mark.parametrize("name", ["GPT2", "GPTJ", "GPTNeo", "Bert", "Roberta"])
def test_there_and_back(name: str) -> None:
    """With the length that public scripts pass: a dict for today's models has no masks of that size (B5)."""
    family = name.lower()
    module = importlib.import_module(f"smpkit.torch.nn.huggingface.{family}")
    state = state_of(name)
    ours = getattr(module, f"translate_hf_state_dict_to_smdistributed_{family}")(dict(state), 12)
    assert any("seq_layers.1.output.dense2.weight" in key for key in ours)
    assert not any(".h.1." in key or "layer.1." in key for key in ours)
    again = getattr(module, f"translate_state_dict_to_hf_{family}")(dict(ours), 12)
    assert again.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(again[key], value), key


def test_the_input_is_consumed_and_masks_of_older_models_are_left_out() -> None:
    state = state_of("GPT2")
    older: dict[str, Any] = {**state, "transformer.h.1.attn.bias": torch.ones(1, 1, 5, 5)}
    ours = hf.gpt2.translate_hf_state_dict_to_smdistributed_gpt2(older)
    assert not older
    assert hf.gpt2.translate_state_dict_to_hf_gpt2(ours).keys() == state.keys()


def test_a_head_left_out_because_it_is_tied() -> None:
    """Files of safetensors hold shared tensors once."""
    state = state_of("GPT2")
    del state["lm_head.weight"]
    ours = hf.gpt2.translate_hf_state_dict_to_smdistributed(state)
    assert torch.equal(ours["lm_head.weight"], ours["word_embedding.weight"])


OF_PUBLIC_SCRIPTS = """
gpt2.get_hf_gpt2_transformer_layer_hooks
gpt2.translate_hf_block_state_dict_to_smdistributed
gpt2.translate_hf_state_dict_to_smdistributed
gpt2.translate_layer_state_dict_to_hf_gpt2_block
gptj.translate_gptj_state_dict_to_smdistributed
gptj.translate_hf_gptj_state_dict_to_smdistributed
gptj.translate_hf_gptj_state_dict_to_smdistributed_gptj
gptneo.translate_hf_gptneo_state_dict_to_smdistributed
roberta.translate_state_dict_to_smdistributed
"""


def test_public_scripts_find_their_functions() -> None:
    for name in OF_PUBLIC_SCRIPTS.split():
        module, _, function = name.partition(".")
        assert callable(getattr(importlib.import_module(f"smpkit.torch.nn.huggingface.{module}"), function)), name


@pytest.mark.parametrize("registers", [False, True])
@on_ranks(2)
def test_blocks_of_gpt2_are_divided_one_by_one(registers: bool) -> None:
    """Divide blocks as AWS's gpt2-custom script does: they are registered after the model has been created."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    smp.init({"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True})
    scaled = divisible("GPT2", "LMHeadModel", scale_attn_by_inverse_layer_idx=True)
    plain: Any = scaled.build()
    module: Any = scaled.build()
    smp.set_tensor_parallelism(module.transformer.h, True)
    if registers:
        hooks = hf.gpt2.get_hf_gpt2_transformer_layer_hooks()
        smp.tp_register_with_module(GPT2Block, smp.nn.DistributedTransformerLayer, *hooks)
    model: Any = smp.DistributedModel(module)
    assert isinstance(module.transformer.h[1], smp.nn.DistributedTransformerLayer)
    whole = dict(plain.state_dict())
    model.load_state_dict(hf.gpt2.translate_hf_block_state_dict_to_smdistributed(dict(whole), 12))
    tokens, mask, labels = batch(DIVISIBLE["GPT2"], 0, 4)
    with pytest.raises(UnsupportedError, match="keeps no cache"):
        model(input_ids=tokens)
    plain.config.use_cache = module.config.use_cache = False
    expected = plain(input_ids=tokens, attention_mask=mask, labels=labels).loss
    loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    theirs = hf.gpt2.translate_layer_state_dict_to_hf_gpt2_block(model.state_dict(), 12)
    assert theirs.keys() == whole.keys()
    assert all(torch.equal(theirs[key], value) for key, value in whole.items())
    smp.shutdown()


def test_a_decoder_is_not_replaced_as_an_encoder() -> None:
    config = pytest.importorskip("transformers").BertConfig(is_decoder=True)
    assert BERT.refusal(config) == "it is a decoder"
