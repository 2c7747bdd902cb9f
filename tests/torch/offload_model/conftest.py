"""Where slices compute when the device is the CPU, and whether they are checkpointed."""

from __future__ import annotations

import pytest

from smpkit.torch.offload_model import model


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with the host's own buffers, as on a CPU, or with copies of them, as on a device."""
    if request.param == "device":
        monkeypatch.setattr(model, "is_the_host", lambda _: False)


@pytest.fixture(params=[False, True], ids=["graph", "checkpoint"])
def checkpoint(request: pytest.FixtureRequest) -> bool:
    """Return whether slices run again in backward."""
    return bool(request.param)
