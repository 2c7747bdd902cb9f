"""Profiles that torch's profiler has made of some steps, put into the Chrome trace of a run beside the events.

::

    rank 0 · stage 0   steps                [ train_step 10                   ]
                       compute              [ F0 ][ F1 ]   [ B0     ]
                       torch: thread 4711   [ aten::linear ][ aten::relu ] ...
                       torch: stream 7           [ gemm ][ gemm ]

Their clock is not ours: the beginning of a profiled step is in both, and moves all the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from smpkit.observe.events import EventsError
from smpkit.observe.merge import Run

__all__ = ["PROFILE", "PROFILED", "profile_events", "profile_name", "profiled_steps", "profiles_of", "steps_of"]

PROFILE: Final = "SMPKIT_PROFILE"
"""The variable that names the steps; without a folder for events, nothing is profiled."""

PROFILED: Final = "smpkit step "
"""What the profiler's span of a step is called, with the number behind it."""

_NAME: Final = re.compile(r"profile_(\d+)\.json")
_FIRST_THREAD: Final = 10_000
"""Above those of our own tracks."""
_OF_THE_PROFILER: Final = ("Record Window End", "Iteration Start: PyTorch Profiler")
_FLOWS: Final = ("s", "t", "f")


def steps_of(text: str) -> range:
    """Return the steps that `10:12` names, the last one included; `10` is one step.

    Raises:
        ValueError: it names none.
    """
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise ValueError(f"`{text}` names no steps: give the first and the last, counted from 0, as `10:12`")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def profile_name(rank: int) -> str:
    """Return the name of a rank's file, in the folder of events."""
    return f"profile_{rank}.json"


def profiles_of(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the profiles in a folder of events, by rank.

    Raises:
        EventsError: one is damaged.
    """
    found = {}
    for path in sorted(folder.glob("profile_*.json")):
        name = _NAME.fullmatch(path.name)
        if name is None:
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            assert isinstance(content["traceEvents"], list)
        except (ValueError, KeyError, TypeError, AssertionError):
            raise EventsError(f"{path} is no profile", hint="the rank may have been killed while it wrote it") from None
        found[int(name[1])] = content
    return found


def profiled_steps(profile: Mapping[str, Any]) -> dict[int, float]:
    """Return the steps in a profile with the times at which they begin, in the profiler's microseconds."""
    marks = (each for each in profile["traceEvents"] if each.get("ph") == "X" and each.get("cat") == "user_annotation")
    ours = (each for each in marks if str(each.get("name", "")).startswith(PROFILED))
    return {int(each["name"].removeprefix(PROFILED)): float(each["ts"]) for each in ours}


def profile_events(run: Run, rank: int, profile: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a profile's events as those of the rank's process in the trace of the run.

    Raises:
        EventsError: no profiled step is among the recorded ones.
    """
    begins = profiled_steps(profile)
    known = [number for number in begins if number in run.steps]
    if not known:
        message = f"the profile of rank {rank} has none of the recorded steps"
        raise EventsError(message, hint="record as many steps: SMPKIT_EVENTS_STEPS")
    offset = run.step(rank, known[0]).span.start_ns / 1000 - begins[known[0]]
    threads: dict[tuple[Any, Any], int] = {}
    names: dict[tuple[Any, Any], str] = {}
    for event in profile["traceEvents"]:
        place = event.get("pid"), event.get("tid")
        if event.get("ph") == "M":
            if event.get("name") == "thread_name":
                names[place] = str(event.get("args", {}).get("name", ""))
            continue
        if "ts" not in event or event.get("cat") == "Trace" or event.get("name") in _OF_THE_PROFILER:
            continue
        moved = {**event, "pid": rank, "tid": threads.setdefault(place, _FIRST_THREAD + len(threads))}
        moved["ts"] = float(event["ts"]) + offset
        if event["ph"] in _FLOWS:
            moved["id"] = f"torch.{rank}.{event.get('id')}"
        yield moved
    for place, thread in threads.items():
        name = f"torch: {names.get(place) or f'thread {place[1]}'}"
        common = {"ph": "M", "pid": rank, "tid": thread}
        yield {**common, "name": "thread_name", "args": {"name": name}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": thread}}
