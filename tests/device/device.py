"""The device under test: a GPU, or the simulated one of smpkit.testing, on which these tests run anywhere.

Tests name their device through this module alone, and use its streams and its memory through torch.accelerator. On the
simulated device (`--device sim`) `checked` finds races. The CPU does the arithmetic there, so sizes are smaller by one
factor (`scaled`), and time is virtual (`in_device_time`).

A test that needs the real thing has a marker: `@pytest.mark.real_gpu("captures a graph")`.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import torch

from smpkit.testing import simulated_device
from smpkit.torch.offload import arena
from smpkit.torch.offload.link import AcceleratorLink
from tests.chosen_device import VARIABLE, chosen_device
from tests.device.on_sim import in_virtual_time
from tests.simulated import in_order, order_of

_ORDER: Final = order_of(chosen_device())
IS_SIMULATED: Final = _ORDER is not None
CPU_ONLY: Final = {"CUDA_VISIBLE_DEVICES": "", VARIABLE: "cpu"}
"""For the environment of ranks that shall see no GPU, and have no simulated one either."""

_SCALE: Final = 4
_CYCLES_PER_SECOND: Final = 2e9


# --- which one --------------------------------------------------------------------------------------------------------


def gpu() -> torch.device:
    """Return the device under test; the first call in a process loads the simulated one."""
    if not IS_SIMULATED:
        return torch.device("cuda")
    _load()
    return torch.device("sim")


@functools.cache
def _load() -> None:
    simulated_device.load()
    # Where lengths are smaller by a factor, memory is by its square and work by its cube. A device that is as much
    # smaller and slower takes the times of a GPU at the full sizes, and copies what a GPU finds worth a copy.
    plain = simulated_device.Speeds()
    links = {name: getattr(plain, name) / _SCALE**2 for name in ("memory", "out", "back", "peer")}
    simulated_device.set_speeds(replace(plain, flops=plain.flops / _SCALE**3, **links))
    AcceleratorLink.min_bytes //= _SCALE**2
    arena._SLAB //= _SCALE**2  # type: ignore[misc]


def cannot_be_used() -> bool:
    """Return whether this process has not touched the device, and cannot any more."""
    module = torch.get_device_module(gpu())
    return not module.is_initialized() or module._is_in_bad_fork()


def scaled(number: int, *, to: int = _SCALE) -> int:
    """Return a size, which is smaller on the simulated device: by 4, or by `to`."""
    return max(1, number // to) if IS_SIMULATED else number


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Run a test. On the simulated device in the order asked for, and a race is an error."""
    if _ORDER is None:
        yield
        return
    gpu()
    with in_order(_ORDER):
        yield


# --- time -------------------------------------------------------------------------------------------------------------


def sleep(cycles: int) -> None:
    """Keep the current stream busy for so many cycles of a GPU's clock; about two billion are a second."""
    if IS_SIMULATED:
        simulated_device.sleep(cycles / _CYCLES_PER_SECOND)
    else:
        torch.cuda._sleep(cycles)


@contextlib.contextmanager
def in_device_time() -> Iterator[None]:
    """Decorate a test that measures time or peaks of memory: they mean nothing in other orders than that of time.

    On the simulated device all is done when its time has come, whatever order was asked for, and the clock by which
    smpkit measures the host is the device's: the host's own work takes no time.
    """
    if not IS_SIMULATED:
        yield
        return
    gpu()
    with in_virtual_time():
        yield


# --- waits of the host ------------------------------------------------------------------------------------------------


def waits_of(work: Callable[[], object], name: Callable[[list[tuple[str, str]], str], str]) -> list[str]:
    """Return the waits of the host in a piece of work, each as it is named.

    As `torch.cuda.set_sync_debug_mode`, it finds reads of values, copies from and to memory that is not pinned, and
    waits for streams; not waits for events.

    Args:
        work: what is done.
        name: is given the file and the function of each line of Python, innermost first, and what was waited for.
    """
    torch.accelerator.synchronize()
    if IS_SIMULATED:
        before = {(each.what, each.lines): each.times for each in simulated_device.waits()}
        work()
        return [
            name([_file_and_function(line) for line in each.lines], each.what)
            for each in simulated_device.waits()
            for _ in range(each.times - before.get((each.what, each.lines), 0))
        ]
    found: list[str] = []

    def note(message: object, category: object, *_: object, **__: object) -> None:
        frames = [(frame.filename, frame.name) for frame in reversed(traceback.extract_stack())]
        found.append(name(frames, str(message)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that not all waits are found
        torch.cuda.set_sync_debug_mode("warn")
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def _file_and_function(line: str) -> tuple[str, str]:
    file, _, function = line.rsplit(":", 2)
    return file, function
