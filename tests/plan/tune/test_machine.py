from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from smpkit.errors import UsageError
from smpkit.plan.tune.calibration import CALIBRATION, Calibration, measured_flops, this_machine
from smpkit.plan.tune.instances import INSTANCES, published_flops
from smpkit.plan.tune.machine import from_calibration, published
from tests.plan.tune.facts import facts


def test_published_facts_are_taken_with_what_is_usually_lost() -> None:
    machine = published("ml.p4d.24xlarge")
    assert machine.half_flops == 0.5 * 312e12
    assert machine.remote.bytes_per_second == pytest.approx(0.8 * 400e9 / 8 / 8)
    assert (machine.ranks_per_host, machine.device_bytes) == (8, 40 << 30)
    assert published("p4d.24xlarge", tflops=200).half_flops == 200e12
    assert {INSTANCES[f"ml.{name}.24xlarge"].host_memory_bytes for name in ("p4d", "p4de")} == {1152 << 30}


def test_an_unknown_type_and_an_unknown_rate_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=re.escape("no published facts of `ml.p4d.24xlage` are known")) as caught:
        published("ml.p4d.24xlage")
    assert caught.value.hint is not None
    assert "did you mean `ml.p4d.24xlarge`?" in caught.value.hint
    with pytest.raises(UsageError, match=re.escape("no source is known for what NVIDIA A10G of `ml.g5.12xlarge`")):
        published("ml.g5.12xlarge")
    assert published("ml.g5.12xlarge", tflops=60).half_flops == 60e12


def test_measurements_are_fitted() -> None:
    machine = from_calibration(Calibration.model_validate(facts()))
    assert (machine.half_flops, machine.speed.flops_per_second) == (40e12, 10e12)
    assert machine.local.bytes_per_second == pytest.approx(10e9)
    # Both directions at once reach 30 GB/s where 20 and 22 are reached alone.
    rates = machine.speed.link.out_bytes_per_second, machine.speed.link.back_bytes_per_second
    assert rates == pytest.approx((20e9 * 30 / 42, 22e9 * 30 / 42))
    # What was measured of a collective over 4 ranks is what is predicted for it.
    for each in facts()["collectives"]:
        predicted = machine.collective_seconds("all_reduce", each["num_bytes"], 4, 1)
        assert predicted == pytest.approx(each["seconds"], rel=0.05)
    # One that was not is a ring over the link between ranks.
    assert machine.collective_seconds("all_gather", 8e9, 8, 1) == pytest.approx(0.7, rel=0.01)
    assert machine.collective_seconds("all_gather", 8e9, 1, 1) == 0


def test_ranks_that_share_cores_are_slower_together() -> None:
    product = facts()["matmul"][0]
    content = facts(matmul=[{**product, "shared_flops_per_second": product["flops_per_second"] / 2}])
    assert from_calibration(Calibration.model_validate(content)).parallel_ranks == 2
    assert from_calibration(Calibration.model_validate(facts())).parallel_ranks == 4


@pytest.mark.parametrize(
    ("device", "half", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),
        ("NVIDIA A100-SXM4-80GB", None, 19.5e12),
        ("NVIDIA A100-PCIE-40GB", "bfloat16", 312e12),
        ("NVIDIA H100 80GB HBM3", "float16", 989.4e12),
        ("Tesla V100-SXM2-16GB", "float16", 125e12),
        ("Tesla T4", "float16", 65.1e12),
    ],
)
def test_published_flops_are_found_by_the_name_of_a_device(device: str, half: str | None, expected: float) -> None:
    assert published_flops(device, half) == (device.replace("-", " ").split()[1], expected)


def test_cards_that_are_slower_than_the_modules_of_their_name_are_not_taken_for_them() -> None:
    cards = ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "Tesla V100-PCIE-16GB"]
    unknown = ["NVIDIA A10G", "NVIDIA L40S", "cpu", "AMD Instinct MI300X"]
    assert [device for device in [*cards, *unknown] if published_flops(device, "bfloat16") is not None] == []


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
