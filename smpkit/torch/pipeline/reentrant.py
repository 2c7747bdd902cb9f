"""Let torch's reentrant checkpoint, in the user's own model, work on values that other ranks may hold.

It is a custom autograd.Function: its graph would end on this rank, and torch gives no way to look at its arguments
first. So the function that `torch.utils.checkpoint` applies is replaced by one that looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from smpkit.torch.pipeline.located import between_units

__all__ = ["follow_values"]

_plain = torch_checkpoint.CheckpointFunction


class _FollowsValues:
    """Stands for torch's function: `apply` is all that is called of it."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if between_units() is None:
            return _plain.apply(function, preserve_rng_state, *args)  # type: ignore[no-untyped-call]
        # The same gradients by the other way, which keeps to the ranks' own graphs.
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def follow_values() -> None:
    """Make torch's reentrant checkpoint follow values to their ranks, for the life of this process."""
    torch_checkpoint.CheckpointFunction = _FollowsValues  # type: ignore[assignment, misc]
