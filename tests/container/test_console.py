from __future__ import annotations

import io
import os

import pytest

from smpkit_container.console import Console
from smpkit_container.lines import Piece


class Screen:
    """A console on two buffers, with a clock that the test turns."""

    def __init__(self, terminal: bool = False, colour: bool = False) -> None:
        self.out, self.err, self.now = io.BytesIO(), io.BytesIO(), 0.0
        self.console = Console(self.out, self.err, terminal=terminal, colour=colour, clock=lambda: self.now)

    def text(self, stream: io.BytesIO) -> str:
        return stream.getvalue().decode()


def test_lines_go_to_the_stream_they_came_from() -> None:
    screen = Screen()
    screen.console.show(3, "out", Piece("data"))
    screen.console.show(3, "err", Piece("talk"))
    assert (screen.text(screen.out), screen.text(screen.err)) == ("[rank 3] data\n", "[rank 3] talk\n")


def test_a_log_gets_one_progress_line_in_ten_seconds_per_rank() -> None:
    screen = Screen()
    for second in range(25):
        screen.now = float(second)
        for rank in range(2):
            screen.console.show(rank, "err", Piece(f"step {second}", passing=True))
    shown = ["[rank 0] step 10", "[rank 1] step 10", "[rank 0] step 20", "[rank 1] step 20"]
    assert screen.text(screen.err).splitlines() == shown


def test_a_terminal_keeps_progress_on_the_bottom_line() -> None:
    screen = Screen(terminal=True)
    screen.console.show(0, "err", Piece("10%", passing=True))
    screen.console.show(1, "err", Piece("hello"))
    screen.console.show(0, "err", Piece("100%"))
    clear = "\r\x1b[K"
    status = "[rank 0] 10%"
    expected = f"{clear}{status}{clear}[rank 1] hello\n{status}{clear}[rank 0] 100%\n"
    assert screen.text(screen.err) == expected


def test_colours_are_on_the_prefix_only_and_repeat() -> None:
    screen = Screen(terminal=True, colour=True)
    screen.console.show(0, "out", Piece("a"))
    screen.console.show(8, "out", Piece("b"))
    assert screen.text(screen.out) == "\x1b[36m[rank 0] \x1b[0ma\n\x1b[36m[rank 8] \x1b[0mb\n"


EVIL = "\x1b]52;c;aWQK\x07\x1b[31mred\x1b[0m\x1b[2J\x9b1m"
SHOWN = "\\x1b]52;c;aWQK\\x07\x1b[31mred\x1b[0m\\x1b[2J\\x9b1m"
BARE = "\\x1b]52;c;aWQK\\x07red\\x1b[2J\\x9b1m"


@pytest.mark.parametrize("terminal", [True, False])
def test_what_others_wrote_controls_no_terminal_but_keeps_its_colours(terminal: bool) -> None:
    screen = Screen(terminal=terminal)
    screen.console.show(0, "out", Piece(EVIL))
    screen.console.say(f"failed:\n\n    {EVIL}")
    assert screen.text(screen.out) == f"[rank 0] {SHOWN}\n"
    assert screen.text(screen.err) == f"failed:\n\n    {SHOWN}\n"


def test_a_progress_line_that_is_cut_to_the_width_has_no_colours() -> None:
    screen = Screen(terminal=True)
    screen.console.show(0, "err", Piece(EVIL, passing=True))
    assert screen.text(screen.err) == f"\r\x1b[K[rank 0] {BARE}"


def test_a_reader_that_went_away_is_noticed_and_not_written_to_again() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb", buffering=0) as stream:
        console = Console(stream, io.BytesIO(), terminal=False, colour=False)
        console.show(0, "out", Piece("a"))
        assert console.broken
        console.show(0, "out", Piece("b"))
