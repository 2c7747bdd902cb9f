"""Commands that know several back ends: listing all jobs, counting node-hours."""

from __future__ import annotations

import pytest

from smpkit.config.backend import Slurm


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("2:00:00", 7200), ("3-12", 302_400), ("1-0:30:05", 88_205), ("UNLIMITED", None)],
)
def test_slurms_times(time: str, seconds: int | None) -> None:
    assert Slurm(time=time).seconds == seconds
