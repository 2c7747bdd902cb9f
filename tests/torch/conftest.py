"""One process as a world of its own, shut down after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import smpkit.torch as smp


@pytest.fixture
def world() -> Iterator[None]:
    """Let the test call `smp.init()`; whatever it made is gone afterwards."""
    yield
    smp.shutdown()
