"""Leave out each synchronisation of the runtime, one at a time, and see that the simulated device finds it missing.

`tests/device/edges.py` finds them in the source, and `tests/device/scenarios/` has what runs. First each scenario runs
once with everything in place, which tells what edges it comes to. Then an edge is left out in processes of their own,
each of which runs one of these scenarios under several orders of the device, until there is a race, a wrong value, an
error or no end. The result is written to tests/sim_mutants.yaml; `why` there, of an edge that nothing finds, is
written by hand and stays.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import yaml

from smpkit.testing import simulated_device
from smpkit.testing.ranks import RankFailed
from tests.device.edges import Edge, edges, leave_out, watch
from tests.device.on_sim import ORDERS, run_on_sim
from tests.device.scenarios import SCENARIOS, run_scenario
from tests.simulated import Order

RESULT: Final = Path(__file__).resolve().parents[1] / "tests/sim_mutants.yaml"
_HEADER: Final = """\
# Each synchronisation of the runtime, and what the simulated device said when it was left out (scripts/sync_mutants).
# `found` names what showed it: in which scenario and order a race (two uses of memory), a wrong value, an error or a
# hang. Where it is null, `why` says why nothing can show it, or what would. `tried` alone: no scenario that was tried
# showed it, or none comes to it.
"""
_MOST_SCENARIOS: Final = 8
"""In how many scenarios an edge is left out, of those that are quick or have several ranks, and of the others."""
_ENDLESS: Final = 20
"""Ranks hang that take so many times as long as with everything in place: a missing edge does not explain it."""
_LEAST_SECONDS: Final = 120.0
"""Ranks that have not run for so long are not said to hang: they may get no processor on a busy machine."""
_LONGEST: Final = 1800.0
"""Seconds that a scenario may take with everything in place."""


class Reach(NamedTuple):
    """How many seconds the ranks of a scenario computed with everything in place, and to what edges they came."""

    seconds: float
    edges: frozenset[str]


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="edges with one of these texts in them")
    parser.add_argument("--new", action="store_true", help="only those that have never been left out")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes run at a time")
    asked = parser.parse_args()
    every = edges()
    chosen = [edge for edge in every if any(text in edge.id for text in asked.only)]
    if asked.new:
        tried = {name for name, entry in _known().items() if entry["found"] or "why" in entry or "tried" in entry}
        chosen = [edge for edge in chosen if edge.id not in tried]
    tests: dict[str, str | None] = {}
    first = [name for name in SCENARIOS if SCENARIOS[name].is_quick or SCENARIOS[name].ranks > 1]
    with ThreadPoolExecutor(asked.jobs) as pool:
        for names in (first, [name for name in SCENARIOS if name not in first]):
            left = [edge for edge in chosen if not tests.get(edge.id)]
            if not left:
                break
            reach = dict(zip(names, pool.map(partial(_reach, every), names), strict=True))
            for edge, finding in zip(left, pool.map(partial(_try, reach), left), strict=True):
                tests[edge.id] = finding
                _write(every, tests)
                print(f"{'found' if finding else 'NOT FOUND':9} {edge.id}\n          {finding}", flush=True)
    entries = _write(every, tests)
    lacking = [entry["edge"] for entry in entries if not entry["found"] and "why" not in entry]
    print(f"{sum(bool(entry['found']) for entry in entries)} of {len(entries)} edges are found to be missing")
    print(*(f"neither found nor explained: {edge}" for edge in lacking), sep="\n")
    return 1 if lacking else 0


def _known() -> dict[str, dict[str, Any]]:
    return {entry["edge"]: entry for entry in yaml.safe_load(RESULT.read_text())}


def _write(every: Sequence[Edge], tests: dict[str, str | None]) -> list[dict[str, Any]]:
    """Write what was found now, and what was known before of the others, and return it."""
    known = _known()
    entries = []
    for edge in every:
        before = known.get(edge.id, {})
        entry: dict[str, Any] = {"edge": edge.id, "found": tests.get(edge.id, before.get("found"))}
        if not entry["found"]:
            entry |= {"tried": True} if edge.id in tests or "tried" in before else {}
            entry |= {"why": before["why"]} if "why" in before else {}
        entries.append(entry)
    RESULT.write_text(_HEADER + yaml.safe_dump(entries, width=120, sort_keys=False, allow_unicode=True))
    return entries


# --- which scenarios come to an edge ----------------------------------------------------------------------------------


def _reach(every: list[Edge], name: str) -> Reach:
    ranks = run_on_sim(_watched, every, name, size=SCENARIOS[name].ranks, timeout=_LONGEST)
    return Reach(sum(seconds for seconds, _ in ranks), frozenset().union(*(ids for _, ids in ranks)))


def _watched(every: list[Edge], name: str) -> tuple[float, set[str]]:
    hits = watch(every)
    with simulated_device.no_races(*ORDERS[0]):
        run_scenario(name, ORDERS[0])
    return time.process_time(), set(hits)


# --- without an edge --------------------------------------------------------------------------------------------------


def _try(reach: dict[str, Reach], edge: Edge) -> str | None:
    """Return what showed that an edge is missing; None if nothing did."""
    reaching = sorted((name for name in reach if edge.id in reach[name].edges), key=lambda name: reach[name].seconds)
    for name in _various(reaching)[:_MOST_SCENARIOS]:
        limit = max(_LEAST_SECONDS, _ENDLESS * len(ORDERS) * reach[name].seconds)
        if finding := _run(edge, name, limit):
            return f"{name}, {finding[:300]}"
    return None


def _various(names: Sequence[str]) -> list[str]:
    """Return the names: first those of the default tests, and of these those first that begin in different ways."""
    turns = Counter[str]()
    places = {}
    for name in names:
        kind = name.split(",")[0] + name.split(",")[-1]
        turns[kind] += 1
        places[name] = turns[kind]
    return sorted(names, key=lambda name: (not SCENARIOS[name].is_quick, places[name]))


def _run(edge: Edge, name: str, limit: float) -> str | None:
    """Return what the ranks of a scenario showed in so many seconds.

    A rank that has found something ends, and others fail or hang for want of it. So what ranks have found counts first.
    """
    failed = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_on_sim(_without, folder, edge, name, size=SCENARIOS[name].ranks, timeout=limit)
        except RankFailed as error:
            failed = str(error).strip()
        outputs = [path.read_text() for path in Path(folder).iterdir()]
    if outputs:
        return min(outputs, key=lambda finding: ": error: " in finding)
    if failed is None:
        return None
    by = "hang" if "still running after" in failed else "crash" if "died without" in failed else "error"
    return f"{by}: {failed.splitlines()[-1]}"


def _without(folder: str, edge: Edge, name: str) -> None:
    """Leave out an edge and run a scenario, until this rank finds something, which it writes to the folder."""
    leave_out(edge)
    simulated_device.races()
    for order in ORDERS:
        if finding := _finding(name, order):
            Path(folder, os.environ["RANK"]).write_text(f"{order[0]} {order[1]}: {finding}")
            return


def _finding(name: str, order: Order) -> str | None:
    error: Exception | None = None
    try:
        run_scenario(name, order)
        torch.accelerator.synchronize()
    except Exception as raised:
        error = raised
    is_wrong = isinstance(error, AssertionError)
    if races := simulated_device.races():
        both = f"{races[0].second.operator} and {races[0].first.operator} on {races[0].memory}"
        return f"race{' (and a wrong value)' * is_wrong}: {both}"
    if is_wrong:
        return f"value: {' '.join(str(error).split())}"
    return f"error: {type(error).__name__}: {' '.join(str(error).split())}" if error else None


if __name__ == "__main__":
    sys.exit(main())
