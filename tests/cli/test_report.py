from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from smpkit.cli._run import begin_run
from smpkit.config.load import load_job
from smpkit.observe.report.data import content_of
from smpkit.observe.runs import open_run
from smpkit.observe.summary import read_summary, write_summary
from tests.cli.conftest import Smpkit
from tests.observe.report.folders import write_run


@pytest.fixture
def job(here: Path) -> Path:
    write_run(here, "20260102-030405")
    write_run(here, "20260102-040506", offloads=False)
    return here


def test_the_last_run_is_reported_into_its_folder(job: Path, smpkit: Smpkit) -> None:
    result = smpkit("report", code=0)
    path = job / "runs" / "odd-20260102-040506" / "report.html"
    assert (result.stdout, result.stderr) == (f"{path}\n", "")
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_two_runs_are_compared(job: Path, smpkit: Smpkit) -> None:
    result = smpkit("report", "odd-20260102-030405", "odd-20260102-040506", "-o", "both.html")
    assert (result.exit_code, result.stdout) == (0, "both.html\n")
    assert "Differences" in (job / "both.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("job")
def test_the_data_are_printed(smpkit: Smpkit) -> None:
    content = json.loads(smpkit("report", "--json").stdout)
    assert content["folder"] == "odd-20260102-040506"
    both = json.loads(smpkit("report", "odd-20260102-030405", "odd", "--json").stdout)
    assert [each["folder"] for each in both] == ["odd-20260102-030405", "odd-20260102-040506"]


def test_a_loss_that_diverged_is_json(job: Path, smpkit: Smpkit) -> None:
    folder = job / "runs" / "odd-20260102-040506"
    write_summary(folder, replace(read_summary(folder), values={"loss": (1.5, math.nan)}))
    result = smpkit("report", "--json")
    assert "NaN" not in re.sub('"NaN"', "", result.stdout)
    assert json.loads(result.stdout)["summary"]["values"] == {"loss": [1.5, "NaN"]}


def test_a_run_here_is_found_where_a_back_end_is_set(
    job: Path, smpkit: Smpkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for at the back end: there is no job of this name."""
    monkeypatch.setenv("SMPKIT_BACKEND", "slurm")
    path = job / "runs" / "odd-20260102-030405" / "report.html"
    assert smpkit("report", "odd-20260102-030405").stdout == f"{path}\n"
    assert smpkit("report", str(path.parent)).stdout == f"{path}\n"
    assert smpkit("report", "odd").exit_code != 0  # a job's name alone means the managed job


def test_a_managed_job_is_called_by_its_name(job: Path) -> None:
    """Two of them were both called `run`."""
    folder = (job / "runs" / "odd-20260102-030405").rename(job / "run")
    assert content_of(replace(open_run(str(folder)), name="job-7")).folder == "job-7"


def test_a_run_notes_its_settings_with_their_origins_and_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text("entry_point: train.py\nhyperparameters:\n  api_token: hunter2secret\n")
    content = content_of(begin_run(load_job(tmp_path / "job.yaml"), 1, 1))
    settings = {setting.name: (setting.value, setting.origin) for setting in content.settings}
    assert settings["entry_point"] == ("train.py", "job.yaml:1")
    assert settings["hyperparameters.api_token"] == ("(hidden)", "job.yaml:3")
    assert settings["compute.instance_count"] == ("1", "default")
    assert "settings" not in content.environment
