from __future__ import annotations

import json
from pathlib import Path

import pytest

from smpkit.plan.tune.calibration import CALIBRATION, measured_flops, this_machine
from smpkit.plan.tune.instances import published_flops
from tests.plan.tune.facts import facts


@pytest.mark.parametrize(
    ("device", "half", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),
        ("NVIDIA A100-SXM4-80GB", None, 19.5e12),
        ("NVIDIA H100 80GB HBM3", "float16", 989.4e12),
        ("Tesla V100-SXM2-16GB", "float16", 125e12),
        ("Tesla T4", "float16", 65.1e12),
    ],
)
def test_a_published_flops_is_found_by_what_torch_calls_a_device(
    device: str, half: str | None, expected: float
) -> None:
    assert published_flops(device, half) == (device.replace("-", " ").split()[1], expected)


@pytest.mark.parametrize("device", ["NVIDIA A10G", "NVIDIA L40S", "cpu", "AMD Instinct MI300X"])
def test_of_other_devices_nothing_is_known(device: str) -> None:
    assert published_flops(device, "bfloat16") is None


def test_a_calibration_counts_on_the_machine_that_it_is_of(tmp_path: Path) -> None:
    slow = {"dtype": "float32", "size": 128, "flops_per_second": 3e9, "shared_flops_per_second": 2e9}
    fast = {**slow, "size": 512, "flops_per_second": 9e9, "shared_flops_per_second": 5e9}
    content = facts(machine=this_machine().model_dump(), matmul=[slow, fast], link=None)
    (tmp_path / CALIBRATION).write_text(json.dumps(content))
    assert measured_flops(tmp_path, None) == 5e9  # while all ranks compute
    assert measured_flops(tmp_path, "bfloat16") is None
    elsewhere = {**content, "machine": {**content["machine"], "host": "elsewhere"}}
    (tmp_path / CALIBRATION).write_text(json.dumps(elsewhere))
    assert measured_flops(tmp_path, None) is None
    (tmp_path / CALIBRATION).write_text("{")
    assert measured_flops(tmp_path, None) is None
    assert measured_flops(tmp_path / "nowhere", None) is None
