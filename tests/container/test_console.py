from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest

from smpkit_container.console import Console, LineSplitter, Piece


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


def test_a_progress_line_is_cut_where_wide_characters_reach_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tqdm's `disp_trim` counts them; a line that wraps would stay on the terminal."""
    monkeypatch.setenv("COLUMNS", "16")
    screen = Screen(terminal=True)
    screen.console.show(0, "err", Piece("a学习率", passing=True))
    assert screen.err.getvalue().decode() == "\r\x1b[K[rank 0] a学习"


def test_a_reader_that_went_away_is_noticed_and_not_written_to_again() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb", buffering=0) as stream:
        console = Console(stream, io.BytesIO(), terminal=False, colour=False)
        console.show(0, "out", Piece("a"))
        assert console.broken
        console.show(0, "out", Piece("b"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_output_with_a_word() -> None:
    """As `smpkit run job.yaml > log` finds it: the ranks are asked to end then, as where nobody reads."""
    with Path("/dev/full").open("wb") as full:
        err = io.BytesIO()
        console = Console(full, err, terminal=False, colour=False)
        console.show(0, "out", Piece("a"))
        console.show(0, "out", Piece("b"))
    assert console.broken
    assert err.getvalue().decode() == "error: the output cannot be written: [Errno 28] No space left on device\n"


def test_a_write_that_a_signal_interrupts_is_continued() -> None:
    """The end of a rank is a signal, and PYTHONUNBUFFERED leaves what was not written to whoever writes."""

    class Interrupted(io.BytesIO):
        def write(self, data: Any, /) -> int:
            return super().write(data[:5])

    out = Interrupted()
    Console(out, out, terminal=False, colour=False).show(0, "out", Piece("a long line"))
    assert out.getvalue() == b"[rank 0] a long line\n"


def test_lines_are_kept_with_the_run_until_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.console.keep_logs(tmp_path, "node2")
    screen.console.show(3, "out", Piece("data"))
    screen.console.show(3, "out", Piece("passing", passing=True))
    screen.console.say("words")
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs == {"rank-3.log": "data\n", "launcher-node2.log": "[rank 3] data\nwords\n"}
    (tmp_path / "logs" / "rank-4.log").mkdir()
    screen.console.show(4, "out", Piece("lost"))
    assert "warning: the log files end here: " in capsys.readouterr().err
    assert screen.text(screen.out) == "[rank 3] data\n[rank 4] lost\n"


def test_lines_of_several_nodes_have_their_time_before_them() -> None:
    out = io.BytesIO()
    Console(out, out, terminal=False, colour=False, stamped=True).say("a\nb")
    assert re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z )a\n\1b\n", out.getvalue().decode())


# ---- lines ---------------------------------------------------------------------------------------------------------


def fed(*chunks: bytes) -> list[Piece]:
    splitter = LineSplitter()
    return [piece for chunk in chunks for piece in splitter.feed(chunk)] + splitter.close()


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a", b"b\nc", b"\n\nd"], ["ab", "c", "", "d"]),
        (["größe".encode()[:3], "größe".encode()[3:] + b"\n"], ["größe"]),
        ([b"\xff\xfe ok\n"], ["\ufffd\ufffd ok"]),
        ([b"a\r\nb\r\n"], ["a", "b"]),
    ],
    ids=["whole however they arrive", "cut within a character", "not text", "Windows"],
)
def test_lines(chunks: list[bytes], lines: list[str]) -> None:
    assert fed(*chunks) == [Piece(line) for line in lines]


def test_progress_updates_pass_and_the_last_becomes_the_line() -> None:
    """tqdm writes the carriage return before each update, others after it."""
    assert fed(b"\r10%", b"\r20%", b"\r100%\n") == [Piece("10%", True), Piece("20%", True), Piece("100%")]
    assert fed(b"10%\r", b"20%\r\n") == [Piece("10%", True), Piece("20%")]
    assert fed(b"\r10%\r20%") == [Piece("20%", True), Piece("20%")]  # which nothing ended


def test_long_lines_and_progress_updates_are_given_out_in_parts() -> None:
    splitter = LineSplitter(max_bytes=10)
    assert splitter.feed(b"x" * 8) == []
    assert splitter.feed(b"x" * 8) == [Piece("x" * 16)]
    assert splitter.feed(b"\r" + b"x" * 20)[-1] == Piece("x" * 20)
    assert splitter.close() == []
