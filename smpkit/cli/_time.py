"""Numbers on the command line: lengths of time as `90s`, `10m`, `2h`, `1d`, and amounts."""

from __future__ import annotations

import math
import re
from datetime import timedelta

import click

__all__ = ["AMOUNT", "LENGTH", "PRICE", "SECONDS"]

_LONGEST = timedelta(days=36_500)
_LARGEST = 1e9
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def LENGTH(value: str) -> timedelta:  # noqa: N802  the type of an option, which click has in capitals
    """Read a length of time, for `click.option(type=LENGTH)`."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([smhd])", value)
    if found is None:
        raise click.BadParameter(f"`{value}` is not a length of time such as `90s`, `10m`, `2h`, `1d`")
    length = timedelta(**{_UNITS[found[2]]: float(found[1])})
    if length > _LONGEST:
        raise click.BadParameter(f"`{value}` is longer than {_LONGEST.days:,} days")
    return length


def AMOUNT(value: str) -> float:  # noqa: N802
    """Read a finite number that is not negative, for `click.option(type=AMOUNT)`."""
    try:
        amount = float(value)
    except ValueError:
        amount = math.nan
    if not 0 <= amount <= _LARGEST:
        raise click.BadParameter(f"`{value}` is not a number from 0 to {_LARGEST:,.0f}")
    return amount


def PRICE(value: str) -> tuple[str | None, float]:  # noqa: N802
    """Read `AMOUNT` or `TYPE=AMOUNT`, for `click.option(type=PRICE)`; the type is None if it is not given."""
    kind, given, amount = value.rpartition("=")
    return (kind if given else None), AMOUNT(amount)


def SECONDS(value: str) -> float:  # noqa: N802
    """Read a number of seconds above zero, for `click.option(type=SECONDS)`."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST.total_seconds():
        raise click.BadParameter(f"`{value}` is not a number of seconds above 0 and up to {_LONGEST.days:,} days")
    return seconds
