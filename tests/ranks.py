"""`run_ranks`, with what the ranks of these tests import loaded ahead; on simulated devices if told."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Final

import torch

from smpkit.testing.ranks import FORKSERVER, RankFailed, preload
from smpkit.testing.ranks import run_ranks as run_on_this_machine

__all__ = ["FORKSERVER", "RANKS_ON_SIM", "RankFailed", "run_ranks"]

RANKS_ON_SIM: Final = "RANKS_ON_SIM"
"""Has a policy and a seed, as "lazy:0": ranks have a simulated device each, and a race in one of them is an error."""

preload("tests.preloaded")


def run_ranks(function: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
    """Do what `smpkit.testing.run_ranks` does, whose arguments these are."""
    if order := os.environ.get(RANKS_ON_SIM):
        return run_on_this_machine(_on_sim, size, order, function, args, **options)
    return run_on_this_machine(function, size, *args, **options)


def _on_sim(order: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    from smpkit.testing import simulated_device  # after the fork: it makes itself the accelerator of its process

    simulated_device.load()
    policy, _, seed = order.partition(":")
    simulated_device.set_policy(policy, int(seed))
    result = function(*args)
    with contextlib.suppress(RuntimeError):  # of messages that a test has made fail
        torch.accelerator.synchronize()
    if races := simulated_device.races():
        raise simulated_device.RaceFound(races)
    return result
