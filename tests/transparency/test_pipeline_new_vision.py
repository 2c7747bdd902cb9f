"""Vision, video and document models chosen for being new to pipelines train unmodified; all with `-m slow`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import LENGTH, TOKENS, Case, image_step
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, run_all
from tests.transparency.test_pipeline_huggingface import BERT, NO_DROPOUT, PATCHES, PICTURES, family, pictures

SETUPS = [Setup(2, "interleaved", -1, (8, 8)), Setup(2, "simple", None, (8, 8))]
SIDE = 32
VIT: dict[str, Any] = {**PATCHES, **NO_DROPOUT, "intermediate_size": 16}
VIDEO: dict[str, Any] = {**VIT, "num_frames": 2}
STAGED: dict[str, Any] = {"hidden_sizes": [4, 8], "depths": [1, 2], "num_labels": 5}
PYRAMID: dict[str, Any] = {
    "num_encoder_blocks": 2,
    "depths": [1, 2],
    "sr_ratios": [2, 1],
    "hidden_sizes": [4, 8],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 8,
    "num_labels": 5,
    **dict.fromkeys(("classifier_dropout_prob", "drop_path_rate", "hidden_dropout_prob"), 0.0),
}
WINDOWS: dict[str, Any] = {
    "image_size": SIDE,
    "patch_size": 2,
    "embed_dim": 4,
    "depths": [1, 2],
    "num_heads": [1, 2],
    "window_size": 4,
    "drop_path_rate": 0.0,
    **NO_DROPOUT,
    "num_labels": 5,
}
MOBILE: dict[str, Any] = {"image_size": SIDE, "num_labels": 5, "classifier_dropout_prob": 0.0}


# --- batches and steps ------------------------------------------------------------------------------------------------


def maps(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    pixels, _ = pictures(size, generator)
    return pixels, torch.randint(5, (len(pixels), SIDE, SIDE), generator=generator)


def depths(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    pixels, _ = pictures(size, generator)
    return pixels, torch.rand(len(pixels), SIDE, SIDE, generator=generator, dtype=torch.float64) + 0.5


def films(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    pixels = torch.randn(size, 2, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(5, (size,), generator=generator)


def documents(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    corners = torch.randint(50, (size, LENGTH, 2), generator=generator)
    boxes = torch.cat([corners, corners + torch.randint(1, 50, (size, LENGTH, 2), generator=generator)], dim=-1)
    return torch.randint(1, TOKENS, (size, LENGTH), generator=generator), boxes


def spectrograms(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    sound = torch.randn(size, 16, 8, generator=generator, dtype=torch.float64)
    return sound, torch.randint(5, (size,), generator=generator)


def document_step(model: Any, ids: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    out = model(input_ids=ids, bbox=boxes, labels=ids % 2)
    model.backward(out.loss)
    return out.loss, out.logits


def depth_step(model: Any, pixels: Tensor, depth: Tensor) -> Tensor:
    predicted = model(pixel_values=pixels).predicted_depth
    loss = (predicted - depth[..., : predicted.shape[-2], : predicted.shape[-1]]).abs().mean()
    model.backward(loss)
    return loss


def sound_step(model: Any, sound: Tensor, labels: Tensor) -> Tensor:
    out = model(input_values=sound, labels=labels)
    model.backward(out.loss)
    return out.loss


def box_step(model: Any, pixels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Train a detector by a loss of the script's own: to match boxes with labels needs SciPy, on values."""
    out = model(pixel_values=pixels)
    chosen = out.logits.mean(1)[:, :5]
    loss = torch.nn.functional.cross_entropy(chosen, classes) + (out.pred_boxes - 0.5).abs().mean()
    model.backward(loss)
    return loss, out.pred_boxes


# --- models -----------------------------------------------------------------------------------------------------------


def picture(config: str, sizes: dict[str, Any]) -> Case:
    return family(config, PICTURES, sizes, pictures, image_step)


