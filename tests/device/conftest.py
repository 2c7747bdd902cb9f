"""Tests written for a GPU run on it, or on the simulated device, as `--device` says; on the CPU they are skipped.

Files `test_sim_*` are about the simulated device itself, of which their ranks have their own.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.chosen_device import VARIABLE
from tests.device.on_sim import call_pickled
from tests.ranks import run_ranks

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _is_for_a_gpu(item):
            continue
        real = item.get_closest_marker("real_gpu")
        if real is not None and not (len(real.args) == 1 and real.args[0]):
            raise pytest.UsageError(f"{item.nodeid}: `real_gpu` needs a reason")
        device = _device_of(item)
        if device == "cpu":
            item.add_marker(pytest.mark.skip(reason="needs --device cuda, or sim"))
        elif device != "cuda" and real is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs a real GPU: {real.args[0]}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """A race on the simulated device fails the test."""
    from tests.device.device import checked  # which asks for the device: not before the option has been read

    with checked() if _is_for_a_gpu(item) else contextlib.nullcontext():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test that is `also_on` a simulated device on a rank: this process would have that device for good.

    Such a test gets arguments that can be sent to a rank, and starts no ranks. One that asks for `device` is called
    here: it starts ranks, which have that device, and touches none itself.
    """
    device = _device_of(pyfuncitem)
    names = pyfuncitem._fixtureinfo.argnames
    if not _is_for_a_gpu(pyfuncitem) or device == pyfuncitem.config.getoption("device") or "device" in names:
        return None
    call = pickle.dumps((pyfuncitem.function, {name: pyfuncitem.funcargs[name] for name in names}))
    run_ranks(call_pickled, 1, call, timeout=170, env={VARIABLE: device})
    return True


def _is_for_a_gpu(item: pytest.Item) -> bool:
    return _HERE in item.path.parents and not item.path.name.startswith("test_sim_")


def _device_of(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    device: str = callspec.params.get("device", "") if callspec else ""
    return device or item.config.getoption("device")
