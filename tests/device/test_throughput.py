"""How fast an offloaded model trains beside its parts: the link, the optimizer on the host, the computation."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.offload.arena import arena_for
from smpkit.torch.offload.link import link_for
from tests.device.device import gpu, in_device_time, scaled

_WIDTH, _LAYERS, _TOKENS = 2048, 16, 16384

Note = Callable[[str, Any], None]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    grow, shrink = (_WIDTH, 4 * _WIDTH), (4 * _WIDTH, _WIDTH)
    with gpu():
        blocks = [nn.Sequential(nn.Linear(*grow), nn.GELU(), nn.Linear(*shrink)) for _ in range(_LAYERS)]
    return nn.Sequential(*blocks)


def seconds_of(step: Callable[[], object], warm_up: int = 2, steps: int = 5) -> list[float]:
    """Return the times of some steps, after others."""
    times = []
    for _ in range(warm_up + steps):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        step()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return times[warm_up:]


@pytest.mark.real_gpu("compares with the time that the optimizer takes on a real host")
def test_throughput_beside_the_plain_model(record_property: Note) -> None:
    plain = layers().to(torch.bfloat16)
    x = torch.randn(_TOKENS, _WIDTH, device=gpu(), dtype=torch.bfloat16)

    def plain_step() -> None:
        plain.zero_grad()
        plain(x).float().square().mean().backward()

    compute = median(seconds_of(plain_step))
    host = [nn.Parameter(each.detach().float().cpu()) for each in plain.parameters()]
    for each in host:
        each.grad = torch.zeros_like(each)
    adam = torch.optim.AdamW(host, lr=1e-4, fused=True)
    update = median(seconds_of(adam.step))
    num_bytes = sum(each.nbytes for each in plain.parameters())
    model = OffloadModel(
        copy.deepcopy(plain).cpu().float(),
        gpu(),
        num_slices=_LAYERS,
        checkpoint_activation=True,
        num_microbatches=2,
        dtype=torch.bfloat16,
    )
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, overlap="backward", lr=1e-4)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()

    ours = median(seconds_of(step))
    into = 2 * num_bytes / ours
    record_property("compute alone s", compute)
    record_property("torch's fused AdamW on the host s", update)
    record_property("step of OffloadModel s", ours)
    record_property("GB/s of weights in", into / 1e9)
    # One after the other, with recomputation, and copies at a tenth of a link of 50 GB/s, it would take longer.
    assert ours <= 1.5 * compute + update + 3 * num_bytes / 5e9


def gigabytes_per_second(copy_once: Callable[[], object], num_bytes: int) -> float:
    copy_once()
    return num_bytes / median(seconds_of(copy_once, 1, 10)) / 1e9


@in_device_time()
def test_copies_of_the_engine_are_as_fast_as_a_bare_one(record_property: Note) -> None:
    """Out to a block of the arena and back, beside memory that torch has pinned."""
    num_bytes = scaled(1 << 30, to=16)
    link = link_for(gpu(), 60.0)
    block = arena_for(link, None).take(num_bytes)
    assert block is not None
    there = torch.empty(num_bytes, dtype=torch.uint8, device=gpu())
    torchs = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def out() -> None:
        link.wait(link.send([(there, block.memory)], [link.now()]), "a copy")

    def back() -> None:
        link.wait(link.fetch([(block.memory, there)], [link.now()]), "a copy")

    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "out": (out, lambda: torchs.copy_(there, non_blocking=True)),
        "back": (back, lambda: there.copy_(torchs, non_blocking=True)),
    }
    for way, copies in ways.items():
        ours, bare = (gigabytes_per_second(copy_once, num_bytes) for copy_once in copies)
        record_property(f"GB/s {way}, the engine's and a bare copy", f"{ours:.1f}, {bare:.1f}")
        assert ours >= 0.9 * bare
    link.close()
