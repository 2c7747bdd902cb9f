"""Models of other libraries, small, each with the step that trains it: a row per family, named as its library does.

No library is imported before a model is built: some take seconds, and torchvision and timm need not be installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models import LENGTH, TOKENS, Case, made_by_transformers, tokens

SIDE, LARGE, CLASSES = 32, 64, 5
Batch = Callable[[int, torch.Generator], tuple[Any, ...]]

# --- batches ----------------------------------------------------------------------------------------------------------


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def pictures(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Give each microbatch two pictures at least, which BatchNorm needs."""
    return normal(generator, 2 * size, 3, SIDE, SIDE), torch.randint(CLASSES, (2 * size,), generator=generator)


def large_pictures(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    return normal(generator, size, 3, LARGE, LARGE), torch.randint(CLASSES, (size,), generator=generator)


def captions(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    pixels, _ = pictures(size, generator)
    return torch.randint(1, TOKENS, (2 * size, LENGTH), generator=generator), pixels, True


def maps(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    pixels, _ = pictures(size, generator)
    return pixels, torch.randint(CLASSES, (len(pixels), SIDE, SIDE), generator=generator)


def depths(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    pixels, _ = pictures(size, generator)
    return pixels, normal(generator, len(pixels), SIDE, SIDE).abs() + 0.5


def films(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    return normal(generator, size, 2, 3, SIDE, SIDE), torch.randint(CLASSES, (size,), generator=generator)


def documents(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Return words, the boxes around them, and labels."""
    ids = torch.randint(1, TOKENS, (size, LENGTH), generator=generator)
    corners = torch.randint(50, (size, LENGTH, 2), generator=generator)
    return ids, torch.cat([corners, corners + 10], dim=-1), ids % 2


def mel_spectra(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    return normal(generator, size, 8, 20), torch.randint(1, TOKENS, (size, LENGTH), generator=generator)


def spectrograms(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    return normal(generator, size, 16, 8), torch.randint(CLASSES, (size,), generator=generator)


def waves(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    return normal(generator, size, 400), torch.randint(1, CLASSES, (size, 3), generator=generator)


# --- steps ------------------------------------------------------------------------------------------------------------


def step_of(names: tuple[str, ...], model: Any, *batch: Any) -> Tensor:
    """Train by the loss that a model of Hugging Face returns; `names` are those of its arguments."""
    loss: Tensor = model(**dict(zip(names, batch, strict=True)))["loss"]
    model.backward(loss)
    return loss


TEXT_STEP = partial(step_of, ("input_ids", "labels"))
PICTURE_STEP = partial(step_of, ("pixel_values", "labels"))
SOUND_STEP = partial(step_of, ("input_values", "labels"))
SPECTRA_STEP = partial(step_of, ("input_features", "labels"))
DOCUMENT_STEP = partial(step_of, ("input_ids", "bbox", "labels"))
CAPTION_STEP = partial(step_of, ("input_ids", "pixel_values", "return_loss"))


def depth_step(model: Any, pixels: Tensor, depth: Tensor) -> Tensor:
    predicted = model(pixel_values=pixels).predicted_depth
    loss = (predicted - depth[..., : predicted.shape[-2], : predicted.shape[-1]]).abs().mean()
    model.backward(loss)
    return loss


def box_step(model: Any, pixels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Train a detector by a loss of the script's own: to match boxes with labels needs SciPy, on values."""
    out = model(pixel_values=pixels)
    chosen = out.logits.mean(1)[:, :CLASSES]
    loss = functional.cross_entropy(chosen, classes) + (out.pred_boxes - 0.5).abs().mean()
    model.backward(loss)
    return loss, out.pred_boxes


def class_step(model: Any, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    scores = model(pixels)
    loss = functional.cross_entropy(scores, labels)
    model.backward(loss)
    return loss, scores


def auxiliary_step(model: Any, pixels: Tensor, labels: Tensor) -> Tensor:
    """Train a GoogLeNet, which returns the scores of two auxiliary classifiers, too."""
    scores, second, first = model(pixels)
    losses = [functional.cross_entropy(each, labels) for each in (scores, second, first)]
    loss = losses[0] + 0.3 * (losses[1] + losses[2])
    model.backward(loss)
    return loss


# --- Hugging Face -----------------------------------------------------------------------------------------------------

Sizes = dict[str, Any]
IDS: Sizes = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LAYERS: Sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
TEXT = {**LAYERS, **IDS, "vocab_size": TOKENS, "max_position_embeddings": 16}
GROUPED = {**TEXT, "num_key_value_heads": 1}
EAGER: Sizes = {"experts_implementation": "eager", "num_experts_per_tok": 2}  # other implementations take no float64
EXPERTS = {**GROUPED, **EAGER, "num_experts": 4, "output_router_logits": True}
STATES = {"vocab_size": TOKENS, "hidden_size": 8, "num_hidden_layers": 4, "state_size": 4, **IDS}
DEBERTA = {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
TWO_STACKS = {"d_model": 8, "vocab_size": TOKENS, "max_position_embeddings": 16, **IDS}
TWO_STACKS |= {f"{side}_{part}": 2 for side in ("encoder", "decoder") for part in ("layers", "attention_heads")}
TWO_STACKS |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "decoder_start_token_id": 0, "forced_eos_token_id": None}
WAVES = {**TEXT, "num_hidden_layers": 2, "num_feat_extract_layers": 2, "num_conv_pos_embedding_groups": 2}
WAVES |= {"conv_dim": [4, 4], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_conv_pos_embeddings": 4}
WAVES |= {"mask_time_prob": 0.0}
SPECTROGRAMS = {**LAYERS, "patch_size": 4, "max_length": 16, "num_mel_bins": 8, "num_labels": CLASSES}
SPECTROGRAMS |= {"frequency_stride": 4, "time_stride": 4}
PATCHES = {**LAYERS, "image_size": SIDE, "patch_size": 8}
STAGED: Sizes = {"hidden_sizes": [4, 8], "depths": [2, 2]}
FOUR_STAGES: Sizes = {"hidden_sizes": [4, 4, 8, 8], "depths": [1, 1, 1, 1]}
WINDOWS: Sizes = {"patch_size": 2, "embed_dim": 4, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
PYRAMID: Sizes = {"num_encoder_blocks": 2, **STAGED, "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2]}
PYRAMID |= {"num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 8}
HIERA: Sizes = {"image_size": [SIDE, SIDE], "embed_dim": 4, "depths": [1, 1, 1], "num_heads": [1, 2, 2]}
HIERA |= {"num_query_pool": 2, "masked_unit_size": [4, 4], "masked_unit_attention": [True, False, False]}
LEVIT: Sizes = {"hidden_sizes": [8, 12, 16], "num_attention_heads": [1, 2, 2], "depths": [1, 1, 1]}
LEVIT |= {"key_dim": [4, 4, 4], "drop_path_rate": 0}
MOBILEVIT = {**PATCHES, "patch_size": 2, "hidden_sizes": [8, 8, 8], "expand_ratio": 2.0}
MOBILEVIT |= {"neck_hidden_sizes": [4, 4, 4, 8, 8, 8, 8]}
TEXTNET: Sizes = {"stem_out_channels": 4, "hidden_sizes": [4, 4, 4, 8, 8], "conv_layer_strides": [[1], [2], [2], [2]]}
TEXTNET |= {"conv_layer_kernel_sizes": [[[3, 3]], [[3, 1]], [[1, 3]], [[3, 3]]]}
HGNET: Sizes = {**FOUR_STAGES, "embedding_size": 4, "stem_channels": [3, 4, 4], "stage_in_channels": [4, 4, 4, 8]}
HGNET |= {"stage_mid_channels": [4, 4, 4, 4], "stage_out_channels": [4, 4, 8, 8]}
HGNET |= {"stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [2, 2, 2, 2]}


def family(name: str, task: str, batch: Batch, step: Callable[..., Any], sizes: Sizes) -> Case:
    return Case(partial(made_by_transformers, name, task, sizes), batch, step)


def causal(name: str, sizes: Sizes = TEXT, **more: Any) -> Case:
    return family(name, "ForCausalLM", tokens, TEXT_STEP, {**sizes, **more})


def masked(name: str, sizes: Sizes = TEXT, **more: Any) -> Case:
    return family(name, "ForMaskedLM", tokens, TEXT_STEP, {**sizes, **more})


def translator(name: str, batch: Batch = tokens, step: Callable[..., Any] = TEXT_STEP, **more: Any) -> Case:
    return family(name, "ForConditionalGeneration", batch, step, {**TWO_STACKS, **more})


def picture(name: str, sizes: Sizes = PATCHES, **more: Any) -> Case:
    sizes = {"image_size": SIDE, "num_labels": CLASSES, **sizes, **more}
    return family(name, "ForImageClassification", pictures, PICTURE_STEP, sizes)


def film(name: str, **more: Any) -> Case:
    sizes = {**PATCHES, "num_frames": 2, "num_labels": CLASSES, **more}
    return family(name, "ForVideoClassification", films, PICTURE_STEP, sizes)


def document(name: str, **more: Any) -> Case:
    sizes = {**TEXT, "max_2d_position_embeddings": 128, "num_labels": 2, **more}
    return family(name, "ForTokenClassification", documents, DOCUMENT_STEP, sizes)


TRANSFORMERS: dict[str, Case] = {
    # decoders
    "Gemma": causal("Gemma", GROUPED, head_dim=4),
    "Gemma 2": causal("Gemma2", GROUPED, head_dim=4, sliding_window=3, query_pre_attn_scalar=4),
    "Phi": causal("Phi"),
    "Phi-3": causal("Phi3", GROUPED),
    "Qwen 3": causal("Qwen3", GROUPED, head_dim=4),
    "Mistral": causal("Mistral", GROUPED, sliding_window=3),
    "OLMo 2": causal("Olmo2", GROUPED),
    "Cohere": causal("Cohere", GROUPED),
    "OPT": causal("OPT", ffn_dim=16, word_embed_proj_dim=4),
    "GPT-NeoX": causal("GPTNeoX"),
    "GPT-Neo": causal("GPTNeo", attention_types=[[["global", "local"], 2]], window_size=3),
    "Falcon": causal("Falcon", alibi=True, parallel_attn=False),
    "Bloom": causal("Bloom"),
    "StableLM": causal("StableLm", GROUPED),
    "StarCoder 2": causal("Starcoder2", GROUPED),
    "GPT BigCode": causal("GPTBigCode"),
    "CodeGen": causal("CodeGen", hidden_size=32, num_attention_heads=4, rotary_dim=4, n_ctx=16),
    "BioGPT": causal("BioGpt"),
    "Qwen 2 MoE": causal("Qwen2Moe", EXPERTS, **EAGER),
    "OLMoE": causal("Olmoe", EXPERTS, **EAGER),
    # state spaces and recurrent layers
    "Mamba": causal("Mamba", STATES, time_step_rank=2),
    "Mamba 2": causal("Mamba2", STATES, num_heads=4, head_dim=4, n_groups=1, chunk_size=4),
    "Falcon Mamba": causal("FalconMamba", STATES, time_step_rank=2),
    "RWKV": causal("Rwkv", STATES, attention_hidden_size=8, context_length=16),
    # encoders
    "ALBERT": masked("Albert", embedding_size=6),
    "DeBERTa": masked("Deberta", DEBERTA),
    "DeBERTa-v2": masked("DebertaV2", DEBERTA, position_buckets=4, conv_kernel_size=3),
    "DistilBERT": masked("DistilBert", hidden_dim=16),
    "RoBERTa": masked("Roberta"),
    "ELECTRA": masked("Electra", embedding_size=6),
    "ModernBERT": masked("ModernBert", cls_token_id=0, sep_token_id=0, local_attention=4),
    "MPNet": masked("MPNet", pad_token_id=1),
    "RoFormer": masked("RoFormer", embedding_size=8),
    "FNet": masked("FNet", type_vocab_size=2),
    "MobileBERT": masked("MobileBert", embedding_size=8, intra_bottleneck_size=8, true_hidden_size=8),
    # encoders with decoders
    "BART": translator("Bart", pad_token_id=1),
    "Pegasus": translator("Pegasus"),
    "mBART": translator("MBart", pad_token_id=1),
    "Whisper": translator(
        "Whisper", mel_spectra, SPECTRA_STEP, num_mel_bins=8, max_source_positions=10, max_target_positions=16
    ),
    # transformers of pictures
    "DeiT": picture("DeiT"),
    "DINOv2": picture("Dinov2", mlp_ratio=2),
    "DINOv2 with registers": picture("Dinov2WithRegisters", mlp_ratio=2, num_register_tokens=2),
    "BEiT": picture("Beit"),
    "ViT-MSN": picture("ViTMSN"),
    "I-JEPA": picture("IJepa"),
    "Data2Vec": picture("Data2VecVision"),
    "Swin": picture("Swin", WINDOWS),
    "Swin V2": picture("Swinv2", WINDOWS, depths=[1, 2]),
    "SegFormer": picture("Segformer", PYRAMID),
    "SegFormer, segmentation": family(
        "Segformer", "ForSemanticSegmentation", maps, PICTURE_STEP, {**PYRAMID, "num_labels": CLASSES}
    ),
    "GLPN": family("GLPN", "ForDepthEstimation", depths, depth_step, PYRAMID),
    "PVT": picture("Pvt", PYRAMID, patch_sizes=[4, 2], sequence_reduction_ratios=[2, 1]),
    "MobileViT": picture("MobileViT", MOBILEVIT),
    "MobileViT V2": picture("MobileViTV2", {}, width_multiplier=0.25, base_attn_unit_dims=[8, 8, 8], output_stride=16),
    "LeViT": picture("Levit", LEVIT),
    "FocalNet": picture("FocalNet", {}, embed_dim=4, depths=[1, 2], focal_levels=[1, 2], focal_windows=[3, 3]),
    "SwiftFormer": picture("SwiftFormer", {}, depths=[1, 1, 1, 1], embed_dims=[4, 4, 8, 8], mlp_ratio=2),
    "Hiera": picture("Hiera", HIERA),
    "YOLOS": family(
        "Yolos",
        "ForObjectDetection",
        pictures,
        box_step,
        {**PATCHES, "image_size": [SIDE, SIDE], "num_labels": CLASSES},
    ),
    # convolutions
    "ResNet": picture("ResNet", STAGED, embedding_size=4, layer_type="basic"),
    "RegNet": picture("RegNet", STAGED, embedding_size=4, groups_width=4),
    "ConvNeXt": picture("ConvNext", STAGED, num_stages=2),
    "ConvNeXt V2": picture("ConvNextV2", STAGED, depths=[1, 2], num_stages=2),
    "BiT": picture("Bit", STAGED, depths=[1, 2], embedding_size=4, num_groups=2),
    "PoolFormer": picture("PoolFormer", FOUR_STAGES),
    "MobileNet V1": picture("MobileNetV1", {}, depth_multiplier=0.25, min_depth=4),
    "MobileNet V2": picture("MobileNetV2", {}, depth_multiplier=0.25, depth_divisible_by=4),
    "EfficientNet": picture("EfficientNet", {}, width_coefficient=0.1, depth_coefficient=0.1, hidden_dim=128),
    "TextNet": picture("TextNet", TEXTNET),
    "HGNet V2": picture("HGNetV2", HGNET),
    # films, sound, documents, and pictures with text
    "TimeSformer": film("Timesformer", drop_path_rate=0),
    "VideoMAE": film("VideoMAE", tubelet_size=2),
    "ViViT": film("Vivit", tubelet_size=[2, 8, 8]),
    "Wav2Vec2": family("Wav2Vec2", "ForCTC", waves, SOUND_STEP, WAVES),
    "HuBERT": family("Hubert", "ForCTC", waves, SOUND_STEP, WAVES),
    "AST": family("AST", "ForAudioClassification", spectrograms, SOUND_STEP, SPECTROGRAMS),
    "LayoutLM": document("LayoutLM"),
    "LiLT": document("Lilt", hidden_size=12, channel_shrink_ratio=2),
    "CLIP": family("CLIP", "Model", captions, CAPTION_STEP, {"text_config": TEXT, "vision_config": PATCHES}),
}

# --- Hugging Face models whose layers tensor parallelism divides ------------------------------------------------------

DIVIDED: Sizes = {**TEXT, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
DIVIDED |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
DIVIDED |= {"vocab_size": 23}  # which no number of ranks divides


def padded_tokens(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Return tokens, their mask, and labels: some samples end with padding, so ranks have different masks."""
    ids = torch.randint(3, DIVIDED["vocab_size"], (size, LENGTH + 1), generator=generator)
    mask = torch.ones_like(ids)
    mask[-2:, -2:] = 0
    return ids, mask, ids.masked_fill(mask == 0, -100)


def loss_and_logits_step(model: Any, ids: Tensor, mask: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Call the model twice: where it gets labels, logits may stay divided. Not every model rounds its loss."""
    logits = model(input_ids=ids, attention_mask=mask)["logits"]
    loss = model(input_ids=ids, attention_mask=mask, labels=labels)["loss"].double()
    model.backward(loss)
    return loss, logits


def made_random(name: str, task: str, sizes: Sizes) -> nn.Module:
    """Make a model whose biases and norms are random too, so that every gradient counts."""
    model = made_by_transformers(name, task, sizes).double()
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def divisible(name: str, task: str = "ForCausalLM", **more: Any) -> Case:
    return Case(partial(made_random, name, task, {**DIVIDED, **more}), padded_tokens, loss_and_logits_step)


WITH_PLANS: dict[str, Case] = {
    "Llama": divisible("Llama"),
    "tied Llama": divisible("Llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "Mistral": divisible("Mistral", sliding_window=4),
    "Qwen2": divisible("Qwen2"),
    "Qwen3": divisible("Qwen3", head_dim=8),
    "Apertus": divisible("Apertus"),
    "Phi": divisible("Phi"),
    "normed Phi": divisible("Phi", qk_layernorm=True),  # as Glm4Moe, with norms of queries that its plan does not name
    "Glm4Moe": divisible("Glm4Moe", head_dim=8, use_qk_norm=True, first_k_dense_replace=2),
    "Phi3": divisible("Phi3"),
    "GPTNeoX": divisible("GPTNeoX", rotary_pct=0.5),
    "sequential GPTNeoX": divisible("GPTNeoX", use_parallel_residual=False, attention_bias=False, rotary_pct=0.5),
    "Mixtral": divisible("Mixtral", num_local_experts=4, **EAGER),
    "balanced Mixtral": divisible(
        "Mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=3.0, **EAGER
    ),
    "MiMoV2Flash": divisible(  # values of another width than keys, twice as many heads of both in the second layer
        "MiMoV2Flash", head_dim=8, v_head_dim=4, mlp_layer_types=["dense"] * 2, **EAGER
    ),
    "Qwen3Moe": divisible("Qwen3Moe", num_experts=4, moe_intermediate_size=12, head_dim=8, **EAGER),
}
"""Divided as their own `_tp_plan` says."""
REPLACED: dict[str, Case] = {
    "GPT2": divisible("GPT2", "LMHeadModel"),
    "untied GPT2": divisible("GPT2", "LMHeadModel", tie_word_embeddings=False),
    "GPTJ": divisible("GPTJ", rotary_dim=2),
    "GPTNeo": divisible("GPTNeo", attention_types=[[["global", "local"], 1]], window_size=3),
    "Bert": divisible("Bert", "ForMaskedLM"),
    "Roberta": divisible("Roberta", "ForMaskedLM"),
}
"""The families that SMP v1 knew: modules of `smp.nn` take their place."""
DIVISIBLE: dict[str, Case] = {**WITH_PLANS, **REPLACED}


def unmasked_step(model: Any, ids: Tensor, _mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Leave out the mask: a mask of other positions than the values makes an error of what would be a wrong number."""
    return loss_and_logits_step(model, ids, None, labels)


HYBRID: Sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4}
HYBRID |= {"linear_value_head_dim": 4, "num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8}
HYBRID |= {"shared_expert_intermediate_size": 12, "layer_types": ["linear_attention", "full_attention"]}
PARTLY_DIVIDED: dict[str, Case] = {
    "Qwen3Next": replace(divisible("Qwen3Next", **HYBRID, **EAGER), step=unmasked_step),
    "Llama of three heads": divisible(
        "Llama", hidden_size=24, num_attention_heads=3, num_key_value_heads=3, head_dim=8
    ),
    "Doge": divisible("Doge"),
    "normed Cohere": divisible("Cohere", use_qk_norm=True),
    "DeBERTa-v2": TRANSFORMERS["DeBERTa-v2"],
}
"""What mixes positions is whole on each of two ranks: linear attention, heads that they do not divide, masks that heads
share, norms with weights for each head, tables of distances that a module reads by itself."""

# --- torchvision and timm ---------------------------------------------------------------------------------------------


MISSING: Final = [name for name in ("torchvision", "timm") if find_spec(name) is None]
_declared: list[torch.library.Library] = []


def import_torchvision() -> Any:
    """Import torchvision, which must be installed, also where its operators do not load.

    A wheel of it that was built for CUDA cannot load them beside a torch for CPUs. Models that classify need none of
    them, but importing the package gives two of them fake implementations, for which they must be declared.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if _declared or "torchvision::nms" not in str(error):
            raise
    _declared.append(torch.library.Library("torchvision", "FRAGMENT"))
    for name in ("nms", "qnms"):
        _declared[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("torchvision")


def made_by_torchvision(name: str, options: Sizes) -> nn.Module:
    return getattr(import_torchvision().models, name)(num_classes=CLASSES, **options)


def made_by_timm(name: str, options: Sizes) -> nn.Module:
    import_torchvision()
    import timm

    return timm.create_model(name, num_classes=CLASSES, **options)


def vision(name: str, step: Callable[..., Any] = class_step, **options: Any) -> Case:
    return Case(partial(made_by_torchvision, name, options), large_pictures, step)


def timm_model(name: str, **options: Any) -> Case:
    return Case(partial(made_by_timm, name, options), large_pictures, class_step)


VIT: Sizes = {"image_size": LARGE, "patch_size": 16, "num_layers": 4, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 16}
SWIN: Sizes = {"patch_size": [4, 4], "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": [4, 4]}
SWIN |= {"stochastic_depth_prob": 0.0}
MAXVIT: Sizes = {"input_size": (LARGE, LARGE), "stem_channels": 4, "partition_size": 2, "block_channels": [8, 8]}
MAXVIT |= {"block_layers": [1, 1], "head_dim": 4, "stochastic_depth_prob": 0.0}
SMALL: Sizes = {"embed_dim": 8, "depth": 4, "num_heads": 2, "img_size": LARGE, "patch_size": 16}

TORCHVISION: dict[str, Case] = {
    "torchvision ResNet 18": vision("resnet18"),
    "torchvision MobileNet V3": vision("mobilenet_v3_small", dropout=0.0),
    "torchvision ShuffleNet V2": vision("shufflenet_v2_x0_5"),
    "torchvision SqueezeNet": vision("squeezenet1_1", dropout=0.0),
    "torchvision MNASNet": vision("mnasnet0_5", dropout=0.0),
    "torchvision EfficientNet B0": vision("efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0),
    "torchvision RegNet Y": vision("regnet_y_400mf"),
    "torchvision GoogLeNet": vision("googlenet", auxiliary_step, init_weights=False, dropout=0.0, dropout_aux=0.0),
    "torchvision DenseNet": vision("DenseNet", growth_rate=4, block_config=(2, 2), num_init_features=8),
    "torchvision ViT": vision("VisionTransformer", **VIT),
    "torchvision Swin": vision("SwinTransformer", **SWIN),
    "torchvision MaxViT": vision("MaxVit", **MAXVIT),
}
TIMM: dict[str, Case] = {
    "timm ViT": timm_model("vit_tiny_patch16_224", **SMALL),
    "timm EVA": timm_model("eva02_tiny_patch14_224", **SMALL),
    "timm CaiT": timm_model("cait_xxs24_224", **SMALL),
    "timm XCiT": timm_model("xcit_nano_12_p16_224", **SMALL),
    "timm Mixer": timm_model("mixer_s32_224", img_size=LARGE),
    "timm gMLP": timm_model("gmlp_ti16_224", img_size=LARGE),
    "timm ConvNeXt": timm_model("convnext_atto", dims=(4, 8, 8, 16), depths=(1, 1, 2, 1)),
    "timm ResNet-D": timm_model("resnet10t"),
    "timm MobileNet V4": timm_model("mobilenetv4_conv_small_035"),
    "timm EfficientViT": timm_model("efficientvit_b0"),
    "timm LeViT": timm_model("levit_128s", img_size=LARGE),
    "timm PVT V2": timm_model("pvt_v2_b0"),
    "timm EdgeNeXt": timm_model("edgenext_xx_small"),
    "timm GhostNet": timm_model("ghostnet_050", drop_rate=0.0),
    "timm BEiT": timm_model("beit_base_patch16_224", **SMALL),
    "timm DeiT, distilled": timm_model("deit_tiny_distilled_patch16_224", **SMALL),
    "timm CoaT": timm_model("coat_tiny", img_size=LARGE, embed_dims=(8, 8, 8, 8), serial_depths=(1, 1, 1, 1)),
    "timm PoolFormer": timm_model("poolformer_s12"),
    "timm HRNet": timm_model("hrnet_w18_small"),
    "timm NF-ResNet": timm_model("nf_resnet26"),
    "timm ConViT": timm_model("convit_tiny", **SMALL, local_up_to_layer=2),
    "timm Twins": timm_model(
        "twins_svt_small", img_size=LARGE, embed_dims=(8, 8, 8, 8), num_heads=(1, 1, 2, 2), depths=(1, 1, 1, 1)
    ),
    "timm Visformer": timm_model(
        "visformer_tiny", img_size=LARGE, init_channels=4, embed_dim=16, depth=(1, 1, 1), num_heads=2
    ),
    "timm ResNet V2": timm_model("resnetv2_50", layers=(1, 1), channels=(8, 16), stem_chs=8),
}
VISION: dict[str, Case] = {**TORCHVISION, **TIMM}
MODELS_OF_OTHERS: dict[str, Case] = {**TRANSFORMERS, **VISION}
