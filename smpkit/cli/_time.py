"""Times on the command line: lengths as `90s`, `10m`, `2h`, `1d`, and numbers of seconds."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Final

import click

__all__ = ["LENGTH", "SECONDS"]

_LONGEST = timedelta(days=36_500)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def _length(value: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([smhd])", value)
    if match is None:
        raise click.BadParameter(f"`{value}` is not a length of time such as `90s`, `10m`, `2h`, `1d`")
    length = timedelta(**{_UNITS[match[2]]: float(match[1])})
    if length > _LONGEST:
        raise click.BadParameter(f"`{value}` is longer than {_LONGEST.days:,} days")
    return length


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST.total_seconds():
        raise click.BadParameter(f"`{value}` is not a number of seconds above 0 and up to {_LONGEST.days:,} days")
    return seconds


LENGTH: Final = _length
"""The type of an option that is a length of time; it becomes a `timedelta`."""
SECONDS: Final = _seconds
"""The type of an option that is a number of seconds above zero."""
