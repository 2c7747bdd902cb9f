"""Hugging Face models chosen for being new to pipelines train unmodified; all with `-m slow`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.models import Case, image_step
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, run_all
from tests.transparency.test_pipeline_huggingface import (
    BERT,
    GROUPED,
    IDS,
    LM,
    MASKED,
    NO_DROPOUT,
    PATCHES,
    PICTURES,
    SEQUENCES,
    STATES,
    TEXT,
    TWO_STACKS,
    WAVES,
    family,
    pictures,
    sound_step,
    waves,
)

SETUPS = [Setup(2, "interleaved", -1, (8, 8)), Setup(2, "simple", None, (8, 8))]
GPT: dict[str, Any] = {
    "vocab_size": 11,
    "n_embd": 8,
    "n_layer": 4,
    "n_head": 2,
    "n_positions": 16,
    **IDS,
} | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
EXPERTS: dict[str, Any] = {  # the other implementation of experts takes no float64
    "output_router_logits": True,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}

MODELS: dict[str, Case] = {
    "Bloom": family("Bloom", LM, {"vocab_size": 11, "hidden_size": 8, "n_layer": 4, "n_head": 2, **IDS}),
    "StableLM": family("StableLm", LM, GROUPED),
    "StarCoder 2": family("Starcoder2", LM, {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "GPT BigCode": family("GPTBigCode", LM, GPT),
    "CodeGen": family("CodeGen", LM, {**GPT, "n_embd": 32, "n_head": 4, "rotary_dim": 4, "n_ctx": 16}),
    "BioGPT": family("BioGpt", LM, {**TEXT, **NO_DROPOUT, "activation_dropout": 0.0, "layerdrop": 0.0}),
    "Qwen 2 MoE": family("Qwen2Moe", LM, {**GROUPED, "num_experts": 4, **EXPERTS}),
    "OLMoE": family("Olmoe", LM, {**GROUPED, "num_experts": 4, **EXPERTS}),
    "Falcon Mamba": family("FalconMamba", LM, {**STATES, "time_step_rank": 2}),
    "RWKV": family("Rwkv", LM, {**STATES, "attention_hidden_size": 8, "context_length": 16}),
    "MPNet": family("MPNet", MASKED, {**BERT, "pad_token_id": 1}),
    "RoFormer": family("RoFormer", MASKED, {**BERT, "embedding_size": 8}),
    "FNet": family("FNet", MASKED, {**BERT, "type_vocab_size": 2}),
    "MobileBERT": family(
        "MobileBert", MASKED, {**BERT, "embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8}
    ),
    "Pegasus": family("Pegasus", SEQUENCES, TWO_STACKS),
    "mBART": family("MBart", SEQUENCES, {**TWO_STACKS, "pad_token_id": 1}),
    "BEiT": family("Beit", PICTURES, {**PATCHES, "intermediate_size": 16, "drop_path_rate": 0.0}, pictures, image_step),
    "RegNet": family(
        "RegNet",
        PICTURES,
        {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [2, 2], "groups_width": 4, "num_labels": 5},
        pictures,
        image_step,
    ),
    "PoolFormer": family(
        "PoolFormer",
        PICTURES,
        {"hidden_sizes": [4, 4, 8, 8], "depths": [1, 1, 1, 1], "num_labels": 5, "drop_path_rate": 0.0},
        pictures,
        image_step,
    ),
    "HuBERT": family("Hubert", "ForCTC", WAVES, waves, partial(sound_step, "input_values")),
}


def train(name: str, degree: int) -> int:
    return len(run_all({name: MODELS[name]}, SETUPS, degree)[name])


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_new_model_trains_as_in_one_process(name: str, degree: int) -> None:
    assert run_ranks(train, degree, name, degree, timeout=180) == [len(SETUPS)] * degree
