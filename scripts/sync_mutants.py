"""Leave out each synchronisation of the runtime, one at a time, and see that the simulated device finds it missing.

`tests/device/edges.py` finds them in the source, and `tests/device/scenarios/` has what runs. First each scenario runs
once with everything in place, which tells what edges it comes to. Then an edge is left out in processes of their own,
each of which runs one of these scenarios under several orders of the device, until there is a race, a wrong value, an
error or no end. The result is written to tests/sim_mutants.yaml; `why` there, of an edge that nothing finds, is
written by hand and stays.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from smpkit.testing import simulated_device
from smpkit.testing.ranks import RankFailed
from tests.device.edges import Edge, edges, leave_out, watch
from tests.device.on_sim import ORDERS, run_on_sim
from tests.device.scenarios import SCENARIOS, run_scenario

ROOT: Final = Path(__file__).resolve().parents[1]
RESULT: Final = "tests/sim_mutants.yaml"
_HEADER: Final = """\
# Each synchronisation of the runtime, and what the simulated device said when it was left out (scripts/sync_mutants).
# `found` names what showed it: a race (two uses of memory), a wrong value, an error or a hang, in
# which scenario and order. Where it is null, `why` says why nothing can show it, or what would. `tried` alone: no
# scenario that was tried showed it, or none comes to it.
"""
_ENDLESS: Final = 20
"""Ranks hang that take so many times as long as with everything in place: a missing edge does not explain it."""
_LEAST_SECONDS: Final = 120.0
"""Ranks that have not run for so long are not said to hang: they may get no processor on a busy machine."""
_LONGEST: Final = 1800.0
"""Seconds that a scenario may take with everything in place."""


@dataclass(frozen=True)
class Reach:
    """What a scenario came to with everything in place, and how many seconds its ranks computed."""

    seconds: float
    edges: frozenset[str]


@dataclass(frozen=True)
class Finding:
    """What showed that an edge is missing: a race, a wrong value, an error, a crash or a hang; under which order."""

    by: str
    order: str
    detail: str


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="edges with one of these texts in them")
    parser.add_argument(
        "--scenarios", nargs="+", default=[""], metavar="TEXT", help="scenarios with one of these texts"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many processes run at a time")
    parser.add_argument("--new", action="store_true", help="only those that have never been left out")
    parser.add_argument("--orders", type=int, default=len(ORDERS), help="under how many orders of the device")
    parser.add_argument("--most", type=int, default=8, help="how many scenarios an edge is tried in, of each round")
    parser.add_argument("--list", action="store_true", help="print the edges and end")
    arguments = parser.parse_args()
    every = edges()
    chosen = [edge for edge in every if not arguments.only or any(text in edge.id for text in arguments.only)]
    if arguments.new:
        tried = {name for name, entry in _known().items() if entry["found"] or "why" in entry or entry.get("tried")}
        chosen = [edge for edge in chosen if edge.id not in tried]
    if arguments.list:
        print(*(edge.id for edge in chosen), sep="\n")
        return 0
    names = [name for name in SCENARIOS if any(text in name for text in arguments.scenarios)]
    found: dict[str, dict[str, str] | None] = {}
    first = [name for name in names if SCENARIOS[name].is_quick or SCENARIOS[name].ranks > 1]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for some in (first, [name for name in names if name not in first]):
            left = [edge for edge in chosen if found.get(edge.id) is None]
            if not left or not some:
                continue
            reach = _reach(pool, every, some)
            attempt = partial(_try, reach=reach, most=arguments.most, orders=arguments.orders)
            for edge, how in zip(left, pool.map(attempt, left), strict=True):
                found[edge.id] = how
                _write(every, found)
                print(f"{'found' if how else 'NOT FOUND':9} {edge.id}\n          {how}", flush=True)
    entries = _write(every, found)
    lacking = [entry["edge"] for entry in entries if not entry["found"] and "why" not in entry]
    print(f"{sum(bool(entry['found']) for entry in entries)} of {len(entries)} edges are found to be missing")
    print(*(f"neither found nor explained: {each}" for each in lacking), sep="\n")
    return 1 if lacking else 0


def _write(every: Sequence[Edge], found: dict[str, dict[str, str] | None]) -> list[dict[str, Any]]:
    """Write what was found now, and what was known before of the others, and return it."""
    known = _known()
    entries = []
    for edge in every:
        before = known.get(edge.id, {})
        how = found.get(edge.id, before.get("found"))
        entry: dict[str, Any] = {"edge": edge.id, "found": _Line(how) if how else None}
        if not entry["found"] and (edge.id in found or "tried" in before):
            entry["tried"] = True
        if not entry["found"] and (why := before.get("why")):
            entry["why"] = why
        entries.append(entry)
    text = yaml.dump(entries, Dumper=_Dumper, width=120, sort_keys=False, allow_unicode=True)
    (ROOT / RESULT).write_text(_HEADER + text)
    return entries


class _Line(dict[str, str]):
    """A mapping that is written in one line, as far as it fits."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Line, lambda dumper, line: dumper.represent_mapping("tag:yaml.org,2002:map", line, True))


