"""No step makes the host wait for the GPU where nothing needs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import smpkit.torch as smp
from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.distributed.run_meter import Sampling
from tests.device.device import (
    IS_SIMULATED,
    current_stream,
    gpu,
    new_stream,
    on_stream,
    sleep,
    synchronize,
    waiting_is_an_error,
    waits_of,
)
from tests.device.ranks import run_on_gpu
from tests.models import DROPOUT, WIDTH, DroppingLayer
from tests.train import KINDS, batch, training

_WARM = Sampling().first + 2
"""Steps in which memory is pinned, kernels are loaded and schedules tried; the first ones are measured, and wait."""


def on(device: torch.device | str, number: int) -> tuple[torch.Tensor, ...]:
    """Return the batch of a step on a device."""
    return tuple(each.to(device) for each in batch(DROPOUT, number, 8))


def strict_step(name: str, on_host: bool) -> bool:
    with training(*KINDS[name]) as trained:
        for number in range(_WARM):
            trained.step(*on("cpu" if on_host else gpu(), number))
        arguments = on("cpu" if on_host else gpu(), _WARM)
        with waiting_is_an_error():
            loss = trained.step(*arguments).reduce_mean()
        return bool(loss.isfinite())


@pytest.mark.parametrize("on_host", [False, True], ids=["batch on the GPU", "batch on the host"])
@pytest.mark.parametrize("name", ["plain", "activations offloaded"])
def test_a_step_never_waits(name: str, on_host: bool) -> None:
    assert run_on_gpu(strict_step, name, on_host, size=1, timeout=170) == [True]


def places_of_syncs(name: str) -> list[str]:
    """Return the functions of the product that waited in a step and its optimizer's.

    Not what gloo does in its own threads with tensors of a GPU that ranks share.
    """
    product = Path(smp.__file__).parent

    def place(frames: list[tuple[str, str]], what: str) -> str:
        ours = [f"{Path(file).stem}.{function}" for file, function in frames if Path(file).is_relative_to(product)]
        return ours[0] if ours else what

    with training(*KINDS[name]) as trained:
        for number in range(_WARM):
            trained.step(*on(gpu(), number))
        arguments = on(gpu(), _WARM)
        found = waits_of(lambda: trained.step(*arguments).reduce_mean(), place)
    return sorted(set(found))


@pytest.mark.parametrize("name", ["data", "tensor", "data, sharded state"])
def test_parallel_steps_never_wait(name: str) -> None:
    assert run_on_gpu(places_of_syncs, name, timeout=170) == [[], []]


@pytest.mark.parametrize("name", ["pipeline", "interleaved"])
def test_a_pipelined_step_waits_only_where_values_go_through_the_hosts(name: str) -> None:
    """Two ranks on one GPU have no lanes: each value is copied to the host before it is sent.

    Simulated ranks have a device each, and lanes.
    """
    for places in run_on_gpu(places_of_syncs, name, timeout=170):
        assert bool(places) != IS_SIMULATED, places
        assert all(place.startswith("transport.") for place in places), places


def test_fp16_reads_once_whether_a_gradient_has_overflowed() -> None:
    (places,) = run_on_gpu(places_of_syncs, "fp16", size=1, timeout=170)
    assert places == ["master_weights.unscale_gradients"]


def test_flags_of_unused_parameters_are_read_once() -> None:
    for places in run_on_gpu(places_of_syncs, "data, one parameter unused", timeout=170):
        assert places == ["reducer._flags_of"]


@pytest.mark.also_on("sim:lazy:0", checkpoint=True)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_an_offload_model_s_forward_and_backward_never_wait(checkpoint: bool) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[DroppingLayer() for _ in range(4)])
    model = OffloadModel(module.double(), gpu(), num_slices=4, checkpoint_activation=checkpoint)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01)
    x, _ = on(gpu(), 0)
    for _ in range(_WARM):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    with waiting_is_an_error():
        model(x).square().mean().backward()
    optimizer.step()


def refilled() -> list[float]:
    """Return the loss of a step on a batch, and that of one whose memory is written to right after the call."""
    losses = []
    for refill in (False, True):
        with training(*KINDS["plain"]) as trained:
            trained.step(*on("cpu", 0))
            x, y = (each.pin_memory() for each in on("cpu", 1))
            sleep(1_000_000_000)  # the copy comes behind this, half a second late
            loss = trained.step(x, y).reduce_mean()
            if refill:
                x.fill_(float("nan"))
            losses.append(loss.item())
    return losses


def test_a_pinned_batch_may_be_refilled_as_soon_as_the_call_is_over() -> None:
    (losses,) = run_on_gpu(refilled, size=1)
    assert losses[0] == losses[1]


def on_a_side_stream(side: bool) -> list[float]:
    """Return the losses of a pipeline with virtual stages, called on a stream that is far behind the default one."""
    losses = []
    stream = new_stream() if side else current_stream()
    with training(*KINDS["interleaved"]) as trained, on_stream(stream):
        for number in range(_WARM):
            x = torch.zeros(8, WIDTH, device=gpu(), dtype=torch.float64)
            sleep(100_000_000)
            on_host, y = on("cpu", number)
            x.copy_(on_host.pin_memory(), non_blocking=True)
            losses.append(trained.step(x, y).reduce_mean())
        synchronize()
        return [loss.item() for loss in losses]


def test_parked_microbatches_run_on_the_caller_s_stream() -> None:
    for side, plain in zip(run_on_gpu(on_a_side_stream, True), run_on_gpu(on_a_side_stream, False), strict=True):
        assert side == plain
