"""How numbers are shown: bytes, seconds and rates, with the digits that a reader can use.

`smpkit.config.words.duration` has the lengths of time that people live by: `4 m 12 s`.
"""

from __future__ import annotations

from typing import Final

_UNITS: Final = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def amount(num_bytes: float) -> str:
    """Return bytes with their unit: `512 B`, `4.0 KiB`, `12.0 MiB`, `3.1 GiB`."""
    unit, scale = unit_of(num_bytes)
    return f"{num_bytes / scale:.1f} {unit}" if scale > 1 else f"{num_bytes:.0f} B"


def unit_of(num_bytes: float) -> tuple[str, int]:
    """Return the largest unit that a number of bytes has at least one of, and how many bytes that is."""
    return next((pair for pair in _UNITS if abs(num_bytes) >= pair[1]), ("B", 1))


def seconds(length: float) -> str:
    """Return a length of time with three digits: `1.23 s`, `45.6 ms`, `789 µs` or `12 ns`."""
    if length >= 1:
        return f"{length:.2f} s"
    if length >= 1e-3:
        return f"{length * 1e3:.1f} ms"
    return f"{length * 1e9:.0f} ns" if 0 < length < 1e-6 else f"{length * 1e6:.0f} µs"


def count(number: float) -> str:
    """Return a rate with three digits: `0.0123`, `3.33`, `213`, `27,300`."""
    return f"{float(f'{number:.3g}'):,.0f}" if number >= 100 else f"{number:.3g}"


def things(number: int, name: str) -> str:
    """Return so many things: `1 rank`, `2 ranks`, `4 microbatches`."""
    ending = "es" if name.endswith("ch") else "s"
    return f"{number} {name}{ending * (number != 1)}"


def magnitude(number: float) -> str:
    """Return a number of parameters: `6.7B`, `124.4M`, `512`."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return f"{number:g}"