MODELS: dict[str, Case] = {
    "SegFormer": picture("Segformer", PYRAMID),
    "SegFormer, segmentation": family("Segformer", "ForSemanticSegmentation", PYRAMID, maps, image_step),
    "GLPN": family("GLPN", "ForDepthEstimation", PYRAMID, depths, depth_step),
    "PVT": picture(
        "Pvt", {**PYRAMID, **NO_DROPOUT, "image_size": SIDE, "patch_sizes": [4, 2], "sequence_reduction_ratios": [2, 1]}
    ),
    "MobileNet V1": picture("MobileNetV1", {**MOBILE, "depth_multiplier": 0.25, "min_depth": 4}),
    "MobileNet V2": picture("MobileNetV2", {**MOBILE, "depth_multiplier": 0.25, "depth_divisible_by": 4}),
    "MobileViT": picture(
        "MobileViT",
        {
            **MOBILE,
            "hidden_sizes": [8, 8, 8],
            "neck_hidden_sizes": [4, 4, 4, 8, 8, 8, 8],
            "num_attention_heads": 2,
            "expand_ratio": 2.0,
            **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        },
    ),
    "MobileViT V2": picture(
        "MobileViTV2", {**MOBILE, "width_multiplier": 0.25, "base_attn_unit_dims": [8, 8, 8], "output_stride": 16}
    ),
    "EfficientNet": picture(
        "EfficientNet",
        {
            "image_size": SIDE,
            "width_coefficient": 0.1,
            "depth_coefficient": 0.1,
            "hidden_dim": 128,
            "dropout_rate": 0.0,
            "drop_connect_rate": 0.0,
            "num_labels": 5,
        },
    ),
    "ConvNeXt V2": picture("ConvNextV2", {**STAGED, "num_stages": 2}),
    "Swin V2": picture("Swinv2", WINDOWS),
    "LeViT": picture(
        "Levit",
        {
            "image_size": SIDE,
            "hidden_sizes": [8, 12, 16],
            "num_attention_heads": [1, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [4, 4, 4],
            "drop_path_rate": 0,
            "num_labels": 5,
        },
    ),
    "FocalNet": picture(
        "FocalNet",
        {
            "image_size": SIDE,
            "embed_dim": 4,
            "depths": [1, 2],
            "focal_levels": [1, 2],
            "focal_windows": [3, 3],
            "drop_path_rate": 0.0,
            "num_labels": 5,
        },
    ),
    "BiT": picture("Bit", {**STAGED, "embedding_size": 4, "num_groups": 2, "drop_path_rate": 0.0}),
    "TextNet": picture(
        "TextNet",
        {
            "stem_out_channels": 4,
            "conv_layer_kernel_sizes": [[[3, 3]], [[3, 1]], [[1, 3]], [[3, 3]]],
            "conv_layer_strides": [[1], [2], [2], [2]],
            "hidden_sizes": [4, 4, 4, 8, 8],
            "num_labels": 5,
        },
    ),
    "SwiftFormer": picture(
        "SwiftFormer",
        {
            "depths": [1, 1, 1, 1],
            "embed_dims": [4, 4, 8, 8],
            "mlp_ratio": 2,
            "drop_path_rate": 0.0,
            "drop_mlp_rate": 0.0,
            "drop_conv_encoder_rate": 0.0,
            "num_labels": 5,
        },
    ),
    "HGNet V2": picture(
        "HGNetV2",
        {
            "embedding_size": 4,
            "stem_channels": [3, 4, 4],
            "hidden_sizes": [4, 4, 8, 8],
            "depths": [1, 1, 1, 1],
            "stage_in_channels": [4, 4, 4, 8],
            "stage_mid_channels": [4, 4, 4, 4],
            "stage_out_channels": [4, 4, 8, 8],
            "stage_num_blocks": [1, 1, 1, 1],
            "stage_numb_of_layers": [2, 2, 2, 2],
            "num_labels": 5,
        },
    ),
    "Hiera": picture(
        "Hiera",
        {
            "image_size": [SIDE, SIDE],
            "patch_kernel": [7, 7],
            "patch_stride": [4, 4],
            "patch_padding": [3, 3],
            "embed_dim": 4,
            "depths": [1, 1, 1],
            "num_heads": [1, 2, 2],
            "query_stride": [2, 2],
            "num_query_pool": 2,
            "masked_unit_size": [4, 4],
            "masked_unit_attention": [True, False, False],
            "drop_path_rate": 0.0,
            "num_labels": 5,
        },
    ),
    "ViT-MSN": picture("ViTMSN", VIT),
    "I-JEPA": picture("IJepa", VIT),
    "DINOv2 with registers": picture("Dinov2WithRegisters", {**PATCHES, "mlp_ratio": 2, "num_register_tokens": 2}),
    "Data2Vec": picture("Data2VecVision", {**VIT, "drop_path_rate": 0.0}),
    "YOLOS": family(
        "Yolos",
        "ForObjectDetection",
        {**VIT, "image_size": [SIDE, SIDE], "num_detection_tokens": 4},
        pictures,
        box_step,
    ),
    "TimeSformer": family("Timesformer", "ForVideoClassification", {**VIDEO, "drop_path_rate": 0}, films, image_step),
    "VideoMAE": family("VideoMAE", "ForVideoClassification", {**VIDEO, "tubelet_size": 2}, films, image_step),
    "ViViT": family("Vivit", "ForVideoClassification", {**VIDEO, "tubelet_size": [2, 8, 8]}, films, image_step),
    "AST": family(
        "AST",
        "ForAudioClassification",
        {
            **VIT,
            "patch_size": 4,
            "max_length": 16,
            "num_mel_bins": 8,
            "frequency_stride": 4,
            "time_stride": 4,
            "num_labels": 5,
        },
        spectrograms,
        sound_step,
    ),
    "LayoutLM": family(
        "LayoutLM",
        "ForTokenClassification",
        {**BERT, "max_2d_position_embeddings": 128, "num_labels": 2},
        documents,
        document_step,
    ),
    "LiLT": family(
        "Lilt",
        "ForTokenClassification",
        {**BERT, "hidden_size": 12, "channel_shrink_ratio": 2, "max_2d_position_embeddings": 128, "num_labels": 2},
        documents,
        document_step,
    ),
}


def train(name: str, degree: int) -> int:
    return len(run_all({name: MODELS[name]}, SETUPS, degree)[name])


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_new_model_trains_as_in_one_process(name: str, degree: int) -> None:
    assert run_ranks(train, degree, name, degree, timeout=120) == [len(SETUPS)] * degree
