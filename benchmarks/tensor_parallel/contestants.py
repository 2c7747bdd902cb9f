"""The same block, divided by smpkit's modules and by torch's DTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import smpkit.torch as smp
from smpkit.torch.tensor_parallel.layouts import Layout

HEAD_SIZE = 32


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.dense = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linears = (self.query, self.key, self.value)
        query, key, value = (linear(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for linear in linears)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dense(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer layer with its norms first, as GPT-2's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.second_norm = nn.LayerNorm(width)
        self.mlp = mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.mlp(self.second_norm(x))


def dtensor_mlp(plain: nn.Module, mesh: DeviceMesh, boundary: Layout) -> nn.Module:
    between = Shard(0) if boundary is Layout.SHARD_BATCH else Replicate()
    plan = {"0": ColwiseParallel(input_layouts=between), "2": RowwiseParallel(output_layouts=between)}
    return parallelize_module(plain, mesh, plan)


def dtensor_block(plain: nn.Module, mesh: DeviceMesh, boundary: Layout) -> nn.Module:
    """Divide a Block as torchtitan does: its attention's input is gathered once for three linear layers."""
    between = Shard(0) if boundary is Layout.SHARD_BATCH else Replicate()
    return parallelize_module(
        plain,
        mesh,
        {
            "attention": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.dense": RowwiseParallel(output_layouts=between),
            "mlp.0": ColwiseParallel(input_layouts=between),
            "mlp.2": RowwiseParallel(output_layouts=between),
        },
    )


def smpkit_mlp(plain: nn.Module, width: int, boundary: Layout) -> nn.Module:
    grow = smp.nn.ColumnParallelLinear(width, 4 * width, boundary=boundary)
    shrink = smp.nn.RowParallelLinear(4 * width, width, boundary=boundary)
    state = plain.state_dict()
    grow.load_whole({"weight": state["0.weight"], "bias": state["0.bias"]})
    shrink.load_whole({"weight": state["2.weight"], "bias": state["2.bias"]})
    return nn.Sequential(grow, nn.GELU(), shrink)


class SmpkitBlock(nn.Module):
    """Our layer, called with a tensor and not with a tuple."""

    def __init__(self, layer: smp.nn.DistributedTransformerLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer((x, None))[0]


def smpkit_block(plain: nn.Module, width: int, boundary: Layout) -> nn.Module:
    layer = smp.nn.DistributedTransformerLayer(
        width // HEAD_SIZE,
        HEAD_SIZE,
        width,
        4 * width,
        attention_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        causal_mask_size=4096,
        pre_layernorm=True,
        post_layernorm=False,
        boundary=boundary,
    )
    theirs = plain.state_dict()
    pairs = {"attention.pre_layernorm": "first_norm", "attention.dense": "attention.dense"}
    pairs |= {"output.pre_layernorm": "second_norm", "output.dense1": "mlp.0", "output.dense2": "mlp.2"}
    state = {f"{our}.{kind}": theirs[f"{their}.{kind}"] for our, their in pairs.items() for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        packed = [theirs[f"attention.{name}.{kind}"] for name in ("query", "key", "value")]
        state[f"attention.query_key_value.{kind}"] = torch.cat(packed)
    layer.load_whole(state)
    return SmpkitBlock(layer)
