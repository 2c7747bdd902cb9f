"""What a rank holds by kind is what its tensors hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.observe.events import MemorySample, read_events
from smpkit.torch.recording import recorder
from tests.torch.steps import train_step

WIDTH, ROWS, LAYERS, MICROBATCHES = 256, 64, 4, 2
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
BOUNDARY_BYTES = 4 * ROWS * WIDTH


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(value))


def samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: bool) -> list[MemorySample]:
    """Return those of the third step of a model of some layers."""
    monkeypatch.setenv(recorder.EVENTS_DIR, str(tmp_path))
    smp.init({"microbatches": MICROBATCHES, "offload_activations": offload, "skip_tracing": True})
    layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    model = smp.DistributedModel(layers)
    if offload:
        smp.set_activation_checkpointing(layers, strategy="each")
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        train_step(model, torch.ones(MICROBATCHES * ROWS, WIDTH))
        optimizer.step()
    smp.shutdown()
    events = read_events(tmp_path / "events_0.jsonl").events
    return [event for event in events if isinstance(event, MemorySample) and event.step == 2]


@pytest.mark.usefixtures("world")
def test_what_is_held_is_what_tensors_and_autograd_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = samples(tmp_path, monkeypatch, offload=False)
    weights = LAYERS * LAYER_BYTES
    assert {each.weights for each in found} == {weights}
    assert {each.states for each in found} == {2 * weights + 2 * LAYERS * 4}  # and its count of steps, by parameter
    assert (found[0].gradients, found[-1].gradients) == (0, weights)
    assert {each.offloaded for each in found} == {0}
    if found[0].activations == -1:
        return  # this C library does not count
    saved = LAYERS * BOUNDARY_BYTES  # the input of the first layer was there before, the output of the last is squared
    most = max(each.activations for each in found)
    assert saved <= most <= 3 * saved, "activations grow to what autograd saves"
    assert found[-1].activations < BOUNDARY_BYTES, "and go with backward"


@pytest.mark.usefixtures("world")
def test_what_offloading_moves_and_holds_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = samples(tmp_path, monkeypatch, offload=True)
    assert max(each.offloaded for each in found) >= BOUNDARY_BYTES
    assert found[-1].bytes_out >= found[-1].bytes_back > 0
    assert found[-1].bytes_out % BOUNDARY_BYTES == 0
    assert max(each.parked for each in found) >= BOUNDARY_BYTES
