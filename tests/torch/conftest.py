"""One process as a world of its own, shut down after each test; and one whose memory is free when it is not used."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import smpkit.torch as smp


@pytest.fixture
def world() -> Iterator[None]:
    """Let the test call `smp.init()`; whatever it made is gone afterwards."""
    yield
    smp.shutdown()


@pytest.fixture
def no_search_for_cycles() -> Iterator[None]:
    """Let Python not look for cycles: what nobody uses any more must be free at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
