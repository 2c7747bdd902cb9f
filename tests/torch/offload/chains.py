"""Chains of checkpointed layers, trained with and without offloading."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from smpkit.testing import EmulatedLink
from smpkit.torch.core.offloader import KEEPING
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.link import Link
from smpkit.torch.offload.order import BackwardOrder
from smpkit.torch.recompute.region import checkpointing

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


def call(function: Callable[..., Any], *args: Any, engine: ActivationEngine | None, name: str = "layer") -> Any:
    """Call a checkpointed function; an engine offloads its inputs."""
    modules = [function] if isinstance(function, nn.Module) else []
    with checkpointing(function, modules, args, {}, name, engine or KEEPING):
        return function(*args)


def forward(layers: Iterable[nn.Module], x: Tensor, engine: ActivationEngine | None = None) -> Tensor:
    """Run checkpointed layers; an engine offloads what they keep."""
    x = x * 1  # not a leaf, as nothing inside a model is
    for number, layer in enumerate(layers):
        x = call(layer, x, engine=engine, name=f"layers.{number}")
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


def allocate(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")


def engine_on(
    link: Link | None = None, budget_bytes: int | None = 1 << 20, horizon: int | None = None, **options: Any
) -> ActivationEngine:
    arena = Arena(budget_bytes, allocate)
    return ActivationEngine(link or Link(), arena, BackwardOrder(horizon), **{"lead": 2, **options})


def evict(engine: ActivationEngine) -> None:
    """Let go of what has left, as later calls do."""
    for number in range(3):
        engine.park(f"later {number}", [torch.zeros(1)])


def slow() -> EmulatedLink:
    """Return a link to which things leave while a layer runs, and from which they come back late."""
    return EmulatedLink(back_bytes_per_second=100 * BOUNDARY_BYTES, jitter_seconds=0.0005)


def assert_idle(engine: ActivationEngine) -> None:
    """Raise AssertionError if a graph, a block or a byte on the device is left."""
    gc.collect()
    engine.end_step()
    assert engine.use().parked == engine.use().offloaded == engine.footprint() == 0
    assert [len(engine._parked), len(engine._loaded), len(engine.order._waiting)] == [0, 0, 0]
