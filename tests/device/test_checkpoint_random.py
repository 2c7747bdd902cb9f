"""Recomputed layers draw the numbers again that forward drew on the GPU, in every kernel that draws, at any degree."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import smpkit.torch as smp
from tests.device.device import gpu
from tests.device.ranks import run_on_gpu
from tests.models import plainly
from tests.torch.steps import over_ranks

_WIDTH, _LENGTH, _HEADS = 128, 64, 2
_KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


class Layer(nn.Module):
    """Attention and a linear layer that drop."""

    def __init__(self, chance: float, kernel: str) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.chance, self.kernel = chance, kernel

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(x).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(_KERNELS[self.kernel]):
            mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.chance, is_causal=True)
        return x + functional.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.chance)


class Model(nn.Module):
    def __init__(self, call: Any, chance: float, kernel: str) -> None:
        super().__init__()
        self.call = call
        self.layers = nn.ModuleList([Layer(chance, kernel) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = model(x).float().square().mean()
    model.backward(loss)
    return loss


def train(call: Any, chance: float, kernel: str, degree: int) -> dict[str, Any]:
    """Return losses, and gradients of what this rank holds, of two steps."""
    torch.manual_seed(7)
    module = Model(call, chance, kernel)
    places = {layer: index * degree // len(module.layers) for index, layer in enumerate(module.layers)}
    model = over_ranks(module, places, microbatches=2)
    losses = []
    for step in range(2):
        model.zero_grad()
        x = torch.randn(4, _LENGTH, _WIDTH, generator=torch.Generator().manual_seed(step))
        losses.append(train_step(model, x).reduce_mean().item())
    held = {name: each.grad.clone() for name, each in model.local_named_parameters() if each.grad is not None}
    smp.shutdown()
    return {"losses": losses, **held}


@functools.cache
def found(call: Any, chance: float, kernel: str, degree: int) -> dict[str, Any]:
    """Return what all ranks hold; to start them takes longest."""
    ranks = run_on_gpu(train, call, chance, kernel, degree, size=degree)
    return dict(item for rank in ranks for item in rank.items())


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], rtol: float = 0, atol: float = 0) -> None:
    assert ours.keys() == theirs.keys()
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=rtol / 100, abs=0)
    for name in ours.keys() - {"losses"}:
        torch.testing.assert_close(ours[name], theirs[name], rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize("kernel", _KERNELS)
@pytest.mark.parametrize("degree", [1, 2])
def test_gradients_are_the_bits_of_a_plain_call(degree: int, kernel: str) -> None:
    assert_close(found(smp.checkpoint, 0.3, kernel, degree), found(plainly, 0.3, kernel, degree))
    assert found(plainly, 0.3, kernel, degree)["losses"] != found(plainly, 0.0, kernel, 1)["losses"]


class Lookup(nn.Module):
    """Drops what it looks up, by weights or token ids that it is given, or by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.Parameter(torch.randn(_LENGTH, _WIDTH)), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, given: Tensor | None = None) -> Tensor:
        rows = self.rows if given is None else given
        if not rows.is_floating_point():
            rows = self.rows[rows.to(self.rows.device)]
        return functional.dropout(self.out(rows).tanh(), 0.5)


@pytest.mark.also_on("sim:lazy:0")
def test_a_layer_that_is_given_nothing_of_the_device_repeats_its_masks_and_its_dtypes() -> None:
    layer = Lookup().to(gpu())
    for given in ((), (layer.rows,), (torch.arange(3),)):
        gradients = []
        for call in (plainly, smp.checkpoint):
            layer.zero_grad()
            torch.manual_seed(1)
            with torch.autocast(gpu().type, torch.bfloat16):
                output = call(layer, *given)
            output.square().sum().backward()
            gradients.append([each.grad for each in layer.parameters()])
        assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("kernel", _KERNELS)
def test_masks_are_the_same_on_one_rank_and_on_two(kernel: str) -> None:
    # Masks that differ would change the loss by percents; bf16 on the same kernels by nothing, or next to it.
    assert_close(found(plainly, 0.3, kernel, 2), found(plainly, 0.3, kernel, 1), rtol=1e-2, atol=1e-4)
