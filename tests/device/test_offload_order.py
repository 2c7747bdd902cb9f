"""What only a GPU can show of the traps in `tests/torch/offload/test_traps.py`: streams, allocator, captured graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from smpkit.testing.checked_offload import CheckedEngine, CheckedLink
from smpkit.torch.offload.accelerator import AcceleratorLink, pinned_memory
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.link import link_for
from tests.device.device import current_stream, gpu, new_stream, on_stream, scaled

_WIDTH, _LAYERS = scaled(512), 8


def pinned(num_bytes: int) -> tuple[Tensor, Callable[[], object]]:
    return pinned_memory(gpu(), num_bytes)


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)).to(gpu())


def forward(model: nn.ModuleList, x: Tensor, engine: ActivationEngine | None) -> Tensor:
    x = x * 1
    for number, layer in enumerate(model):
        if engine is None:
            x = layer(x).relu()
            continue
        with engine.offload_inputs(f"layers.{number}"):
            x = layer(x).relu()
    return x


def gradients(model: nn.ModuleList, engine: ActivationEngine | None) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(1024, _WIDTH, device=gpu())
    for parameter in model.parameters():
        parameter.grad = None
    forward(model, x, engine).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def checked() -> CheckedEngine:
    link = link_for(gpu(), 60.0)
    return CheckedEngine(CheckedLink(link), Arena(memory=pinned), lead=2, min_bytes=0)


def test_07_08_and_09_the_checker_finds_no_race_and_no_changed_bit() -> None:
    model, engine = layers(), checked()
    engine.exclude(model.parameters())
    plain = gradients(model, None)
    for _ in range(3):
        assert all(map(torch.equal, gradients(model, engine), plain))
        gc.collect()
        engine.end_step()
    engine.close()


def test_10_forward_and_backward_on_another_stream() -> None:
    model, engine = layers(), checked()
    engine.exclude(model.parameters())
    plain = gradients(model, None)
    side = new_stream()
    for _ in range(3):
        side.wait_stream(current_stream())
        with on_stream(side):
            ours = gradients(model, engine)
        current_stream().wait_stream(side)
        assert all(map(torch.equal, ours, plain))
        gc.collect()
    engine.end_step()
    engine.close()


@pytest.mark.real_gpu("captures a graph")
def test_20_nothing_is_offloaded_while_a_graph_is_captured() -> None:
    engine = ActivationEngine(
        link_for(gpu(), 60.0),
        Arena(memory=pinned),
        lead=2,
        min_bytes=0,
    )
    x = torch.randn(64, _WIDTH, device=gpu(), requires_grad=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), engine.offload_inputs("layer"):
        y = (x * 1).square()
    assert engine.stats.bytes_out == 0
    graph.replay()
    assert torch.equal(y, x.square())
    engine.close()


def test_host_memory_is_pinned_and_exact() -> None:
    tensor, release = pinned_memory(gpu(), 3 * 4096)
    assert tensor.numel() == 3 * 4096
    assert tensor.is_pinned()
    release()
    assert AcceleratorLink.is_stream_ordered
