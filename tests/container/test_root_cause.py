from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from smpkit_container.root_cause import RankEnd, RankError, RootCause, find_root_cause


def error(name: str = "ValueError", text: str = "boo", seconds: float = 1.0, chain: Sequence[str] = ()) -> RankError:
    own = f"{name}: {text}"
    return RankError(name=name, message=own, traceback="", chain=chain or (own,), seconds=seconds)


def raised(rank: int, seconds: float, name: str = "ValueError", text: str = "boo") -> RankEnd:
    return RankEnd(rank, 1, seconds + 0.5, error(name, text, seconds=seconds))


def blame(*ends: RankEnd) -> RootCause:
    cause = find_root_cause(ends)
    assert cause is not None
    return cause


GLOO_LOST = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
GLOO_LATE = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 2000ms for recv operation"
CONSEQUENCES = [
    ("RuntimeError", GLOO_LOST),
    ("RuntimeError", GLOO_LATE),
    ("RuntimeError", "Broken pipe"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    ("torch.distributed.DistBackendError", "NCCL error: remote process exited or there was a network error"),
    ("torch.distributed.DistBackendError", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"),
    ("torch.distributed.DistStoreError", "wait timeout after 2000ms, keys: /a"),
    ("smpkit.errors.DeadlineError", "rank 0 waited 600 s for rank 1"),
    ("smpkit.errors.RemoteError", "rank 1 failed: ValueError"),
]


@pytest.mark.parametrize(("name", "text"), CONSEQUENCES, ids=[f"{n}-{t[:12]}" for n, t in CONSEQUENCES])
def test_a_cause_goes_before_earlier_consequences(name: str, text: str) -> None:
    cause = blame(raised(0, 1.0, name, text), raised(1, 2.0))
    assert (cause.culprit.rank, cause.followers) == (1, (0,))


def test_the_earliest_cause_is_the_one() -> None:
    cause = blame(raised(0, 3.0), raised(1, 1.0), raised(2, 2.0))
    assert (cause.culprit.rank, cause.followers) == (1, (0, 2))


def test_time_of_the_exception_counts_not_of_the_end() -> None:
    """A rank may take long to end after it raised."""
    slow = RankEnd(0, 1, 9.0, error(seconds=1.0))
    assert blame(slow, raised(1, 2.0)).culprit is slow


def test_a_consequence_may_be_wrapped_in_the_users_exception() -> None:
    wrapped = error(chain=("ValueError: step failed", f"RuntimeError: {GLOO_LOST}"))
    assert blame(RankEnd(0, 1, 1.0, wrapped), raised(1, 2.0)).culprit.rank == 1


def test_abort_by_nccls_watchdog_is_a_consequence() -> None:
    aborted = RankEnd(0, -signal.SIGABRT, 1.0, last_lines=("[E] Watchdog caught collective operation timeout",))
    assert blame(aborted, raised(1, 2.0)).culprit.rank == 1
    assert blame(RankEnd(0, -signal.SIGABRT, 1.0), raised(1, 2.0)).culprit.rank == 0


def test_only_consequences_name_those_who_were_waited_for() -> None:
    cause = blame(
        raised(0, 2.0, "RuntimeError", GLOO_LATE),
        RankEnd(1, 0, 2.5),
        RankEnd(2, -15, 5.0, stopped=True),
        raised(3, 2.1, "RuntimeError", GLOO_LOST),
    )
    assert cause.culprit.rank == 0
    assert [end.rank for end in cause.left_early] == [1]
    assert [end.rank for end in cause.still_running] == [2]
    assert cause.followers == (3,)


@pytest.mark.parametrize("ends", [[], [RankEnd(0, 0, 1.0)], [RankEnd(0, -15, 1.0, stopped=True), RankEnd(1, 0, 1.0)]])
def test_ranks_that_ended_well_or_had_to_be_stopped_are_not_to_blame(ends: list[RankEnd]) -> None:
    assert find_root_cause(ends) is None


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (RankEnd(0, 3, 1.0), 3),
        (RankEnd(0, -11, 1.0), 139),
        (RankEnd(0, None, 1.0), 137),
        (RankEnd(0, -15, 1.0, error()), 1),
        (RankEnd(0, 0, 1.0, error()), 1),
        (RankEnd(0, 3, 1.0, error()), 3),
    ],
    ids=["exit", "signal", "immortal", "raised and killed", "raised and ended with 0", "raised and ended with 3"],
)
def test_exit_code_is_the_scripts_own(end: RankEnd, code: int) -> None:
    assert end.exit_code == code


@pytest.mark.parametrize("status", [2, None, -signal.SIGUSR1, -signal.SIGKILL])
def test_a_script_that_exited_is_not_said_to_be_killed(status: int | None) -> None:
    """While Python ends, nothing handles the signal that asks a rank for its stack."""
    exited = RankError("SystemExit", "SystemExit: 2", "", ("SystemExit: 2",), seconds=1.0, exit_code=2)
    end = RankEnd(0, status, 1.5, exited)
    assert (end.headline, end.exit_code) == ("the script exited with code 2", 2)
