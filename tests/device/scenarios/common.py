"""What a scenario is, all of them by name, and how one is run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from smpkit.testing import simulated_device
from smpkit.torch.offload import arena, link
from smpkit.torch.offload_model import optimizer

DEVICE = "sim:0"
WIDTH = 16


@dataclass(frozen=True)
class Scenario:
    """A training and the comparison of what came out.

    Attributes:
        run: raises AssertionError where a value is wrong.
        ranks: how many processes run it.
        is_quick: whether the default suite runs it.
    """

    run: Callable[[], None]
    ranks: int = 1
    is_quick: bool = False


SCENARIOS: dict[str, Scenario] = {}

_order: tuple[str, int] = ("lazy", 0)
_updates_are_slow = False


def rows(number: int) -> Tensor:
    """Return the batch of a step, on the host."""
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number), device="cpu")


def run_scenario(name: str, order: tuple[str, int]) -> None:
    """Run a scenario on this rank, with what ctypes reads and writes behind torch's back told to the device.

    The device runs work by `order`, a policy and a seed.
    """
    global _order  # noqa: PLW0603 - of this process, which runs one after the other
    _order = order
    simulated_device.set_policy(*order)
    with (
        mock.patch.object(link, "_MEASURED_BYTES", 4096),  # 32 MiB take longer than all the rest
        mock.patch.object(arena, "_SLAB", 4096),  # so does a slab of 256
        mock.patch.object(optimizer, "_update", _told_update),
    ):
        SCENARIOS[name].run()


def present_order() -> tuple[str, int]:
    """Return the order that the scenario is run by."""
    return _order


@contextlib.contextmanager
def slow_updates() -> Iterator[None]:
    """Let the threads of an OffloadOptimizer take so long that nobody finds their work done by luck."""
    with mock.patch(f"{__name__}._updates_are_slow", new=True):
        yield


_update = optimizer._update


def _told_update(link: Any, part: Any, gradients: Any, *others: Any) -> None:
    """Update a slice, and say which memory that uses: the thread's kernels do so behind torch's back."""
    if _updates_are_slow:
        time.sleep(0.03)
    _update(link, part, gradients, *others)
    for _, gradient in gradients:
        simulated_device.host_access(gradient, writes=True, what="the optimizer's kernel")
    simulated_device.host_access(part.piece.host, writes=True, what="the optimizer's kernel")


def add(name: str, run: Callable[[], None], *, ranks: int = 1, is_quick: bool = False) -> None:
    """Add a scenario, whose name no other one has."""
    assert name not in SCENARIOS
    SCENARIOS[name] = Scenario(run, ranks, is_quick)


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], what: str = "") -> None:
    """Raise AssertionError unless all tensors have the same bits."""
    pairs = zip(found, expected, strict=True)
    wrong = [index for index, (one, other) in enumerate(pairs) if not torch.equal(one, other)]
    assert not wrong, f"{len(wrong)} of {len(expected)} tensors are wrong, the first is {wrong[0]} {what}"
