"""The examples of the how-to pages run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from smpkit.config.explain import validated
from smpkit.config.job import JobConfig
from smpkit.testing import FakeSageMaker
from smpkit_estimator.cloud import Cloud
from smpkit_estimator.submission import plan_submission

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"


def block(page: str, language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", (HOW_TO / page).read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_example_of_a_users_own_test_passes(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(compile(block("test-without-a-cloud.md", "python"), "page", "exec"), names)
    names["test_a_spot_job_survives_an_interruption"](tmp_path)


def test_the_job_of_the_page_can_be_sent(tmp_path: Path) -> None:
    import yaml

    (tmp_path / "train.py").touch()
    job = validated(JobConfig, yaml.safe_load(block("managed-jobs.md", "yaml")), subject="job")
    assert plan_submission(job, tmp_path, Cloud(FakeSageMaker())).request.body["EnableManagedSpotTraining"]
