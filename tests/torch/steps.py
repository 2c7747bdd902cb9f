"""What many tests here share: a step that trains, what rank 0 announces, and tests that run on ranks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

import smpkit.torch as smp
from tests.ranks import run_ranks


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def over_ranks(module: nn.Module, places: Mapping[nn.Module, int], **options: Any) -> Any:
    """Return a model over pipeline ranks, with the parts of `module` where they are placed, the others on the first."""
    by_hand = {"auto_partition": False, "default_partition": 0}
    smp.init({"pipeline_parallel_degree": max(places.values()) + 1, "ddp": True, **by_hand, **options})
    for part, rank in places.items():
        smp.set_partition(part, rank)
    return smp.DistributedModel(module)


@contextlib.contextmanager
def announced() -> Iterator[list[str]]:
    """Return the lines that this rank announces inside."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("smpkit.announce")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def on_ranks(size: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let real ranks call a test, all of them, with the arguments that pytest has for it.

    The options are those of `run_ranks`. A test after which ranks cannot meet any more calls `run_ranks` itself.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def started(**arguments: Any) -> None:
            run_ranks(_call, size, test.__module__, test.__name__, arguments, **options)

        return started

    return decorate


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)
    if smp.is_initialized():
        smp.barrier()  # gloo fails on a rank that still connects to one that has ended
