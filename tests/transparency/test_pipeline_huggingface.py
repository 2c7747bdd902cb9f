"""Families of Hugging Face models that train unmodified over a pipeline; a few by default, all with `-m slow`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import LENGTH, TOKENS, Case, image_step, tokens
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, run_all

SETUPS = [Setup(4, "interleaved", -1, (8, 8)), Setup(1, "simple", None, (8, 4))]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
TEXT = {
    "vocab_size": TOKENS,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    **IDS,
}
GROUPED = {**TEXT, "num_key_value_heads": 1}
NARROW = {**GROUPED, "head_dim": 4}
WINDOW = {**NARROW, "sliding_window": 3, "query_pre_attn_scalar": 4}
BERT = {**TEXT, **NO_DROPOUT}
TWO_STACKS = {
    "d_model": 8,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 16 for side in ("encoder", "decoder")},
    "vocab_size": TOKENS,
    "max_position_embeddings": 16,
    "dropout": 0.0,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
    **IDS,
}
LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 2}
PATCHES = {"image_size": 32, "patch_size": 8, "hidden_size": 8, **LAYERS, "num_labels": 5}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 4, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}


# --- batches and steps ------------------------------------------------------------------------------------------------


def pictures(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Give each microbatch two pictures at least, which BatchNorm needs."""
    pixels = torch.randn(2 * size, 3, 32, 32, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(5, (2 * size,), generator=generator)


def captions(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    pixels, _ = pictures(size, generator)
    return torch.randint(1, TOKENS, (2 * size, LENGTH), generator=generator), pixels


def spectra(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    features = torch.randn(size, 8, 20, generator=generator, dtype=torch.float64)
    return features, torch.randint(1, TOKENS, (size, LENGTH), generator=generator)


def waves(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    waves = torch.randn(size, 400, generator=generator, dtype=torch.float64)
    return waves, torch.randint(1, 5, (size, 3), generator=generator)


def text_step(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    out = model(input_ids=ids, labels=labels)
    model.backward(out.loss)
    return out.loss


def sound_step(name: str, model: Any, sound: Tensor, labels: Tensor) -> Tensor:
    out = model(**{name: sound}, labels=labels)
    model.backward(out.loss)
    return out.loss


def pairs_step(model: Any, ids: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
    out = model(input_ids=ids, pixel_values=pixels, return_loss=True)
    model.backward(out.loss)
    return out.loss, out.logits_per_image


# --- models -----------------------------------------------------------------------------------------------------------


def made(config: str, model: str, sizes: dict[str, Any]) -> nn.Module:
    import transformers  # takes seconds: on the ranks that need it

    built: nn.Module = getattr(transformers, model)(getattr(transformers, f"{config}Config")(**sizes))
    return built


def family(
    config: str, task: str, sizes: dict[str, Any], batch: Callable[..., Any] = tokens, step: Any = text_step
) -> Case:
    return Case(partial(made, config, f"{config}{task}", sizes), batch, step)


LM, MASKED, PICTURES = "ForCausalLM", "ForMaskedLM", "ForImageClassification"
SEQUENCES = "ForConditionalGeneration"
VISION = {"hidden_size": 8, "intermediate_size": 16, **LAYERS, "image_size": 32, "patch_size": 8}
GPT_NEO = {"attention_types": [[["global", "local"], 2]], "num_heads": 2, "window_size": 3}
STATES = {"vocab_size": TOKENS, "hidden_size": 8, "num_hidden_layers": 4, "state_size": 4, **IDS}
DEBERTA = {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
WAVES = {
    **TEXT,
    "num_hidden_layers": 2,
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "conv_dim": [4, 4],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_conv_pos_embedding_groups": 2,
    **{f"{part}_dropout": 0.0 for part in ("hidden", "attention", "activation", "feat_proj", "final")},
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}

FEW: dict[str, Case] = {
    "ALBERT": family("Albert", MASKED, {**BERT, "embedding_size": 6}),
    "DeBERTa-v2": family("DebertaV2", MASKED, {**DEBERTA, "position_buckets": 4, "conv_kernel_size": 3}),
    "Gemma 2": family("Gemma2", LM, WINDOW),
    "ResNet": family(
        "ResNet",
        PICTURES,
        {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [2, 2], "layer_type": "basic", "num_labels": 5},
        pictures,
        image_step,
    ),
    "CLIP": family(
        "CLIP", "Model", {"text_config": TEXT, "vision_config": VISION, "projection_dim": 8}, captions, pairs_step
    ),
    "Whisper": family(
        "Whisper",
        SEQUENCES,
        {**TWO_STACKS, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16},
        spectra,
        partial(sound_step, "input_features"),
    ),
}
MORE: dict[str, Case] = {
    "Gemma": family("Gemma", LM, NARROW),
    "Phi": family("Phi", LM, {**TEXT, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "Phi-3": family("Phi3", LM, GROUPED),
    "Qwen 3": family("Qwen3", LM, NARROW),
    "Mistral": family("Mistral", LM, {**GROUPED, "sliding_window": 3}),
    "OLMo 2": family("Olmo2", LM, GROUPED),
    "Cohere": family("Cohere", LM, GROUPED),
    "OPT": family("OPT", LM, {**TEXT, "ffn_dim": 16, "word_embed_proj_dim": 4, "dropout": 0.0}),
    "GPT-NeoX": family("GPTNeoX", LM, {**TEXT, "hidden_dropout": 0.0}),
    "GPT-Neo": family("GPTNeo", LM, {"vocab_size": TOKENS, "hidden_size": 8, "num_layers": 4, **GPT_NEO, **IDS}),
    "Falcon": family("Falcon", LM, {**TEXT, "alibi": True, "parallel_attn": False}),
    "Mamba": family("Mamba", LM, {**STATES, "time_step_rank": 2}),
    "Mamba 2": family("Mamba2", LM, {**STATES, "num_heads": 4, "head_dim": 4, "n_groups": 1, "chunk_size": 4}),
    "DistilBERT": family(
        "DistilBert",
        MASKED,
        {"vocab_size": TOKENS, "dim": 8, "n_layers": 4, "n_heads": 2, "hidden_dim": 16}
        | {"max_position_embeddings": 16, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "RoBERTa": family("Roberta", MASKED, BERT),
    "ELECTRA": family("Electra", MASKED, {**BERT, "embedding_size": 6}),
    "DeBERTa": family("Deberta", MASKED, DEBERTA),
    "ModernBERT": family("ModernBert", MASKED, {**TEXT, "cls_token_id": 0, "sep_token_id": 0, "local_attention": 4}),
    "BART": family("Bart", SEQUENCES, {**TWO_STACKS, "pad_token_id": 1}),
    "ConvNeXt": family(
        "ConvNext",
        PICTURES,
        {"hidden_sizes": [4, 8], "depths": [2, 2], "num_stages": 2, "num_labels": 5},
        pictures,
        image_step,
    ),
    "Swin": family(
        "Swin", PICTURES, {**SWIN, **NO_DROPOUT, "drop_path_rate": 0.0, "num_labels": 5}, pictures, image_step
    ),
    "DeiT": family("DeiT", PICTURES, {**PATCHES, "intermediate_size": 16}, pictures, image_step),
    "DINOv2": family("Dinov2", PICTURES, {**PATCHES, "mlp_ratio": 2}, pictures, image_step),
    "Wav2Vec2": family("Wav2Vec2", "ForCTC", WAVES, waves, partial(sound_step, "input_values")),
}


def train(cases: dict[str, Case], setups: list[Setup]) -> int:
    return len(run_all(cases, setups, 2))


@pytest.mark.parametrize("name", FEW)
def test_a_family_trains_as_in_one_process(name: str) -> None:
    assert run_ranks(train, 2, {name: FEW[name]}, SETUPS, timeout=60) == [1, 1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_families_train_as_in_one_process() -> None:
    assert run_ranks(train, 2, MORE, SETUPS, timeout=800) == [len(MORE)] * 2
