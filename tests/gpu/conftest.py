"""These tests need a GPU, or run on the simulated device if told; elsewhere each is skipped, with the reason."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from tests.gpu.device import IS_SIMULATED, checked

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
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
def pytest_runtest_call() -> Generator[None, None, None]:
    """A race on the simulated device fails the test."""
    with checked():
        yield
