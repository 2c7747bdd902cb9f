from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from smpkit.observe.summary import (
    Gain,
    KindBytes,
    RankSummary,
    RunSummary,
    Split,
    SummaryError,
    read_summary,
    write_summary,
)

SPLIT = Split(compute=0.5, bubble=0.25, communication=0.125, stall=0.0625, optimizer=0.03125, other=0.03125)
SUMMARY = RunSummary(
    name="gpt-text",
    started=1732530000.5,
    seconds=12.0,
    steps=10,
    exit_reason="finished",
    steps_per_s=1.0,
    samples_per_s=16.0,
    tokens_per_s=2048.0,
    world_size=2,
    pipeline=2,
    ranks=(
        RankSummary(0, "a", SPLIT, KindBytes(weights=1, activations=2, offloaded=3), 5, 10, KindBytes(weights=1)),
        RankSummary(1, "a", SPLIT, KindBytes()),
    ),
    gains=(Gain("offload_activations", 0, 3, 9, "measured", 0.004),),
    notes=("no plan: the job has no model",),
)


@pytest.mark.parametrize("last", [0.5, math.inf])
def test_what_was_written_is_read(last: float, tmp_path: Path) -> None:
    """Losses diverge."""
    summary = replace(SUMMARY, values={"loss": (-math.inf, last)})
    write_summary(tmp_path, summary)
    assert read_summary(tmp_path) == summary
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_split_adds_up_and_offloaded_bytes_are_not_on_the_device() -> None:
    assert SPLIT.total == 1.0
    assert SUMMARY.ranks[0].peak.on_device == 3


def test_fields_of_a_later_smpkit_are_let_pass(tmp_path: Path) -> None:
    write_summary(tmp_path, SUMMARY)
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "new": 1}))
    assert read_summary(tmp_path) == SUMMARY


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is damaged: Invalid JSON"),
        ("{}", "is damaged: name: Field required"),
        ('{"name": "a", "started": 1, "seconds": 1, "steps": "many"}', "is damaged: steps: Input should be"),
        (
            '{"name": "a", "started": 1, "seconds": 1, "steps": 1, "exit_reason": "", "format": 2}',
            "is damaged: format: Input should be 1",
        ),
    ],
)
def test_a_damaged_summary_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(SummaryError, match=said):
        read_summary(tmp_path)


def test_a_missing_summary_and_a_folder_that_is_gone_are_named(tmp_path: Path) -> None:
    with pytest.raises(SummaryError, match="there is no"):
        read_summary(tmp_path)
    with pytest.raises(SummaryError, match="cannot be written"):
        write_summary(tmp_path / "gone", SUMMARY)


def test_a_full_disk_leaves_the_summary_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_summary(tmp_path, SUMMARY)

    def half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(SummaryError, match="No space left"):
        write_summary(tmp_path, SUMMARY)
    assert read_summary(tmp_path) == SUMMARY
