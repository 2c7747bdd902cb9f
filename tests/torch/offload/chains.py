"""Chains of layers, trained with and without offloading."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smpkit.testing.checked_offload import CheckedEngine, CheckedLink
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.emulated import EmulatedLink
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.link import Link

WIDTH = 16
BATCH = 8
BOUNDARY_BYTES = WIDTH * BATCH * 4


def chain(num_layers: int, dropout: float = 0.0) -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))
        for _ in range(num_layers)
    )


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def forward(layers: Iterable[nn.Module], x: Tensor, engine: ActivationEngine | None = None) -> Tensor:
    """Run checkpointed layers, whose boundaries are offloaded if there is an engine."""
    x = x * 1  # not a leaf, as nothing inside a model is
    for number, layer in enumerate(layers):
        if engine is None:
            x = checkpoint(layer, x, use_reentrant=False)
            continue
        with engine.offload_inputs(f"layers.{number}"):
            x = checkpoint(layer, x, use_reentrant=False)
    return x


def gradients(layers: nn.ModuleList, x: Tensor, run: Callable[[], Tensor]) -> list[Tensor | None]:
    """Return the gradients of everything after one pass."""
    leaves = [*layers.parameters(), x]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(2)
    run().square().sum().backward()
    return [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


def assert_same(ours: Iterable[Any], plain: Iterable[Any]) -> None:
    for left, right in zip(ours, plain, strict=True):
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)


def engine_on(link: Link | None = None, budget_bytes: int | None = None, **options: Any) -> CheckedEngine:
    """Return an engine that checks itself."""
    return CheckedEngine(CheckedLink(link or EmulatedLink()), Arena(budget_bytes), **{"lead": 2, **options})


def slow() -> EmulatedLink:
    """Return a link whose copies take so long that they overlap whatever the test does."""
    return EmulatedLink(latency_seconds=0.005, jitter_seconds=0.005)


def assert_idle(engine: ActivationEngine) -> None:
    """Raise AssertionError if a graph, a block or a byte on the device is left."""
    gc.collect()
    engine.end_step()
    assert engine.arena.num_blocks == 0
    assert engine.arena.used_bytes == 0
    assert engine.stats.device_bytes == 0
    assert not engine.storages
