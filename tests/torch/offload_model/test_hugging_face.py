"""Each family of Hugging Face models that is recognised trains as the plain model does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from smpkit import OffloadModel
from smpkit.errors import UnsupportedError, UsageError

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 4}
LIKE_LLAMA: dict[str, Any] = SIZES | {"intermediate_size": 32, "num_key_value_heads": 2}
GEMMA: dict[str, Any] = LIKE_LLAMA | {"head_dim": 4}
GPT2: dict[str, Any] = {"n_layer": 3, "n_embd": 16, "n_head": 4, "n_positions": 8}
OPT: dict[str, Any] = SIZES | {"ffn_dim": 32, "max_position_embeddings": 8}
MIXED: dict[str, Any] = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2}

# Dropout is at its default, which is not 0 in GPT-2, OPT and BERT; Phi, Falcon and BLOOM get some.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", SIZES | {"intermediate_size": 32, "max_position_embeddings": 8}),
    "bloom": ("BloomForCausalLM", "BloomConfig", SIZES | {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "falcon": ("FalconForCausalLM", "FalconConfig", SIZES | {"hidden_dropout": 0.1}),
    "falcon-alibi": ("FalconForCausalLM", "FalconConfig", SIZES | {"alibi": True, "parallel_attn": False}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", GEMMA),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GEMMA | {"sliding_window": 3}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA | MIXED | {"num_hidden_layers": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES | {"intermediate_size": 32, "hidden_dropout": 0.1}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LIKE_LLAMA),
    "mistral": ("MistralForCausalLM", "MistralConfig", LIKE_LLAMA | {"sliding_window": None}),
    "mistral-sliding": ("MistralForCausalLM", "MistralConfig", LIKE_LLAMA | {"sliding_window": 3}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        LIKE_LLAMA | {"num_local_experts": 4, "experts_implementation": "eager"},  # the other takes no float64
    ),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
    "opt-350m": ("OPTForCausalLM", "OPTConfig", OPT | {"word_embed_proj_dim": 8, "do_layer_norm_before": False}),
    "phi": ("PhiForCausalLM", "PhiConfig", LIKE_LLAMA | {"resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "qwen2-mixed": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        LIKE_LLAMA | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen2-tied": ("Qwen2ForCausalLM", "Qwen2Config", LIKE_LLAMA | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GEMMA),
}


def make(name: str, **more: Any) -> nn.Module:
    import transformers

    model, config, sizes = MODELS[name]
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    made: nn.Module = getattr(transformers, model)(
        getattr(transformers, config)(vocab_size=11, **special, **sizes, **more)
    )
    return made.double()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("place")
def test_it_trains_as_in_plain_scripts(name: str) -> None:
    """Accumulation, padding, labels, clipping, a schedule; to the bit, for the operations are the same."""
    plain = make(name)
    model = OffloadModel(copy.deepcopy(plain), CPU, num_slices=4, checkpoint_activation=True)
    assert len(model.model_slices) == 4
    losses: list[list[float]] = []
    for network in (plain, model):
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        torch.manual_seed(1)
        losses.append([])
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                tokens = torch.randint(3, 11, (4, 8))
                mask = torch.ones_like(tokens)
                mask[1, 6:] = 0
                loss = network(input_ids=tokens, attention_mask=mask, labels=tokens).loss / 2
                loss.backward()
                losses[-1].append(loss.item())
            torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    assert losses[0] == losses[1]
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    for network in (plain, model):
        network.eval()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, plain(tokens).logits)
    # Microbatches add up in another order, and some norms compute in float32.
    several = OffloadModel(copy.deepcopy(plain), CPU, CPU, 2, True, 3)
    for network in (plain, several):
        network.zero_grad()
        network(tokens, attention_mask=mask).logits.square().mean().backward()
    for p, q in zip(plain.parameters(), several.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "options"), [("opt", {"layerdrop": 0.5}), ("mixtral", {"output_router_logits": True})]
)
def test_what_blocks_cannot_do_apart_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"does not train a .* with {next(iter(options))}="):
        OffloadModel(make(name, **options), CPU)


def test_a_model_of_another_family_is_told_which_are_known() -> None:
    import transformers

    config = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(TypeError, match=r"is a BertModel: .*layers=\[.*it knows .*BertForMaskedLM"):
        OffloadModel(transformers.BertModel(config), CPU)


def test_blocks_that_only_the_config_leaves_out_are_named() -> None:
    plain: Any = make("llama")
    plain.config.num_hidden_layers = 2
    with pytest.raises(UsageError, match="a LlamaModel has called 2 of its 3 blocks"):
        OffloadModel(plain, CPU)(torch.ones(1, 4, dtype=torch.long))


def test_the_plain_model_is_whole_again_behind_a_forward() -> None:
    """Its own code runs with something else in the blocks' place, also where it fails."""
    plain: Any = make("gpt2")
    model = OffloadModel(plain, CPU)
    blocks = plain.transformer.h
    model(torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(IndexError):
        model(torch.full((1, 4), 99))
    assert plain.transformer.h is blocks
