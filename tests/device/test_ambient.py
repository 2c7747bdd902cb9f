"""What a script sets up around us on a GPU: a default device, streams of its own, pinned memory that it fills again."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit import OffloadModel, OffloadOptimizer, offload_activations
from tests.device.device import current_stream, default_stream, gpu, new_stream, on_stream, sleep, synchronize
from tests.device.models import Checkpointed, layers
from tests.device.ranks import run_on_gpu
from tests.models import CASES
from tests.torch.steps import train_step
from tests.train import Way, checkpoint_layers, trace_of, training

_CYCLES = 400_000_000
"""A fifth of a second on the GPU's clock."""
_WIDTH = 256


LAYERS = partial(layers, _WIDTH, 8, nn.Tanh)


def batch(step: int) -> Tensor:
    return torch.randn(16, _WIDTH, generator=torch.Generator("cpu").manual_seed(step), device="cpu")


# --- a default device -------------------------------------------------------------------------------------------------


def trained_with(default: str | None, way: Way) -> tuple[list[Any], dict[str, Tensor]]:
    """Train with a default device or without; return what all ranks tell each other of it, and this rank's weights."""
    torch.set_default_device(default)
    with training(CASES["ModuleList and a loop"], way) as trained:
        losses = [trained.run(number)[0].tolist() for number in range(len(way.batches))]
        everyone = smp.allgather({"rank": smp.rank(), "losses": losses}, smp.WORLD)
        values = trace_of([], trained.model).values
    torch.set_default_device(None)
    return everyone, values


@pytest.mark.parametrize(
    "config",
    [{}, {"virtual_pipeline_degree": 2}, {"pipeline": "zero_bubble"}, {"offload_activations": True}, {"bf16": True}],
    ids=["", "virtual stages", "zero bubble", "offload", "bf16"],
)
def test_the_gpu_as_default_device_changes_nothing(config: dict[str, Any]) -> None:
    prepare = checkpoint_layers if "offload_activations" in config else None
    way = Way(2, optimizer="AdamW", config=config, prepare=prepare)
    ours, plain = (run_on_gpu(trained_with, default, way) for default in (gpu().type, None))
    for (everyone, values), (as_before, expected) in zip(ours, plain, strict=True):
        assert everyone == as_before
        assert values.keys() == expected.keys()
        assert all(map(torch.equal, values.values(), expected.values()))


def test_offloading_works_where_the_gpu_is_the_default_device() -> None:
    plain, x = LAYERS(), batch(0).to(gpu())
    with gpu():
        model = OffloadModel(copy.deepcopy(plain), gpu(), num_slices=4)
        optimizer = OffloadOptimizer(model, lr=1e-2, max_grad_norm=1.0)
        offloaded = Checkpointed(*copy.deepcopy(plain)).to(gpu())
        offload = offload_activations(offloaded, min_bytes=0)
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            offloaded(x).square().mean().backward()
        model.synchronize()
        offload.close()
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert loss.isfinite()


# --- memory that is filled again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])
def test_an_offloaded_model_has_taken_what_the_caller_overwrites(checkpoint: bool) -> None:
    """The GPU is behind when the model is called, and the input is another batch's by the time it gets there."""
    model = OffloadModel(LAYERS(), gpu(), num_slices=4, checkpoint_activation=checkpoint)

    def passed(x: Tensor, other: Tensor, *, refills: bool) -> list[Tensor]:
        """Return the output without gradients, that of training, and gradients."""
        model.zero_grad()
        synchronize()
        sleep(_CYCLES)
        with torch.no_grad():
            plain = model(x)
        if refills:
            x.fill_(float("nan"))
        sleep(_CYCLES)
        y = model(other)
        y.square().mean().backward()
        if refills:  # not before: backward reads it again, and says so if it has changed
            other.fill_(float("nan"))
        return [plain, y.detach(), *[each.grad.clone() for each in model.parameters() if each.grad is not None]]

    expected = passed(batch(0), batch(1), refills=False)
    found = passed(batch(0).pin_memory(), batch(1).pin_memory(), refills=True)
    assert all(map(torch.equal, found, expected))


def losses_of_refilled_memory(degree: int) -> list[list[float]]:
    smp.init({"pipeline_parallel_degree": degree, "microbatches": 2, "ddp": True})
    model = smp.DistributedModel(LAYERS())
    expected = [train_step(model, batch(step)).reduce_mean().item() for step in range(3)]
    x, outputs = torch.empty(16, _WIDTH, pin_memory=True), []
    for step in range(3):
        x.copy_(batch(step))
        sleep(_CYCLES)
        outputs.append(train_step(model, x))
        x.fill_(float("nan"))
    found = [output.reduce_mean().item() for output in outputs]
    smp.shutdown()
    return [found, expected]


@pytest.mark.parametrize("degree", [1, 2])
def test_a_step_has_taken_what_the_caller_overwrites(degree: int) -> None:
    for found, expected in run_on_gpu(losses_of_refilled_memory, degree, size=degree):
        assert found == expected


# --- a stream of the caller -------------------------------------------------------------------------------------------


def gradients_on(side: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Run steps under a stream of the script's own, or not; the stream is behind when the step is called."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True, **options})
    model = smp.DistributedModel(LAYERS())
    stream = new_stream() if side else current_stream()
    losses = []
    for step in range(4):
        model.zero_grad()
        stream.wait_stream(default_stream())
        with on_stream(stream):
            sleep(_CYCLES // 4)
            x = batch(step).to(gpu(), non_blocking=True) * 1
            loss = train_step(model, x).reduce_mean()
        default_stream().wait_stream(stream)
        losses.append(loss.item())
    held = {name: each.grad.clone() for name, each in model.local_named_parameters() if each.grad is not None}
    smp.shutdown()
    return {"losses": losses, **held}


@pytest.mark.parametrize(
    "options", [{}, {"virtual_pipeline_degree": 2}, {"pipeline": "zero_bubble"}], ids=["", "parked", "zero bubble"]
)
def test_a_step_under_a_stream_of_the_script(options: dict[str, Any]) -> None:
    for found, expected in zip(
        run_on_gpu(gradients_on, True, options), run_on_gpu(gradients_on, False, options), strict=True
    ):
        assert found["losses"] == expected["losses"]
        for name in expected.keys() - {"losses"}:
            assert torch.equal(found[name], expected[name]), name
