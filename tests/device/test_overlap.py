"""Copies run beside the computation: the profiler's intervals say so, and the step takes no longer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from benchmarks.activation_offload.blocks import Decoder, train_step
from smpkit import OffloadModel, OffloadOptimizer, offload_activations
from smpkit.testing import simulated_device
from tests.device.device import IS_SIMULATED, gpu, in_device_time, scaled
from tests.device.test_throughput import seconds_of

_WIDTH, _TOKENS, _LAYERS = 4096, 8192, 8
_TURNS = 12

Note = Callable[[str, Any], None]


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    with gpu():
        decoder = Decoder(_WIDTH, 32, _LAYERS).to(torch.bfloat16)
    decoder.is_checkpointed = True
    return decoder


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(1, _TOKENS, _WIDTH, device=gpu(), dtype=torch.bfloat16)


def overlap_of(work: Callable[[], object]) -> tuple[float, float, float]:
    """Return the microseconds of copies to the host and from it, and beside which part of that time kernels ran."""
    torch.accelerator.synchronize()
    intervals = defaultdict[str, list[tuple[float, float]]](list)
    for name, begin, end in _simulated_events(work) if IS_SIMULATED else _events(work):
        kind = "out" if "DtoH" in name else "back" if "HtoD" in name else "" if "Memset" in name else "kernels"
        intervals[kind].append((begin, end))
    out, back, kernels = (_union(intervals[kind]) for kind in ("out", "back", "kernels"))
    hidden = [max(0.0, min(end, last) - max(begin, first)) for begin, end in [*out, *back] for first, last in kernels]
    return _length(out), _length(back), sum(hidden) / (_length(out) + _length(back))


def _events(work: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Return what the device does: the name, start and end, in microseconds."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        work()
        torch.accelerator.synchronize()
    events = profiler.events()
    assert events is not None
    there = [each for each in events if each.device_type == DeviceType.CUDA and not each.is_user_annotation]
    return [(each.name, each.time_range.start, each.time_range.end) for each in there]


def _simulated_events(work: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Return what the simulated device does, named as the profiler names it."""
    names = {"copy to the host": "Memcpy DtoH", "copy to the device": "Memcpy HtoD"}
    simulated_device.configure(traced=True)
    simulated_device.timeline()
    work()
    torch.accelerator.synchronize()
    found = simulated_device.timeline()
    simulated_device.configure()
    return [(names.get(each.what, each.what), each.begin * 1e6, each.end * 1e6) for each in found]


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return disjoint intervals, in order, that cover the same."""
    disjoint: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if disjoint and begin <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(disjoint[-1][1], end))
        else:
            disjoint.append((begin, end))
    return disjoint


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals)


@pytest.mark.real_gpu("measures kernels that run beside copies, at sizes that a CPU is too slow for")
def test_boundaries_cost_no_time(model: Decoder, x: Tensor, record_property: Note) -> None:
    """A step takes 2 % longer at most."""
    step = partial(train_step, model, x)
    for _ in range(2):
        step()
    theirs = min(seconds_of(step, 0, _TURNS))
    with offload_activations(model) as offload:
        for _ in range(4):  # in which the engine pins memory and learns how far ahead to load
            step()
        ours = min(seconds_of(step, 0, _TURNS))
        *_, share = overlap_of(step)
        report = offload.report().steps[-1]
    again = min(seconds_of(step, 0, _TURNS))  # a GPU that grows warm is slower
    record_property("plain ms, before and after", f"{1e3 * theirs:.2f}, {1e3 * again:.2f}")
    record_property("offloaded ms", 1e3 * ours)
    record_property("copies beside kernels", share)
    record_property("stall ms", 1e3 * report.stall_seconds)
    assert report.bytes_out == _LAYERS * x.nbytes
    assert share > 0.9
    assert report.stall_seconds <= 0.02 * ours
    assert ours <= 1.02 * max(theirs, again)


@in_device_time()
def test_slices_come_while_others_compute(record_property: Note) -> None:
    torch.manual_seed(0)
    width = scaled(2048)
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(16)])
    model = OffloadModel(layers, gpu(), num_slices=8, checkpoint_activation=True, num_microbatches=4)
    optimizer = OffloadOptimizer(model, lr=1e-4)
    x = torch.randn(scaled(32768, to=8), width, device=gpu())

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    out, back, share = overlap_of(step)
    record_property("copies beside kernels", share)
    assert out > 0
    assert back > 0
    assert share > 0.5
