from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from smpkit.errors import SmpkitError, UsageError
from smpkit.observe.runs import Run, find_runs, last_run, make_run, open_run

NOW = datetime(2026, 11, 25, 19, 15, 2).astimezone()


def test_a_run_is_found_where_it_was_made(tmp_path: Path) -> None:
    made = make_run(tmp_path, "gpt-text", NOW)
    assert made.path == tmp_path / "runs" / "gpt-text-20261125-191502"
    assert find_runs(tmp_path) == (made,)
    assert (tmp_path / "runs" / ".gitignore").read_text() == "*\n"


def test_runs_are_found_from_the_folder_above_from_runs_and_from_a_run_itself(tmp_path: Path) -> None:
    one = make_run(tmp_path / "examples" / "a", "a", NOW)
    two = make_run(tmp_path / "examples" / "b", "b", NOW + timedelta(seconds=1))
    assert find_runs(tmp_path) == (one, two)
    assert find_runs(one.path.parent) == find_runs(one.path) == (one,)
    assert find_runs(tmp_path / "examples" / "c") == ()


def test_runs_that_lie_on_another_disk_are_found(tmp_path: Path) -> None:
    made = make_run(tmp_path / "disk", "a", NOW)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "runs").symlink_to(made.path.parent)
    assert [run.label for run in find_runs(tmp_path / "job")] == [made.label]


def test_runs_of_one_second_have_folders_of_their_own_in_order(tmp_path: Path) -> None:
    made = [make_run(tmp_path, "a", NOW) for _ in range(12)]
    assert list(find_runs(tmp_path)) == made
    assert last_run(tmp_path) == made[-1]


def test_what_is_no_run_is_left_out(tmp_path: Path) -> None:
    for name in ("checkpoints", "a-20261399-999999", ".hidden-20261125-191502"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "file-20261125-191502").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert find_runs(tmp_path) == ()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    monkeypatch.chdir(tmp_path)
    return [make_run(tmp_path, name, NOW + timedelta(seconds=i)) for i, name in enumerate(("gpt", "gpt", "t5"))]


def test_open_run_takes_nothing_a_name_a_job_or_a_path(runs: list[Run], tmp_path: Path) -> None:
    assert open_run(None) == runs[2]
    assert open_run(runs[0].label) == runs[0]
    assert open_run("gpt") == runs[1]
    assert open_run(str(runs[0].path)) == runs[0]
    assert open_run("runs") == open_run(str(tmp_path)) == runs[2]


@pytest.mark.usefixtures("runs")
def test_an_unknown_run_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="there is no run `gpt2`") as caught:
        open_run("gpt2")
    assert caught.value.hint == "did you mean `gpt`?"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(SmpkitError, match="cannot be made in"):
        make_run(tmp_path, "a", NOW)
