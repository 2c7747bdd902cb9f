"""What benchmarks with several ranks share."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import smpkit.torch as smp
from smpkit.testing import run_ranks
from smpkit.torch.core.devices import wait_for_stream
from smpkit.torch.core.runtime import state


def on_ranks(function: Callable[..., Any], size: int, *arguments: Any, timeout: float = 1800) -> list[Any]:
    """Call a function on ranks with one thread each, where runs are recorded as in a job; return what they return."""
    return run_ranks(_on_rank, size, function, *arguments, timeout=timeout, env={"SMPKIT_SUMMARY": "1"})


def _on_rank(function: Callable[..., Any], *arguments: Any) -> Any:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")  # they would stand between the tables
    return function(*arguments)


@smp.step
def train_on_squares(model: Any, x: Tensor) -> Tensor:
    """Run forward and backward, with the mean square of the output as the loss."""
    loss: Tensor = model(x).float().square().mean()
    model.backward(loss)
    return loss


def seconds_until_all_are_done(step: Callable[[], object]) -> float:
    """Return the seconds of a step from a barrier until the device of the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    step()
    wait_for_stream(state.device)
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()
