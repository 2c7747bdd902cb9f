from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smpkit_container.lines import LineSplitter, Piece


def fed(*chunks: bytes) -> list[Piece]:
    splitter = LineSplitter()
    return [piece for chunk in chunks for piece in splitter.feed(chunk)] + splitter.close()


def test_lines_are_whole_however_they_arrive() -> None:
    assert fed(b"a", b"b\nc", b"\n\nd") == [Piece("ab"), Piece("c"), Piece(""), Piece("d")]


def test_characters_may_be_cut_anywhere() -> None:
    assert fed("größe".encode()[:3], "größe".encode()[3:] + b"\n") == [Piece("größe")]


def test_what_is_not_text_is_replaced() -> None:
    assert fed(b"\xff\xfe ok\n") == [Piece("\ufffd\ufffd ok")]


def test_windows_line_ends_are_line_ends() -> None:
    assert fed(b"a\r\nb\r\n") == [Piece("a"), Piece("b")]


def test_progress_updates_pass_and_the_last_becomes_the_line() -> None:
    """tqdm writes the carriage return before each update, others after it."""
    assert fed(b"\r10%", b"\r20%", b"\r100%\n") == [Piece("10%", True), Piece("20%", True), Piece("100%")]
    assert fed(b"10%\r", b"20%\r\n") == [Piece("10%", True), Piece("20%")]


def test_progress_without_an_end_is_kept_at_the_close() -> None:
    assert fed(b"\r10%\r20%") == [Piece("20%", True), Piece("20%")]


def test_long_lines_are_given_out_in_parts() -> None:
    splitter = LineSplitter(max_bytes=10)
    assert splitter.feed(b"x" * 8) == []
    assert splitter.feed(b"x" * 8) == [Piece("x" * 16)]
    assert splitter.close() == []


def test_long_progress_does_not_fill_the_memory() -> None:
    splitter = LineSplitter(max_bytes=10)
    pieces = splitter.feed(b"\r" + b"x" * 20)
    assert pieces[-1] == Piece("x" * 20)
    assert splitter.close() == []


@given(st.lists(st.text(alphabet="ab\u00e9 ", max_size=5), max_size=6), st.integers(min_value=1, max_value=7))
def test_no_text_is_lost_at_any_chunk_size(lines: list[str], size: int) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    assert [piece.text for piece in fed(*chunks)] == lines
