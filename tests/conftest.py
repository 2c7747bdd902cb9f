"""What every test gets: a scrubbed environment."""

from __future__ import annotations

import os

import pytest

PREFIXES = ("SM_", "SMP_", "SMPKIT_", "SAGEMAKER_", "AWS_", "OMPI_", "PMIX_", "PMI_", "SLURM_")
NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NO_COLOR"}


@pytest.fixture(autouse=True)
def scrubbed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what a shell or a job may have left that changes how smpkit behaves."""
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in NAMES:
            monkeypatch.delenv(name)