def _known() -> dict[str, dict[str, Any]]:
    path = ROOT / RESULT
    return {entry["edge"]: entry for entry in yaml.safe_load(path.read_text())} if path.exists() else {}


# --- which scenarios come to an edge ----------------------------------------------------------------------------------


def _reach(pool: ThreadPoolExecutor, every: Sequence[Edge], names: Sequence[str]) -> dict[str, Reach]:
    def measure(name: str) -> Reach:
        size = SCENARIOS[name].ranks
        ranks = run_on_sim(_watched, list(every), name, size=size, timeout=_LONGEST)
        return Reach(sum(seconds for seconds, _ in ranks), frozenset().union(*(ids for _, ids in ranks)))

    return dict(zip(names, pool.map(measure, names), strict=True))


def _watched(every: list[Edge], name: str) -> tuple[float, set[str]]:
    hits = watch(every)
    with simulated_device.no_races(*ORDERS[0]):
        run_scenario(name, ORDERS[0])
    return time.process_time(), set(hits)


# --- without an edge --------------------------------------------------------------------------------------------------


def _try(edge: Edge, reach: dict[str, Reach], most: int, orders: int) -> dict[str, str] | None:
    """Return what showed that an edge is missing; None if nothing did."""
    reaching = sorted((name for name in reach if edge.id in reach[name].edges), key=lambda name: reach[name].seconds)
    for name in _various(reaching)[:most]:
        limit = max(_LEAST_SECONDS, _ENDLESS * orders * reach[name].seconds)
        finding = _run(edge, name, orders, limit)
        if finding is not None:
            how = {"by": finding.by, "scenario": name, "order": finding.order, "detail": finding.detail[:300]}
            return {key: value for key, value in how.items() if value}
    return None


def _run(edge: Edge, name: str, orders: int, limit: float) -> Finding | None:
    """Return what the ranks of a scenario showed in so many seconds.

    A rank that has found something ends, and others fail or hang for want of it. So what ranks have found counts first.
    """
    failed = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_on_sim(_without, folder, edge, name, ORDERS[:orders], size=SCENARIOS[name].ranks, timeout=limit)
        except RankFailed as error:
            failed = str(error)
        found = [Finding(*json.loads(path.read_text())) for path in Path(folder).glob("*.json")]
    if found:
        return min(found, key=lambda each: each.by == "error")
    if failed is None:
        return None
    hangs = "still running after" in failed
    by = "hang" if hangs else "crash" if "died without" in failed else "error"
    return Finding(by, "", failed.strip().splitlines()[-1])


def _various(names: Sequence[str]) -> list[str]:
    """Return the names: first those of the default tests, and of these those first that begin in different ways."""
    turns: dict[str, int] = {}
    places = {}
    for name in names:
        kind = name.split(",")[0] + name.split(",")[-1]
        places[name] = turns[kind] = turns.get(kind, 0) + 1
    return sorted(names, key=lambda name: (not SCENARIOS[name].is_quick, places[name]))


def _without(folder: str, edge: Edge, name: str, orders: Sequence[tuple[str, int]]) -> None:
    """Leave out an edge and run a scenario, until this rank finds something, which it writes to the folder."""
    leave_out(edge)
    simulated_device.races()
    for order in orders:
        if (finding := _finding(name, order)) is not None:
            Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(astuple(finding)))
            return


def _finding(name: str, order: tuple[str, int]) -> Finding | None:
    error: Exception | None = None
    try:
        run_scenario(name, order)
        torch.accelerator.synchronize()
    except Exception as raised:
        error = raised
    races = simulated_device.races()
    order_text = f"{order[0]} {order[1]}"
    if races:
        race = races[0]
        wrong = " (and a wrong value)" if isinstance(error, AssertionError) else ""
        detail = f"{race.second.operator} and {race.first.operator} on {race.memory}"
        return Finding(f"race{wrong}", order_text, detail)
    if isinstance(error, AssertionError):
        return Finding("value", order_text, str(error).strip().splitlines()[0] if str(error).strip() else "")
    if error is not None:
        return Finding("error", order_text, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return None


if __name__ == "__main__":
    sys.exit(main())
