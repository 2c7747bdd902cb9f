"""No step makes the host wait for the GPU where nothing needs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import smpkit.torch as smp
from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.recording.run_meter import Sampling
from tests.device.device import IS_SIMULATED, gpu, waits_of
from tests.device.ranks import run_on_gpu
from tests.models import DROPOUT, DroppingLayer
from tests.train import KINDS, batch, training

_WARM = Sampling().first + 2
"""Steps in which memory is pinned, kernels are loaded and schedules tried; the first ones are measured, and wait."""


def on(device: torch.device | str, number: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Return the batch of a step on a device."""
    return tuple(tensor.to(device, dtype) for tensor in batch(DROPOUT, number, 8))


_MUST_WAIT = {
    # Whether a gradient has overflowed decides whether the optimizer steps.
    "fp16": ["master_weights.unscale_gradients"],
    # Whether any replica has a gradient for what this one left out.
    "data, one parameter unused": ["reducer.unpack"],
}
"""Where each rank has to wait once in a step; kinds that are not here never wait."""


def place(frames: list[tuple[str, str]], what: str) -> str:
    """Return the function of the product that waited."""
    product = Path(smp.__file__).parent
    ours = [f"{Path(file).stem}.{function}" for file, function in frames if Path(file).is_relative_to(product)]
    return ours[0] if ours else what


def places_of_syncs(name: str, on_host: bool) -> list[str]:
    """Return where the host waited in a step and its optimizer's, once for each time on the simulated device.

    Not what gloo does in its own threads with tensors of a GPU that ranks share.
    """
    place_of_batch = "cpu" if on_host else gpu()
    # On a GPU, torch's loss takes targets of the type of its input only: that of `fp16` is float32.
    dtype = torch.float32 if name == "fp16" else torch.float64
    with training(*KINDS[name]) as trained:
        for number in range(_WARM):
            trained.step(*on(place_of_batch, number, dtype))
        arguments = on(place_of_batch, _WARM, dtype)
        found = waits_of(lambda: trained.step(*arguments).reduce_mean(), place)
    return found if IS_SIMULATED else sorted(set(found))


@pytest.mark.also_on("sim:lazy:0", on_host=True)
@pytest.mark.parametrize("on_host", [False, True], ids=["batch on the GPU", "batch on the host"])
@pytest.mark.parametrize("name", KINDS)
def test_a_step_waits_only_where_it_must(name: str, on_host: bool, device: str) -> None:
    """Two ranks on one GPU are not connected, so each value of a pipeline is copied to the host before it is sent.

    Simulated ranks have a device each, and are connected.
    """
    found = run_on_gpu(places_of_syncs, name, on_host, size=KINDS[name][1].ranks, timeout=170)
    for places in found:
        if device == "cuda" and KINDS[name][1].pipeline > 1:
            assert places
            assert all(each.startswith("transport.") for each in places), places
        else:
            assert places == _MUST_WAIT.get(name, [])


@pytest.mark.also_on("sim:lazy:0")
def test_all_kinds_of_waits_are_found() -> None:
    x = torch.ones(3, device=gpu())
    for work in (
        x[0].item,
        x.tolist,
        lambda: bool(x[0] > -1),
        lambda: torch.zeros(3).copy_(x),
        lambda: torch.tensor([1.0], device=gpu()),
        torch.accelerator.current_stream().synchronize,
    ):
        assert len(waits_of(work, lambda _, what: what)) == 1


def places_of_clipping(name: str) -> list[str]:
    with training(*KINDS[name]) as trained:
        trained.step(*on(gpu(), 0))
        parameters = [parameter for _, parameter in trained.parameters()]
        return waits_of(lambda: smp.clip_grad_norm_(parameters, 0.1), place)


@pytest.mark.also_on("sim:lazy:0")
@pytest.mark.parametrize("name", ["plain", "pipeline", "tensor"])
def test_clipping_never_waits(name: str, device: str) -> None:
    del device  # which the ranks have
    assert not any(run_on_gpu(places_of_clipping, name, size=KINDS[name][1].ranks, timeout=170))


@pytest.mark.also_on("sim:lazy:0", checkpoint=True)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_an_offload_model_waits_for_its_gradients_alone(checkpoint: bool) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[DroppingLayer() for _ in range(4)])
    model = OffloadModel(module.double(), gpu(), num_slices=4, checkpoint_activation=checkpoint)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, max_grad_norm=1.0)
    x, _ = on(gpu(), 0)
    for _ in range(_WARM):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    # The gradients are waited for by events, at the end of backward.
    assert waits_of(lambda: model(x).square().mean().backward(), place) == []
    assert waits_of(optimizer.step, place) == []
