"""Leave out each synchronisation of the runtime, one at a time, and see that the simulated device finds it missing.

`tests/sim/edges.py` finds them in the source, and `tests/sim/scenarios/` has what runs. First each scenario runs once
with everything in place, which tells what edges it comes to. Then an edge is left out in processes of their own, each
of which runs one of these scenarios under several orders of the device, until there is a race, a wrong value, an error
or a hang. The result is written to tests/sim_mutants.yaml; `why` there, of an edge that nothing finds, is written by
hand and stays.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from smpkit.testing import simulated_device
from tests.ranks import RankFailed
from tests.sim.edges import Edge, edges, leave_out, watch
from tests.sim.on_sim import ORDERS, run_on_sim
from tests.sim.scenarios import SCENARIOS, run_scenario

ROOT: Final = Path(__file__).resolve().parents[1]
RESULT: Final = "tests/sim_mutants.yaml"
_HEADER: Final = """\
# Each synchronisation of the runtime, and what the simulated device said when it was left out (scripts/sync_mutants).
# `found` names what showed it: a race (two uses of memory), a wrong value, an error or a hang, in which scenario and
# order. Where it is null, `why` says why nothing can show it, or what would. `tried` alone: no scenario that was tried
# showed it, or none comes to it.
"""
_LEAST_SECONDS: Final = 40.0


@dataclass(frozen=True)
class Reach:
    """What a scenario came to with everything in place, and how long that took."""

    seconds: float
    edges: frozenset[str]


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
    parser.add_argument("--reach", type=Path, help="a file: what scenarios come to, kept from one run for the next")
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
            reach = _reach(pool, every, some, arguments.reach)
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
        entry: dict[str, Any] = {"edge": edge.id, "found": found.get(edge.id, before.get("found"))}
        if not entry["found"] and (edge.id in found or "tried" in before):
            entry["tried"] = True
        if not entry["found"] and (why := before.get("why")):
            entry["why"] = why
        entries.append(entry)
    text = yaml.safe_dump(entries, width=120, sort_keys=False, allow_unicode=True)
    (ROOT / RESULT).write_text(_HEADER + text)
    return entries


def _known() -> dict[str, dict[str, Any]]:
    path = ROOT / RESULT
    return {entry["edge"]: entry for entry in yaml.safe_load(path.read_text())} if path.exists() else {}


# --- which scenarios come to an edge ----------------------------------------------------------------------------------


def _reach(
    pool: ThreadPoolExecutor, every: Sequence[Edge], names: Sequence[str], kept: Path | None
) -> dict[str, Reach]:
    found: dict[str, Reach] = {}
    if kept is not None and kept.exists():
        before = json.loads(kept.read_text())
        found = {name: Reach(seconds, frozenset(ids)) for name, (seconds, ids) in before.items()}
    missing = [name for name in names if name not in found]

    def measure(name: str) -> Reach:
        start = time.monotonic()
        ranks = run_on_sim(_watched, list(every), name, size=SCENARIOS[name].ranks, order=None, timeout=300)
        return Reach(time.monotonic() - start, frozenset().union(*ranks))

    found |= dict(zip(missing, pool.map(measure, missing), strict=True))
    if kept is not None and missing:
        kept.write_text(json.dumps({name: (each.seconds, sorted(each.edges)) for name, each in found.items()}))
    return {name: found[name] for name in names}


def _watched(every: list[Edge], name: str) -> set[str]:
    hits = watch(every)
    with simulated_device.no_races(*ORDERS[0]):
        run_scenario(name, ORDERS[0])
    return set(hits)


# --- without an edge --------------------------------------------------------------------------------------------------


def _try(edge: Edge, reach: dict[str, Reach], most: int, orders: int) -> dict[str, str] | None:
    """Return what showed that an edge is missing; None if nothing did."""
    reaching = sorted((name for name in reach if edge.id in reach[name].edges), key=lambda name: reach[name].seconds)
    for name in _various(reaching)[:most]:
        limit = max(_LEAST_SECONDS, 6 * orders * reach[name].seconds)
        how: tuple[str, str, str] | None
        try:
            size = SCENARIOS[name].ranks
            ranks = run_on_sim(_without, edge, name, ORDERS[:orders], size=size, order=None, timeout=limit)
            how = next(filter(None, ranks), None)
        except RankFailed as error:
            text = str(error)
            kind = "hang" if "still running" in text else "crash" if "died without" in text else "error"
            how = (kind, "", text.strip().splitlines()[-1])
        if how is not None:
            kind, order, detail = how
            return {"by": kind, "scenario": name, "order": order, "detail": detail[:300]}
    return None


def _various(names: Sequence[str]) -> list[str]:
    """Return the names: first those of the default tests, and of these those first that begin in different ways."""
    turns: dict[str, int] = {}
    places = {}
    for name in names:
        kind = name.split(",")[0] + name.split(",")[-1]
        places[name] = turns[kind] = turns.get(kind, 0) + 1
    return sorted(names, key=lambda name: (not SCENARIOS[name].is_quick, places[name]))


def _without(edge: Edge, name: str, orders: Sequence[tuple[str, int]]) -> tuple[str, str, str] | None:
    """Return the kind of what showed it, under which order, and what it said; runs on each rank."""
    leave_out(edge)
    simulated_device.races()
    for order in orders:
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
            return f"race{wrong}", order_text, f"{race.second.operator} and {race.first.operator} on {race.memory}"
        if isinstance(error, AssertionError):
            return "value", order_text, str(error).strip().splitlines()[0] if str(error).strip() else ""
        if error is not None:
            return "error", order_text, f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


if __name__ == "__main__":
    sys.exit(main())
