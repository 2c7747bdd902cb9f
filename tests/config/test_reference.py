from __future__ import annotations

from pathlib import Path

import pytest

from smpkit.config.reference import DEFAULT_PATH, main, reference
from tests.config.test_modelparallel import DEFAULTS

ROOT = Path(__file__).parents[2]


def test_the_reference_in_the_repository_is_not_stale() -> None:
    assert main([str(ROOT / DEFAULT_PATH), "--check"]) == 0


def test_a_stale_or_missing_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "configuration.md"
    assert main([str(path), "--check"]) == 1
    assert main([str(path)]) == 0
    assert main([str(path), "--check"]) == 0
    path.write_text("old")
    assert main([str(path), "--check"]) == 1
    assert "is stale\nhint: run `python -m smpkit.config.reference`" in capsys.readouterr().err


def test_every_parameter_has_its_heading() -> None:
    text = reference()
    assert all(f"\n### `{key}`\n" in text for key in DEFAULTS)
