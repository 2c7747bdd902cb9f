"""Boundaries that leave a GPU and come back: the same gradients, and the memory that the plan predicts."""

from __future__ import annotations

import contextlib

import pytest
import torch

from benchmarks.activation_offload.blocks import Block, Decoder, gradients_of, train_step
from benchmarks.activation_offload.stage import run_stage
from smpkit.plan.schedule.templates import one_f_one_b
from smpkit.torch.offload import activations
from smpkit.torch.offload.engine import make_engine
from tests.device.device import allocated_bytes, gpu, in_device_time, peak_bytes, reset_peak, scaled, synchronize

_WIDTH, _TOKENS, _LAYERS = scaled(1024), scaled(2048), 8
_BOUNDARY = 2 * _WIDTH * _TOKENS


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    made = Decoder(_WIDTH, 16, _LAYERS).to(gpu(), torch.bfloat16)
    made.is_checkpointed = True
    return made


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(1, _TOKENS, _WIDTH, device=gpu(), dtype=torch.bfloat16)


def test_gradients_are_the_same_bits(model: Decoder, x: torch.Tensor) -> None:
    train_step(model, x, contextlib.nullcontext)
    expected = gradients_of(model)
    offload = activations(model)
    for _ in range(4):
        train_step(model, x, lambda: offload)
        assert all(map(torch.equal, gradients_of(model), expected))
    assert offload.report().steps[-1].bytes_out == _LAYERS * _BOUNDARY
    offload.close()


@in_device_time()
def test_boundaries_are_not_on_the_device_after_forward(model: Decoder, x: torch.Tensor) -> None:
    def held(offload: contextlib.AbstractContextManager[object]) -> int:
        before = allocated_bytes()
        with offload:
            y = model(x)
        synchronize()
        held = allocated_bytes() - before
        y.float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        return held

    held(contextlib.nullcontext())
    plain = held(contextlib.nullcontext())
    offload = activations(model, lead=2)
    held(offload)
    # The caller's own input is one of the boundaries; at most the latest three are still there, and y.
    assert plain - held(offload) >= (_LAYERS - 1 - 3) * _BOUNDARY
    offload.close()


@pytest.mark.parametrize("horizon", [1, 4, None])
@in_device_time()
def test_a_stage_of_a_pipeline_needs_less_memory(horizon: int | None) -> None:
    torch.manual_seed(0)
    layers = [Block(_WIDTH, 16).to(gpu(), torch.bfloat16) for _ in range(4)]
    actions = one_f_one_b(4, 8).actions[0]
    engine = make_engine(gpu(), horizon=horizon, min_bytes=0)

    def make_input() -> torch.Tensor:
        return torch.ones(1, _TOKENS, _WIDTH, device=gpu(), dtype=torch.bfloat16, requires_grad=True)

    def step(*, offloads: bool) -> tuple[int, list[torch.Tensor]]:
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        reset_peak()
        run_stage(actions, layers, make_input, engine if offloads else None)
        synchronize()
        # Copies on the host: on the device they would count in the next step's peak.
        return peak_bytes(), [each.cpu() for layer in layers for each in gradients_of(layer)]

    plain_peak, expected = step(offloads=False)
    for _ in range(3):
        peak, found = step(offloads=True)
        assert all(map(torch.equal, found, expected))
    assert plain_peak - peak >= 4 * _BOUNDARY
    engine.close()
