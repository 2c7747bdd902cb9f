"""Classifiers of torchvision and timm train unmodified over a pipeline; all with `-m slow`, where installed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models import Case
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, run_all
from tests.vision_libraries import MISSING, import_torchvision

SETUPS = [Setup(2, "interleaved", -1, (8, 8)), Setup(2, "simple", None, (8, 8))]
CLASSES, SIDE = 5, 64


def pictures(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    pixels = torch.randn(size, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(CLASSES, (size,), generator=generator)


def classify(model: Any, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    scores = model(pixels)
    loss = functional.cross_entropy(scores, labels)
    model.backward(loss)
    return loss, scores


def classify_with_aux(model: Any, pixels: Tensor, labels: Tensor) -> Tensor:
    """Train a GoogLeNet, which returns the scores of two auxiliary classifiers, too."""
    scores, second, first = model(pixels)
    losses = [functional.cross_entropy(each, labels) for each in (scores, second, first)]
    loss = losses[0] + 0.3 * (losses[1] + losses[2])
    model.backward(loss)
    return loss


def made_by_torchvision(name: str, options: dict[str, Any]) -> nn.Module:
    model: nn.Module = getattr(import_torchvision().models, name)(num_classes=CLASSES, **options)
    return model


def made_by_timm(name: str, options: dict[str, Any]) -> nn.Module:
    import_torchvision()
    import timm

    model: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
    return model


def vision(name: str, step: Any = classify, **options: Any) -> Case:
    return Case(partial(made_by_torchvision, name, options), pictures, step)


def timm_model(name: str, **options: Any) -> Case:
    return Case(partial(made_by_timm, name, options), pictures, classify)


TORCHVISION: dict[str, Case] = {
    "ResNet 18": vision("resnet18"),
    "MobileNet V3": vision("mobilenet_v3_small", dropout=0.0),
    "ShuffleNet V2": vision("shufflenet_v2_x0_5"),
    "SqueezeNet": vision("squeezenet1_1", dropout=0.0),
    "MNASNet": vision("mnasnet0_5", dropout=0.0),
    "EfficientNet B0": vision("efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0),
    "RegNet Y": vision("regnet_y_400mf"),
    "GoogLeNet": vision("googlenet", classify_with_aux, init_weights=False, dropout=0.0, dropout_aux=0.0),
    "DenseNet": vision("DenseNet", growth_rate=4, block_config=(2, 2), num_init_features=8),
    "ViT": vision(
        "VisionTransformer",
        image_size=SIDE,
        patch_size=16,
        num_layers=4,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
    ),
    "Swin": vision(
        "SwinTransformer",
        patch_size=[4, 4],
        embed_dim=8,
        depths=[1, 2],
        num_heads=[1, 2],
        window_size=[4, 4],
        stochastic_depth_prob=0.0,
    ),
    "MaxViT": vision(
        "MaxVit",
        input_size=(SIDE, SIDE),
        stem_channels=4,
        partition_size=2,
        block_channels=[8, 8],
        block_layers=[1, 1],
        head_dim=4,
        stochastic_depth_prob=0.0,
    ),
}

SMALL: dict[str, Any] = {"embed_dim": 8, "depth": 4, "num_heads": 2, "img_size": SIDE, "patch_size": 16}

TIMM: dict[str, Case] = {
    "ViT": timm_model("vit_tiny_patch16_224", **SMALL),
    "EVA": timm_model("eva02_tiny_patch14_224", **SMALL),
    "CaiT": timm_model("cait_xxs24_224", **SMALL),
    "XCiT": timm_model("xcit_nano_12_p16_224", **SMALL),
    "Mixer": timm_model("mixer_s32_224", img_size=SIDE),
    "gMLP": timm_model("gmlp_ti16_224", img_size=SIDE),
    "ConvNeXt": timm_model("convnext_atto", dims=(4, 8, 8, 16), depths=(1, 1, 2, 1)),
    "ResNet-D": timm_model("resnet10t"),
    "MobileNet V4": timm_model("mobilenetv4_conv_small_035"),
    "EfficientViT": timm_model("efficientvit_b0"),
    "LeViT": timm_model("levit_128s", img_size=SIDE),
    "PVT V2": timm_model("pvt_v2_b0"),
    "EdgeNeXt": timm_model("edgenext_xx_small"),
    "GhostNet": timm_model("ghostnet_050", drop_rate=0.0),
    "BEiT": timm_model("beit_base_patch16_224", **SMALL),
    "DeiT, distilled": timm_model("deit_tiny_distilled_patch16_224", **SMALL),
    "CoaT": timm_model("coat_tiny", img_size=SIDE, embed_dims=(8, 8, 8, 8), serial_depths=(1, 1, 1, 1)),
    "PoolFormer": timm_model("poolformer_s12"),
    "HRNet": timm_model("hrnet_w18_small"),
    "NF-ResNet": timm_model("nf_resnet26"),
    "ConViT": timm_model("convit_tiny", **SMALL, local_up_to_layer=2),
    "Twins": timm_model(
        "twins_svt_small", img_size=SIDE, embed_dims=(8, 8, 8, 8), num_heads=(1, 1, 2, 2), depths=(1, 1, 1, 1)
    ),
    "Visformer": timm_model(
        "visformer_tiny", img_size=SIDE, init_channels=4, embed_dim=16, depth=(1, 1, 1), num_heads=2
    ),
    "ResNet V2": timm_model("resnetv2_50", layers=(1, 1), channels=(8, 16), stem_chs=8),
}

CASES: dict[str, Case] = {
    **{f"torchvision: {name}": case for name, case in TORCHVISION.items()},
    **{f"timm: {name}": case for name, case in TIMM.items()},
}


def train(name: str, degree: int) -> int:
    return len(run_all({name: CASES[name]}, SETUPS, degree)[name])


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_vision_model_trains_as_in_one_process(name: str, degree: int) -> None:
    assert run_ranks(train, degree, name, degree, timeout=380) == [len(SETUPS)] * degree
