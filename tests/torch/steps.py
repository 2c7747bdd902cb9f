"""What many tests here share: a step that trains, what rank 0 announces, and tests that run on ranks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.testing.ranks import RankFailed
from smpkit.torch.distributed import deadline
from smpkit.torch.pipeline.executor import Executor
from tests.ranks import run_ranks


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


@smp.step
def asking_step(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    if loss < 0:  # the microbatch comes back to all ranks with the answer
        loss = -loss
    model.backward(loss)
    return loss


@smp.step
def evaluate(model: Any, x: Tensor) -> Any:
    return model(x)


def assignment() -> dict[str, int]:
    """Return which pipeline rank has which unit of this rank's model."""
    model: Any = smp.state.model
    return dict(model.pipeline.assignment.partition_of)


def executor() -> Executor:
    """Return what runs the steps of this rank's model."""
    model: Any = smp.state.model
    return model.pipeline._executor


def wrap(module: nn.Module, **config: Any) -> Any:
    """Start smpkit, anew if it runs, and return the module wrapped."""
    smp.shutdown()
    smp.init(config)
    return smp.DistributedModel(module)


def over_ranks(module: nn.Module, places: Mapping[nn.Module, int], **options: Any) -> Any:
    """Return a model over pipeline ranks, with the parts of `module` where they are placed, the others on the first."""
    by_hand = {"auto_partition": False, "default_partition": 0}
    smp.init({"pipeline_parallel_degree": max(places.values()) + 1, "ddp": True, **by_hand, **options})
    for part, rank in places.items():
        smp.set_partition(part, rank)
    return smp.DistributedModel(module)


def in_a_row(*layers: nn.Module, around: nn.Module | None = None, **options: Any) -> Any:
    """Return a model of which each rank has some layers; without a module around them they follow each other."""
    degree = int(os.environ["WORLD_SIZE"])
    places = {layer: number * degree // len(layers) for number, layer in enumerate(layers)}
    return over_ranks(nn.Sequential(*layers) if around is None else around, places, **options)


MANY_SECONDS = 600
"""`timeout_seconds`: whoever waits for that has not noticed."""


def error_of(action: Callable[[], object]) -> str:
    """Return the error of `action` with its notes, or nothing; see that it comes long before anybody's deadline.

    The other ranks are told of it, as by a script that ends.
    """
    started, text = time.monotonic(), ""
    try:
        action()
    except Exception as error:
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        deadline.report_failure(error)
    assert time.monotonic() - started < MANY_SECONDS / 4, text
    return text


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


def on_ranks(
    size: int, *, fails: str = "", meets: bool = True, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let real ranks call a test, all of them, with the arguments that pytest has for it.

    Args:
        fails: what is said of ranks that have to fail.
        meets: whether ranks can still meet when they are done: none then ends before another has connected to it.
        options: those of `run_ranks`.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def started(**arguments: Any) -> None:
            with pytest.raises(RankFailed, match=fails) if fails else contextlib.nullcontext():
                run_ranks(_call, size, test.__module__, test.__name__, arguments, meets and not fails, **options)

        return started

    return decorate


def _call(module: str, name: str, arguments: dict[str, Any], meets: bool) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)
    if meets and smp.is_initialized():
        smp.barrier()  # gloo fails on a rank that still connects to one that has ended
