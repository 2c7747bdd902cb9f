"""The summary of a run whose ranks did not come to write one: from what their status pages say."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from smpkit.observe.runs import SUMMARY, run_at
from smpkit.observe.summary import KindBytes, RankSummary, RunSummary, Split, SummaryError, write_summary
from smpkit_container.failure import Failure
from smpkit_container.outcome import Outcome
from smpkit_container.topology import Topology

__all__ = ["leave_summary"]

_NOTE = "the run failed: steps and memory are those that its ranks noted last"


def leave_summary(run: Path, name: str, outcome: Outcome, topology: Topology, failure: Failure) -> None:
    """Write the summary on the first host, unless rank 0 has."""
    if topology.node_rank or (run / SUMMARY).exists():
        return
    known = [(end.rank, end.doing) for end in outcome.ends if end.doing is not None]
    summary = RunSummary(
        name=found.name if (found := run_at(run)) else name,
        started=time.time() - outcome.seconds,
        seconds=outcome.seconds,
        steps=max(0, min((doing.step for _, doing in known), default=0)),
        exit_reason=f"failed: {failure.reason.splitlines()[0] if failure.reason else ''}",
        world_size=len(topology.hosts) * topology.processes_per_host,
        ranks=tuple(
            RankSummary(rank, topology.host, Split(), doing.held or KindBytes(), planned=doing.planned)
            for rank, doing in known
        ),
        notes=(_NOTE,),
    )
    try:
        write_summary(run, summary)
    except SummaryError as error:
        sys.stderr.write(f"warning: {error}\n")
