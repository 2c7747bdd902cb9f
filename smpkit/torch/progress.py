"""`smp.progress(batches)`: a bar on rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, Final, TypeVar

from tqdm import tqdm

from smpkit.torch.core.runtime import state

__all__ = ["progress"]

_Batch = TypeVar("_Batch")

_COLUMNS: Final = 70
"""Of the bar through a launcher, which puts the rank before it; its terminal is not ours to ask."""
_TERMINAL_SECONDS: Final = 0.2
_LOG_SECONDS: Final = 10.0
_DELAY_SECONDS: Final = 0.05
"""So that the first step, which says how the model was divided, does not write into the bar."""


def progress(batches: Iterable[_Batch], *, total: int | None = None, **options: Any) -> tqdm[_Batch]:
    """Iterate over `batches` with a bar: on rank 0, all others only iterate.

    ::

        bar = smp.progress(loader, desc="epoch 1")
        for tokens, targets in bar:
            loss = train_step(model, tokens, targets).reduce_mean()
            bar.set_postfix(loss=loss.item())

    The bar is tqdm's, so its methods and options are, too. On a terminal it stays on the bottom line, also through
    `smpkit run`; in a log it is a line every ten seconds at most, and one at the end.

    Args:
        total: how many batches there are, if `len(batches)` does not say.
        options: of `tqdm`.
    """
    launched = os.environ.get("SMPKIT_TERMINAL") == "1"
    chosen: dict[str, Any] = {
        "disable": state.initialized and state.rank != 0,
        "file": sys.stderr,
        "delay": _DELAY_SECONDS,
        "mininterval": _TERMINAL_SECONDS if launched or sys.stderr.isatty() else _LOG_SECONDS,
        **({} if sys.stderr.isatty() else {"ncols": _COLUMNS}),
        **options,
    }
    bar = tqdm(batches, total=total, **chosen)
    if "delay" not in options:
        bar.delay = 0  # only the first line waits; the last one is also written of a loop too short for others
    return bar
