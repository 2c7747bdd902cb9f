"""Fused optimizers on the GPU beside torch's, and beside themselves on the CPU; compiled layers that are offloaded."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from benchmarks.activation_offload.blocks import Decoder, gradients_of, train_step
from smpkit import offload_activations
from tests.device.device import gpu

_SHAPES = [(257, 33), (5,), (64, 64, 3), (1,)]
_STEPS = 10


def train(make: Any, device: torch.device | str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)

    def drawn() -> list[Tensor]:
        numbers = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]
        return [each.to(device, dtype) for each in numbers]

    weights = [nn.Parameter(each) for each in drawn()]
    optimizer = make(weights)
    for _ in range(_STEPS):
        for weight, gradient in zip(weights, drawn(), strict=True):
            weight.grad = gradient
        optimizer.step()
    return [each.detach().cpu() for each in weights]


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad"])
def test_they_do_on_a_gpu_what_they_do_on_a_cpu(name: str) -> None:
    make = getattr(smp.optimizers, name)
    ours, theirs = [train(lambda w: make(w, lr=1e-2, weight_decay=0.1), to, torch.float64) for to in (gpu(), "cpu")]
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


@pytest.mark.real_gpu("compiles kernels of Triton")
@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("cc")), reason="needs a C compiler, for Triton")
@pytest.mark.timeout(160)
def test_compiled_layers_offload_the_same_gradients() -> None:
    torch.manual_seed(0)
    plain = Decoder(256, 4, 4).to(gpu(), torch.bfloat16)
    plain.is_checkpointed = True
    model = copy.deepcopy(plain)
    for each in (plain, model):
        for layer in each.layers:
            layer.compile()
    x = torch.randn(1, 2048, 256, device=gpu(), dtype=torch.bfloat16)
    loss = train_step(plain, x)
    offload = offload_activations(model, min_bytes=0)
    for _ in range(3):
        assert train_step(model, x).equal(loss)
        assert all(map(torch.equal, gradients_of(model), gradients_of(plain)))
    assert offload.report().steps[-1].bytes_out > 0
    offload.close()
