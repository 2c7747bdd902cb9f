"""These tests need a GPU, or run on the simulated device if told; elsewhere each is skipped, with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from tests.device.device import IS_SIMULATED, checked

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _is_for_a_gpu(item):
            continue
        real = item.get_closest_marker("real_gpu")
        if real is not None and not (len(real.args) == 1 and real.args[0]):
            raise pytest.UsageError(f"{item.nodeid}: `real_gpu` needs a reason")
        if IS_SIMULATED:
            if real is not None:
                item.add_marker(pytest.mark.skip(reason=f"needs a real GPU: {real.args[0]}"))
        elif not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """A race on the simulated device fails the test."""
    with checked() if _is_for_a_gpu(item) else contextlib.nullcontext():
        yield


def _is_for_a_gpu(item: pytest.Item) -> bool:
    """Return whether a test is one for any device; files `test_sim_*` are about the simulated one."""
    return _HERE in item.path.parents and not item.path.name.startswith("test_sim_")
