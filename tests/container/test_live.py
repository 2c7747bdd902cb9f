from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from smpkit.observe.status import StatusPage
from smpkit.observe.summary import KindBytes
from smpkit_container.console import Live


def test_a_terminal_sees_each_state_of_the_start_and_then_steps(tmp_path: Path) -> None:
    clock = SimpleNamespace(now=100.0)
    live = Live(tmp_path, range(2), terminal=True, clock=lambda: clock.now)
    assert live.next_line(0, has_output=False) is None, "not due yet"

    def later(started: int) -> str | None:
        clock.now += 1
        return live.next_line(started, has_output=False)

    assert later(1) == "starting ranks: 1 of 2 up (1.0 s)"
    assert later(2) == "2 ranks up, importing (2.0 s)"
    pages = [StatusPage(tmp_path, 0)]
    assert later(2) == "2 ranks up, importing, 1 ready (3.0 s)"
    pages.append(StatusPage(tmp_path, 1))
    assert later(2) == "2 ranks ready, no step yet (4.0 s)"
    for page in pages:
        page.begin_step(0)
    assert later(2) == "step 0, the first one: it traces and plans (5.0 s)"
    for page in pages:
        page.end_step(10, 0.2485)
        page.begin_step(17)  # evaluations are steps of their own
    pages[1].write(KindBytes(weights=3 * 2**30), None, None)
    clock.now += 3
    assert later(2) == "10 steps of 248.5 ms, peak memory 3.0 GiB (rank 1) (9.0 s)"
    clock.now += 60
    assert later(2) == "10 steps of 248.5 ms, peak memory 3.0 GiB (rank 1) (1 m 10 s)", "its rate decayed"


def test_a_log_gets_lines_at_growing_intervals(tmp_path: Path) -> None:
    clock = SimpleNamespace(now=100.0)
    live = Live(tmp_path, range(1), terminal=False, clock=lambda: clock.now)
    said = []
    for _ in range(3000):
        clock.now += 1
        if live.next_line(1, has_output=False) is not None:
            said.append(clock.now - 100)
    assert said == [15, 45, 120, 300, 600, 900, 1350, 2025]


def test_a_script_without_smpkit_that_prints_is_left_alone(tmp_path: Path) -> None:
    clock = SimpleNamespace(now=100.0)
    live = Live(tmp_path, range(1), terminal=True, clock=lambda: clock.now)
    clock.now += 1
    assert live.next_line(1, has_output=True) is None
