from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smpkit.errors import UsageError
from smpkit.plan.tune.calibration import Calibration, Identity, differences, read_calibration, this_machine
from tests.plan.tune.facts import MACHINE, facts


def write(folder: Path, content: Any) -> Path:
    path = folder / "calibration.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    found = read_calibration(write(tmp_path, facts()))
    assert found == Calibration.model_validate(facts())
    assert Calibration.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not JSON: expecting property name enclosed in double quotes"),
        ([], "must be a mapping, got a list"),
        ({**facts(), "format": 2}, "`format` must be `1`, got 2"),
        ({**facts(), "matmul": []}, "`matmul` list should have at least 1 item after validation, not 0"),
        ({**facts(), "updates_per_second": -1}, "`updates_per_second` must be more than 0.0, got -1"),
        ({**facts(), "updates_per_second": True}, "`updates_per_second` must be a number, got true (a bool)"),
        ({**facts(), "speed": 1}, "`speed` unknown field"),
        ({"format": 1}, "`machine` is required (and 5 more problems)"),
    ],
)
def test_a_bad_file_is_told_in_one_sentence(tmp_path: Path, content: Any, sentence: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(UsageError) as caught:
        read_calibration(path)
    assert caught.value.message == f"`{path}` is no calibration: {sentence}"
    assert caught.value.hint is not None
    assert "\n" not in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no calibration: cannot be read: no such file"):
        read_calibration(tmp_path / "calibration.json")


def test_another_device_is_refused_by_name() -> None:
    measured = Identity.model_validate(MACHINE)
    refusal, _ = differences(measured, measured.model_copy(update={"device": "Other GPU"}))
    assert refusal == "was measured on `lab`, whose ranks compute on Some GPU, not Other GPU"
    refusal, _ = differences(measured, measured.model_copy(update={"device": "cpu"}))
    assert refusal == "was measured on `lab`, whose ranks compute on Some GPU, not Some CPU"


def test_what_else_differs_is_listed() -> None:
    measured = Identity.model_validate(MACHINE)
    other = measured.model_copy(update={"host": "here", "cores": 8, "devices": 8})
    assert differences(measured, measured) == (None, [])
    told = ["it was measured on `lab`, and this is `here`", "4 cores there, 8 here", "4 accelerators there, 8 here"]
    assert differences(measured, other) == (None, told)


def test_this_machine_is_described_without_torch() -> None:
    found = this_machine()
    assert found.cores >= 1
    assert found.memory_bytes > 2**28
    assert differences(found, this_machine()) == (None, [])
