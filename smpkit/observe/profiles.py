"""How profiles of torch's profiler are asked for and named, by those who write them and `smpkit.observe.trace`."""

from __future__ import annotations

import re
from typing import Final

PROFILE: Final = "SMPKIT_PROFILE"
"""The variable that names the steps; without a folder for events, nothing is profiled."""

PROFILED: Final = "smpkit step "
"""What the profiler's span of a step is called, with the number behind it."""


def steps_of(text: str) -> range:
    """Return the steps that `10:12` names, both included, or `10` alone; raise ValueError for anything else."""
    numbers = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if numbers is None or int(numbers[2] or numbers[1]) < int(numbers[1]):
        raise ValueError(f"`{text}` names no steps: give the first and the last, counted from 0, as `10:12`")
    return range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1)


def profile_name(rank: int) -> str:
    return f"profile_{rank}.json"


def rank_of(name: str) -> int | None:
    """Return the rank whose profile has this name; None if no profile has it."""
    rank = re.fullmatch(r"profile_(\d+)\.json", name)
    return None if rank is None else int(rank[1])
