from __future__ import annotations

import json
from pathlib import Path

import pytest

from smpkit.observe.events import (
    ActionSpan,
    Counter,
    Event,
    EventsError,
    EventWriter,
    Mark,
    MessageSpan,
    PlannedSchedule,
    RankLog,
    StepSpan,
    WorkSpan,
    find_events,
    read_events,
)
from tests.observe.logs import header, write_log

EVENTS: list[Event] = [
    PlannedSchedule("0", '{"format": 1}'),
    ActionSpan(0, "F", 0, 1, 10, 20),
    MessageSpan(0, "send", 1, 7, 4096, 20, 21),
    WorkSpan(0, "reduce gradients", 21, 30),
    Counter("memory, bytes", 5, 30),
    Mark("“odd” name\n", 31),
    StepSpan(0, "train_step", "0", 5, 32),
]


def write(folder: Path, rank: int = 0) -> Path:
    return write_log(folder, RankLog(header(rank, 2), tuple(EVENTS), truncated=False))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    log = read_events(write(tmp_path / "new" / "folder", rank=1))
    assert log.header == header(1, 2)
    assert list(log.events) == EVENTS
    assert not log.truncated


def test_events_are_in_the_file_before_it_is_closed(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, header(0, 1))
    writer.write_rows((type(event), [*vars(event).values()]) for event in EVENTS)
    assert list(read_events(tmp_path / "events_0.jsonl").events) == EVENTS
    writer.close()


def test_a_last_line_that_breaks_off_is_left_out_wherever_it_breaks(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    last = whole.rstrip().rfind(b"\n") + 1
    for length in range(last + 1, len(whole)):
        path.write_bytes(whole[:length])
        log = read_events(path)
        assert log.truncated
        assert list(log.events) == EVENTS[:-1]


@pytest.mark.parametrize(
    "line", ["{", "1", "", "[1]", '[["zebra"]]', '[[["mark"], "x", 1]]', '[["mark", "x"]]', '[["mark", "x", 1, 2]]']
)
def test_a_damaged_line_is_an_error_that_names_it(line: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    first, rest = path.read_text().split("\n", 1)
    path.write_text(f"{first}\n{line}\n{rest}")
    with pytest.raises(EventsError, match=r"events_0\.jsonl:2: not a line of events"):
        read_events(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "format 1, and this smpkit reads format 2"),
        ({"more": 0}, r"events_0\.jsonl:1: not a line of events"),
    ],
)
def test_a_wrong_header_is_an_error(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    first, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(first), **change}) + "\n" + rest)
    with pytest.raises(EventsError, match=message):
        read_events(path)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "events_0.jsonl"
    path.touch()
    with pytest.raises(EventsError, match="has no header"):
        read_events(path)


@pytest.mark.parametrize("place", [".", "events", "data/events", "output/data/events"])
def test_events_are_found_where_runs_leave_them(place: str, tmp_path: Path) -> None:
    write(tmp_path / place, rank=10)
    write(tmp_path / place, rank=2)
    (tmp_path / place / "events_x.jsonl").touch()
    assert [path.name for path in find_events(tmp_path)] == ["events_2.jsonl", "events_10.jsonl"]


@pytest.mark.parametrize(("name", "message"), [(".", "there are no events"), ("none", "there is no folder")])
def test_nothing_to_find_is_an_error_with_a_hint(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(EventsError, match=message) as caught:
        find_events(tmp_path / name)
    assert caught.value.hint is not None


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "events_0.jsonl").symlink_to("/dev/full")
    with pytest.raises(EventsError, match=r"cannot be written to .*: No space left on device"):
        EventWriter(tmp_path, header(0, 1))
