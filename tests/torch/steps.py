"""What many tests here share: a step that trains, and what rank 0 announces."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor

import smpkit.torch as smp

BY_HAND: dict[str, Any] = {"auto_partition": False, "default_partition": 0}
"""For `smp.init`: all that the test does not place itself is on pipeline rank 0."""


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


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
