"""What a checkpointed call costs in Python: smpkit's beside torch's, on layers so small that nothing else shows.

Nothing here lets smpkit replace torch's checkpoint, as `smp.DistributedModel` and `smpkit.offload_activations` do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import smpkit.torch as smp
from benchmarks.common import parser, run, table, take_turns
from smpkit.torch.offload.engine import ActivationEngine, make_engine
from smpkit.torch.recompute.region import run_checkpointed

WIDTH = 16
CALLS = 20
"""In a row, in each turn of each contestant."""

Call = Callable[[nn.Module, Tensor], Tensor]


def parked(engine: ActivationEngine) -> Call:
    """Return a checkpoint whose inputs are copied to the host and back."""

    def call(module: nn.Module, x: Tensor) -> Tensor:
        return run_checkpointed(module, [module], (x,), {}, preserve_rng_state=True, keeper=engine)

    return call


CONTESTANTS: Mapping[str, Call] = {
    "plain": lambda module, x: module(x),
    "torch": lambda module, x: torch_checkpoint(module, x, use_reentrant=False),
    "smpkit": smp.checkpoint,
    "smpkit, parking": parked(make_engine(torch.device("cpu"), lead=2)),
}


def layers() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return modules, with an input for each."""
    norm, up, down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    rows = torch.randn(4, WIDTH, requires_grad=True)
    return {
        "Linear": (nn.Linear(WIDTH, WIDTH), rows),
        "MLP with LayerNorm and dropout": (nn.Sequential(norm, up, nn.GELU(), nn.Dropout(0.1), down), rows),
        "Linear and BatchNorm": (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), rows),
        "TransformerEncoderLayer": (
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True),
            torch.randn(2, 4, WIDTH, requires_grad=True),
        ),
    }


def microseconds(call: Call, module: nn.Module, x: Tensor) -> float:
    """Return the processor time of a forward and its backward: waits for other processes do not count."""
    start = time.thread_time()
    for _ in range(CALLS):
        call(module, x).sum().backward()
    return (time.thread_time() - start) / CALLS * 1e6


def row(name: str, times: Mapping[str, Sequence[float]]) -> list[object]:
    medians = [f"{statistics.median(runs):.0f} µs" for runs in times.values()]
    return [name, *medians, share(times, "smpkit"), share(times, "smpkit, parking")]


def share(times: Mapping[str, Sequence[float]], ours: str) -> str:
    """Return what checkpointing adds to a plain call, in parts of what torch's adds: by medians, and by the fastest."""
    ratios = []
    for of in (statistics.median, min):
        plain = of(times["plain"])
        ratios.append((of(times[ours]) - plain) / (of(times["torch"]) - plain))
    return f"{ratios[0]:.2f} ({ratios[1]:.2f})"


def calls(options: argparse.Namespace) -> tuple[str, object]:
    """Return a row per module: what a call takes as it is, and with each checkpoint."""
    torch.set_num_threads(1)
    models = {
        name: take_turns(
            {who: partial(microseconds, call, module, x) for who, call in CONTESTANTS.items()}, options.repetitions
        )
        for name, (module, x) in layers().items()
    }
    heads = ["module", *CONTESTANTS, "added / torch's", "with parking"]
    return table(heads, [row(*model) for model in models.items()]), models


if __name__ == "__main__":
    about = f"{{repetitions}} turns of {CALLS} calls each, forward and backward, "
    run(__file__, parser(__doc__, repetitions=100), {"table": calls}, about=about)
