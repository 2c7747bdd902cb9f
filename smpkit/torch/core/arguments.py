"""Checks of arguments that users pass."""

from __future__ import annotations

import math
import numbers

import torch
from torch import nn

from smpkit.errors import UsageError


def check_sizes(owner: str, minimum: int = 1, **sizes: object) -> None:
    """Raise UsageError unless all sizes are integers of at least `minimum`."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or int(size) < minimum:
            raise UsageError(f"{name} of {owner} must be an integer of at least {minimum}, got {size!r}")


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; it must be True or False")


def check_num_bytes(name: str, value: object, *, of_none: str) -> None:
    """Raise UsageError unless a value is a number of bytes, or None, whose meaning is `of_none`."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 0):
        raise UsageError(
            f"{name} is {value!r}; it must be a whole number of bytes, at least 0, or None",
            hint=f"for example 8 << 30 for 8 GiB; None means {of_none}",
        )


def check_positive(name: str, value: object, unit: str, *, hint: str) -> None:
    """Raise UsageError unless a value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:  # NaN is in no range
        raise UsageError(f"{name} is {value!r}; it must be a number of {unit} above 0", hint=hint)


def check_probability(owner: str, name: str, value: object) -> None:
    """Raise UsageError unless a value is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= 1:
        raise UsageError(f"{name} of {owner} must be a number from 0 to 1, got {value!r}")


def check_module(function: str, value: object) -> None:
    if isinstance(value, type):
        raise UsageError(
            f"{function} takes a module, not the class {value.__name__}", hint="make an object of the class first"
        )
    if not isinstance(value, nn.Module):
        name = getattr(value, "__name__", type(value).__name__)
        hint = "put the code into the forward of a module" if callable(value) else None
        raise UsageError(f"{function} takes a torch.nn.Module, got {name}", hint=hint)


def check_callable(what: str, value: object) -> None:
    if not callable(value):
        raise UsageError(f"{what} must be callable, got {value!r}")


def device_of(model: nn.Module) -> torch.device:
    """Return the one device of a model's parameters; raise UsageError if they have none, or several."""
    devices = {tensor.device for tensor in model.parameters()}
    if len(devices) != 1:
        places = ", ".join(sorted(map(str, devices))) or "no device"
        raise UsageError(
            f"the parameters of this {type(model).__name__} lie on {places}", hint="offload one GPU's part"
        )
    return devices.pop()
