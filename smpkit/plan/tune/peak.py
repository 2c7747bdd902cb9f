"""What a rank's device computes at most: as measured on this machine, else as its vendor publishes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from smpkit.errors import UsageError
from smpkit.plan.tune.calibration import differences, read_calibration, this_machine
from smpkit.plan.tune.instances import INSTANCES

__all__ = ["CALIBRATION", "Peak", "measured_peak", "published_peak"]

CALIBRATION: Final = "calibration.json"
"""What `smpkit calibrate` writes, if it is told no other name."""


@dataclass(frozen=True)
class Peak:
    """Dense matrix products of one rank."""

    flops_per_second: float
    basis: str
    """Where it is from, as it follows "54% of"."""


def measured_peak(folder: Path, half: str | None) -> Peak | None:
    """Return the fastest product of the calibration in a folder, while all ranks compute; None: it has none of this
    machine.

    Args:
        half: the half precision that a job computes in; None: single.
    """
    path = folder / CALIBRATION
    if not path.is_file():
        return None
    try:
        found = read_calibration(path)
    except UsageError:
        return None
    reason, others = differences(found.machine, this_machine())
    rates = [each.shared_flops_per_second for each in found.matmul if each.dtype == (half or "float32")]
    return None if reason or others or not rates else Peak(max(rates), "the peak in calibration.json")


def published_peak(device: str, half: str | None) -> Peak | None:
    """Return what is published of an accelerator; None: nothing is.

    Args:
        device: its name, such as `NVIDIA A100-SXM4-40GB`.
        half: the half precision that a job computes in; None: single.
    """
    words = set(re.split(r"[\s-]+", device))
    for instance in INSTANCES.values():
        gpu = instance.accelerator
        model = gpu.name.split()[1]  # NVIDIA A100 40 GB
        flops = gpu.single_flops if half is None else gpu.half_flops
        if model in words and flops is not None:
            return Peak(flops, f"the published peak of {model}")
    return None
