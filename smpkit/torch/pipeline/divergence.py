"""Find out why ranks wait for each other if they run different programs: long before the deadline, and by the call.

A rank that has waited for two seconds, or a quarter of its deadline if that is sooner, writes down, in the store that
the ranks met at, which calls its microbatches have made, and reads what the other waiting ranks wrote. Two ranks whose
calls differ will never finish: a branch on the rank, on a random number of Python's or on data of its own led them
apart. While nobody waits that long, this only sleeps.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from itertools import combinations, zip_longest
from typing import Final

import torch.distributed as dist

from smpkit.errors import UsageError
from smpkit.torch import deadline
from smpkit.torch.board import Board
from smpkit.torch.pipeline.stage import Stage
from smpkit.torch.state import state

__all__ = ["Ways", "disagreement", "watch", "ways_of"]

_PATIENCE_SECONDS: Final = 2.0
_NOTHING: Final = "nothing more"

Ways = Mapping[int, Sequence[str]]
"""The calls that each microbatch has made so far, in order."""


def disagreement(ways: Mapping[int, Ways], *, ended: bool = False) -> UsageError | None:
    """Return the error that names the first call in which ranks differ; None if, so far, they agree.

    Args:
        ways: by pp_rank.
        ended: no rank will make further calls, so that one must not have made more than another.
    """
    for first, second in combinations(sorted(ways), 2):
        for microbatch in sorted(ways[first].keys() & ways[second].keys()):
            both = ways[first][microbatch], ways[second][microbatch]
            calls = zip_longest(*both, fillvalue=_NOTHING) if ended else zip(*both, strict=False)
            for number, (theirs, ours) in enumerate(calls, 1):
                if theirs != ours:
                    return UsageError(
                        f"pipeline rank {second} took another way through microbatch {microbatch} than pipeline rank"
                        f" {first}: its call {number} was `{ours}`, not `{theirs}`",
                        hint="a step runs on every pipeline rank and must not branch on the rank, on data of its own or"
                        " on random numbers of its own: draw them with torch, or seed Python's and numpy's alike",
                    )
    return None


def ways_of(stage: Stage) -> Ways:
    """Return the calls of this rank's microbatches in the step that runs."""
    return {microbatch.index: microbatch.path for microbatch in stage.microbatches}


def watch(stage: Stage, ranks: Sequence[int]) -> None:
    """Look after the waits of `stage` from a thread of its own, until it is gone or `smp.shutdown()` is called.

    Args:
        ranks: the global ranks of the pipeline.
    """
    over = threading.Event()
    state.forgetters.append(over.set)
    arguments = weakref.ref(stage), list(ranks), over
    threading.Thread(target=_watch, args=arguments, name="smpkit-watch", daemon=True).start()


def _watch(reference: weakref.ref[Stage], ranks: list[int], over: threading.Event) -> None:
    while _look(reference(), ranks) and not over.wait(_patience() / 2):
        pass


def _patience() -> float:
    """Return the seconds of a wait after which this rank tells its way: early enough for others to read it in time."""
    board = deadline.board()
    return _PATIENCE_SECONDS if board is None else min(_PATIENCE_SECONDS, board.timeout.total_seconds() / 4)


def _look(stage: Stage | None, ranks: list[int]) -> bool:
    """Look after the present wait; return whether to go on."""
    if stage is None:
        return False
    since, board = stage.transport.waiting_since, deadline.board()
    if since is None or board is None or time.monotonic() - since < _patience():
        return True
    try:
        error = _compare(stage, ranks, board)
    except (dist.DistError, RuntimeError):  # the store is gone, or going: whoever waits will notice
        return True
    if error is None or stage.transport.waiting_since != since:
        return True
    stage.transport.verdict = error
    deadline.condemn(error)
    return False


def _compare(stage: Stage, ranks: list[int], board: Board) -> UsageError | None:
    """Tell the waiting ranks which way this one went, and compare with what they have told."""
    text = json.dumps([stage.num_steps, list(ways_of(stage).items())])
    board.write(f"way/{board.rank}", base64.b85encode(zlib.compress(text.encode())).decode())
    ways = {}
    for pp_rank, rank in enumerate(ranks):
        told = board.read(f"way/{rank}")
        if told is not None:
            num_steps, items = json.loads(zlib.decompress(base64.b85decode(told)))
            if num_steps == stage.num_steps:
                ways[pp_rank] = dict(items)
    return disagreement(ways)
