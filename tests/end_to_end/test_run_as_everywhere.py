"""`smpkit run` does what every other place does with a job: the body is that of the clusters.

In the default run tests/container/test_peers.py stops a job of two launchers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.job_contract import OnThisMachine, a_job_that_is_stopped_goes_on

pytestmark = pytest.mark.slow


def test_a_job_that_is_stopped_goes_on(tmp_path: Path) -> None:
    a_job_that_is_stopped_goes_on(OnThisMachine(tmp_path))
