"""The optimizers whose states plans count; a module of its own, so that `smpkit plan --help` imports nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OPTIMIZERS: Final[Mapping[str, int]] = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}
"""How many numbers an optimizer keeps per trained one, in the dtype of what it updates, as those of torch.optim do."""
