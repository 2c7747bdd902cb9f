from __future__ import annotations

from pathlib import Path

import pytest

from smpkit.cli._report import redacted, write_report


def test_values_are_taken_out_of_the_command() -> None:
    command = ["smpkit", "run", "job.yaml", "--set", "environment.TOKEN=a=b", "--set=environment.KEY=c"]
    assert redacted(command) == "smpkit run job.yaml --set environment.TOKEN=... --set=..."


def test_a_report_holds_versions_command_and_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = write_report(ValueError("half a character \ud800"), ["smpkit", "schema"])
    assert path is not None
    text = Path(path).read_text()
    assert text.startswith("smpkit ")
    assert "\nclick 8." in text
    assert "command: smpkit schema" in text
    assert "ValueError: half a character \\ud800" in text
    assert Path(path).stat().st_mode & 0o077 == 0  # nobody else may read it
