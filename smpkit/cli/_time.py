"""Lengths of time on the command line: `90s`, `10m`, `2h`, `1d`."""

from __future__ import annotations

import re
from datetime import timedelta

import click

__all__ = ["LENGTH"]

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def LENGTH(value: str) -> timedelta:  # noqa: N802  the type of an option, which click has in capitals
    """Read a length of time, for `click.option(type=LENGTH)`."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([smhd])", value)
    if found is None:
        raise click.BadParameter(f"`{value}` is not a length of time such as `90s`, `10m`, `2h`, `1d`")
    return timedelta(**{_UNITS[found[2]]: float(found[1])})
