"""Whatever strikes a real job, it ends or goes on: no hang, no orphan, the culprit named, the same losses after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from smpkit.errors import LaunchError
from smpkit_container.mpi import find_mpirun
from tests.chaos.faults import FAULTS
from tests.chaos.runner import Case, make_reference, strike

FIRST, LAST = (int(number) for number in os.environ.get("CHAOS_SEEDS", f"0 {len(FAULTS) - 1}").split())
QUICK = (0, 18)
"""Seeds with two ranks only: a killed rank and a flipped bit."""


def launchers() -> tuple[str, ...]:
    try:
        find_mpirun()
    except LaunchError:
        return ("torchrun",)
    return ("torchrun", "mpirun")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of an undisturbed run of a configuration, made once."""
    folders: dict[str, Path] = {}

    def find(config: str) -> Path:
        if config not in folders:
            folders[config] = tmp_path_factory.mktemp("reference")
            make_reference(folders[config], config)
        return folders[config]

    return find


def case_of(seed: int) -> Case:
    known = launchers()
    return Case.of(seed, known[-1:] if seed in QUICK else known, small=seed in QUICK)  # mpirun starts faster


def label(seed: int) -> str:
    case = case_of(seed)
    return f"{seed}: {case.fault}, {case.config}, {case.launcher}, rank {case.victim}, step {case.at}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, LAST + 1), ids=label)
def test_a_job_survives(seed: int, tmp_path: Path, reference: Callable[[str], Path]) -> None:
    """Set `CHAOS_SEEDS="100 139"` for other cases than those that are always tried."""
    case = case_of(seed)
    if case.launcher not in launchers():
        pytest.skip(f"{case.launcher} is not installed")
    strike(case, tmp_path, reference(case.config))
