"""Traps 10, 16, 20 and 25 where only a GPU has them: streams of others, captured graphs, pinning that fails."""

from __future__ import annotations

import contextlib
import copy
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from smpkit.torch.offload import activations
from smpkit.torch.offload.accelerator import pinned_memory
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.engine import DEBUG, ActivationEngine
from smpkit.torch.offload.link import link_for
from tests.device.device import current_stream, gpu, new_stream, on_stream, scaled, select, sleep, synchronize

_WIDTH, _BATCH = scaled(256), scaled(2048)
_BYTES = 1 << 20


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(6)]).to(gpu())


def gradients(model: nn.Module, x: Tensor, context: AbstractContextManager[object]) -> list[Tensor]:
    model.zero_grad()
    with context:
        loss = model(x).float().square().sum()
    loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [(each.to_local() if isinstance(each, DTensor) else each).clone() for each in found]


def batch() -> Tensor:
    return torch.randn(_BATCH, _WIDTH, device=gpu(), generator=torch.Generator(gpu()).manual_seed(1))


@pytest.fixture
def x() -> Tensor:
    return batch()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Be a world of one rank."""
    select()
    backend = dist.Backend.default_device_backend_map[gpu().type]
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def divided(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh(gpu().type, (1,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def replicated(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=1)


@pytest.mark.also_on("sim:lazy:0", wrap=divided, debug="1")
@pytest.mark.parametrize("wrap", [divided, replicated])
@pytest.mark.parametrize("debug", ["0", "1"])
@alone()
def test_10_wrappers_with_streams_of_their_own(wrap: Callable[[nn.Sequential], nn.Module], debug: str) -> None:
    with mock.patch.dict(os.environ, {DEBUG: debug}):
        x = batch()
        expected = gradients(wrap(blocks()), x, contextlib.nullcontext())
        model = wrap(blocks())
        offload = activations(model, lead=2, min_bytes=0)
        for _ in range(4):
            assert all(map(torch.equal, gradients(model, x, offload), expected))
            gc.collect()
        assert offload.report().bytes_back > 0
        offload.close()


def test_16_casts_that_autocast_keeps(x: Tensor) -> None:
    def cast(model: nn.Module) -> list[Tensor]:
        return gradients(model, x, autocast)

    model = blocks()
    autocast: AbstractContextManager[object] = torch.autocast(gpu().type, torch.bfloat16)
    expected = cast(copy.deepcopy(model))
    offload = activations(model, lead=2, min_bytes=0)
    for _ in range(3):
        with offload:
            ours = cast(model)
        assert all(map(torch.equal, ours, expected))
    offload.close()


@pytest.mark.real_gpu("captures a graph")
def test_20_what_is_on_its_way_does_not_spoil_a_capture(x: Tensor) -> None:
    """Events must not be asked for while a graph is captured: with graphs alive there is something to ask for."""
    model = blocks()
    offload = activations(model, min_bytes=0)
    with offload:
        alive = model(x).square().sum()  # its copies run while the capture begins
    static = x.clone().requires_grad_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), offload:
        y = (static * 2).square()
    graph.replay()
    assert torch.equal(y, (x * 2).square())
    expected = [each.clone() for each in torch.autograd.grad(model(x).square().sum(), [*model.parameters()])]
    assert all(map(torch.equal, torch.autograd.grad(alive, [*model.parameters()]), expected))
    offload.close()


def test_25_memory_that_cannot_be_pinned_is_a_spent_budget_and_no_error_of_the_next_kernel(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA keeps a failed call as the thread's last error, which torch would take for that of its next kernel."""
    link = link_for(gpu(), 60.0)
    mapping = mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    monkeypatch.setattr(mmap, "mmap", lambda *_, **__: mapping)
    _, release = pinned_memory(gpu(), _BYTES)
    with pytest.raises(OSError, match=r"cudaHostRegister|is registered already"):  # nothing is pinned twice
        pinned_memory(gpu(), _BYTES)
    assert torch.equal(x * 2, x + x)
    engine = ActivationEngine(link, Arena(memory=lambda _: pinned_memory(x.device, _BYTES)), lead=1, min_bytes=0)
    z = x.clone().requires_grad_()
    with engine.offload_inputs("layer"):
        loss = (z * 1).square().sum()
    loss.backward()
    assert engine.stats.kept_bytes == x.nbytes
    assert z.grad is not None
    assert torch.equal(z.grad, 2 * x)
    synchronize()
    engine.close()
    release()


def test_measuring_the_link_disturbs_no_work_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that it measures with may be memory that the computing stream is still reading."""
    monkeypatch.setattr("smpkit.torch.offload.accelerator._speeds", {})  # measured once for a device
    side = new_stream()
    side.wait_stream(current_stream())
    with on_stream(side):
        source = torch.full((32 << 20,), 3, dtype=torch.uint8, device=gpu())
        sleep(50_000_000)
        kept = source.clone()
        del source  # its memory is the next one's of the same size on this stream
        link = link_for(gpu(), 60.0)
    current_stream().wait_stream(side)
    assert bool((kept == 3).all())
    assert link.out_bytes_per_second > 0
    link.close()
