from __future__ import annotations

from pathlib import Path

import pytest

from smpkit.cli import calibrate
from smpkit.plan.tune.calibration import read_calibration, this_machine
from smpkit.torch.calibrate import main
from tests.cli.conftest import Smpkit
from tests.deadlines import until
from tests.ranks import run_ranks


@pytest.mark.slow
def test_real_ranks_measure_this_machine(folder: Path, smpkit: Smpkit) -> None:
    smpkit("calibrate", "--ranks", "2", "--seconds", "1", code=0)
    found = read_calibration(folder / "calibration.json")
    assert (found.ranks, found.machine.host, found.machine.cores) == (2, this_machine().host, this_machine().cores)
    assert {each.dtype for each in found.matmul} >= {"float32", "bfloat16"}
    assert [each.num_bytes for each in found.messages] == [4096, 2**20, 16 * 2**20]
    collectives = {each.operation: each.ranks for each in found.collectives}
    assert collectives == {"all_reduce": 2, "all_gather": 2, "reduce_scatter": 2}
    assert 0 < found.action_seconds < 1
    assert 0 < found.operation_seconds < 0.01
    assert 0 < found.split_seconds < 0.1
    assert found.elementwise_bytes_per_second > 1e6
    # 16 MiB take longer than 4 KiB, and a copy of all of it within memory is faster than a message.
    assert found.messages[-1].seconds > found.messages[0].seconds
    assert found.memory_bytes_per_second > 16 * 2**20 / found.messages[-1].seconds


def measure_forked(ranks: int, seconds: float, path: Path) -> None:
    """Measure on ranks that have torch already; the test above starts them as users do."""
    run_ranks(main, ranks, [str(path), str(seconds)])


def test_a_single_rank_has_nobody_to_send_to(folder: Path, smpkit: Smpkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_measure", measure_forked)
    done = smpkit("calibrate", "--ranks", "1", "--seconds", "1", "--output", "one.json", code=0)
    found = read_calibration(folder / "one.json")
    assert (found.messages, found.collectives) == ([], [])
    assert "float32 matmul" in done.stdout
    assert "all_reduce" not in done.stdout
    assert "Wrote one.json" in done.stderr


def test_ranks_that_are_late_do_not_outlive_the_command(
    folder: Path, smpkit: Smpkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have sessions of their own, and went on where torchrun alone was killed."""
    torchrun, pid = folder / "torchrun", folder / "pid"
    torchrun.write_text(f"#!/bin/sh\nsetsid sleep 300 & echo $! >{pid}; trap 'kill $!; exit 1' TERM; wait\n")
    torchrun.chmod(0o755)
    monkeypatch.setattr("smpkit.modules.module_command", lambda _: [str(torchrun)])
    monkeypatch.setattr(calibrate, "_STARTING_SECONDS", 2)
    done = smpkit("calibrate", "--ranks", "2", "--seconds", "1", code=1)
    assert "error: the 2 ranks that measure were not done within 3 s" in done.stderr
    rank = Path("/proc", pid.read_text().strip())
    until(lambda: not rank.exists() or "(zombie)" in (rank / "status").read_text(), "the end of the rank")


def test_ranks_that_fail_are_one_sentence(folder: Path, smpkit: Smpkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", "{}")  # of another job: it must not reach the ranks
    monkeypatch.setattr(calibrate, "_STARTING_SECONDS", -1)
    done = smpkit("calibrate", "--ranks", "2", "--seconds", "1.5", code=1)
    assert "error: the 2 ranks that measure were not done within 0.5 s" in done.stderr
    assert not (folder / "calibration.json").exists()
