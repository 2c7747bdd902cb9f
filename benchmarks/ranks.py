"""What benchmarks with several ranks share."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

import smpkit.torch as smp
from benchmarks.common import take_turns
from smpkit.testing import run_ranks
from smpkit.torch.core.devices import wait_for_stream
from smpkit.torch.core.runtime import state

OVER_GLOO: Final = "{repetitions} counted steps of each, gloo over the loopback interface, "
"""What tables of steps say of themselves."""
WARM_UPS: Final = 5
"""Steps that are not counted: within them smpkit measures, and torch exchanges shapes."""

Times = dict[str, list[float]]


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


def time_steps(steps: Mapping[str, Callable[[], object]], repetitions: int, warm_ups: int = WARM_UPS) -> Times:
    """Let steps take turns; return the seconds of each from a barrier until the device of the last rank is done."""
    return take_turns({name: partial(_seconds, step) for name, step in steps.items()}, repetitions, warm_ups)


def _seconds(step: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    wait_for_stream(state.device)
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()
