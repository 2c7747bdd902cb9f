from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from smpkit.observe.events import MessageSpan, RankLog
from smpkit.observe.merge import merge
from smpkit.observe.trace import chrome_trace
from tests.observe.logs import chain, logs_of
from tests.observe.trace_problems import trace_problems


def trace(steps: list[int] | None = None, num_steps: int = 2) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(chrome_trace(merge(logs_of(chain(3, 4), num_steps=num_steps)), steps))[
        "traceEvents"
    ]
    return events


def test_a_trace_is_sound() -> None:
    assert trace_problems(json.dumps({"traceEvents": trace()})) == []


def test_ranks_are_processes_with_named_tracks() -> None:
    names = {(e["pid"], e["args"].get("name")) for e in trace() if e["ph"] == "M"}
    assert (2, "rank 2 · stage 2") in names
    assert {"steps", "compute", "sends", "receives"} <= {name for _, name in names}


def test_times_are_microseconds() -> None:
    spans = [e for e in trace() if e["ph"] == "X" and e["name"] == "F0" and e["pid"] == 0]
    assert [span["dur"] for span in spans] == [1000.0, 1000.0]


def test_every_message_has_an_arrow_forward_in_time() -> None:
    events = trace(steps=[1])
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == 2 * 2 * 4
    assert starts.keys() == ends.keys()
    assert all(starts[name]["ts"] <= ends[name]["ts"] for name in starts)
    assert all(abs(starts[name]["pid"] - ends[name]["pid"]) == 1 for name in starts)


def test_one_step_can_be_chosen() -> None:
    assert {e["name"] for e in trace(steps=[1]) if e.get("cat") == "steps"} == {"train_step 1"}


def test_live_microbatches_are_counted_as_scheduled() -> None:
    values = [e["args"]["value"] for e in trace() if e["ph"] == "C" and e["pid"] == 0 and "live" in e["name"]]
    assert max(values) == 3
    assert values[-1] == 0


def test_memory_is_a_counter() -> None:
    assert [e["args"]["value"] for e in trace() if e["ph"] == "C" and e["pid"] == 1 and "memory" in e["name"]] == [
        1000,
        1001,
    ]


def test_spans_that_overlap_get_tracks_of_their_own() -> None:
    logs = logs_of(chain(2, 2))
    sends = tuple(MessageSpan(0, "send", 1, 100 + i, 8, i * 10, 1000 + i * 10) for i in range(3))
    logs[0] = RankLog(logs[0].header, (*sends, *logs[0].events), truncated=False)
    text = chrome_trace(merge(logs))
    assert trace_problems(text) == []
    names = {e["args"].get("name") for e in json.loads(text)["traceEvents"] if e["ph"] == "M" and e["pid"] == 0}
    assert {"sends", "sends 2", "sends 3"} <= names


def shorten(event: dict[str, Any]) -> None:
    event["dur"] = -1.0


def stretch(event: dict[str, Any]) -> None:
    event["dur"] += 1500.0


def move(event: dict[str, Any]) -> None:
    event["ts"] = -5000.0


def rename(event: dict[str, Any]) -> None:
    event["id"] = "nobody"


def unname(event: dict[str, Any]) -> None:
    event["name"] = "anything"


@pytest.mark.parametrize(
    ("which", "spoil", "problem"),
    [
        (lambda e: e["ph"] == "X" and e["name"] == "F0", shorten, "a negative duration"),
        (lambda e: e["ph"] == "X" and e["name"] == "F0", stretch, "spans cross"),
        (lambda e: e["ph"] == "f", move, "`f` is in no span"),
        (lambda e: e["ph"] == "s", rename, "has ['s'], not s and f"),
        (lambda e: e["name"] == "thread_name", unname, "has no name"),
    ],
    ids=["negative", "crossing", "arrow in the air", "arrow without an end", "unnamed"],
)
def test_the_checker_finds(
    which: Callable[[dict[str, Any]], bool], spoil: Callable[[dict[str, Any]], None], problem: str
) -> None:
    events = trace()
    spoil(next(event for event in events if which(event)))
    assert any(problem in found for found in trace_problems(json.dumps({"traceEvents": events})))
