"""Folders of runs that never were: the events of a simulated schedule, and all that a real run writes beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from smpkit.observe import runs
from smpkit.observe.events import ActionSpan, Counter, MemorySample, RankLog, StepSpan
from smpkit.observe.summary import Gain, KindBytes, RankSummary, RunSummary, Split, write_summary
from tests.observe.logs import chain, logs_of, write_log

MIB = 1 << 20
RANKS, MICROBATCHES, STEPS = 2, 4, 8
ODD = '</script><script>document.title="taken"</script><img src=x onerror="document.title=\'taken\'">'
"""A name from a job that would be a script, if anything took it for HTML."""


def with_memory(log: RankLog, offloads: bool) -> RankLog:
    """Return a log with what the rank holds at the begin of each step and after each action."""
    events = list(log.events)
    for step in [event for event in log.events if isinstance(event, StepSpan)]:
        spans = [event for event in log.events if isinstance(event, ActionSpan) and event.step == step.number]
        live = moved = 0
        events.append(sample(step.number, step.start_ns, live, moved, offloads))
        for span in spans:
            live += 1 if span.kind == "F" else -1
            moved += span.kind == "F"
            events.append(sample(step.number, span.end_ns, live, moved, offloads))
        if offloads:
            events.append(Counter("offload stall of blocks.0, ns", 250_000, step.end_ns))
    return replace(log, events=tuple(events))


def sample(step: int, at_ns: int, live: int, moved: int, offloads: bool) -> MemorySample:
    return MemorySample(
        step=step,
        at_ns=at_ns,
        weights=8 * MIB,
        gradients=8 * MIB if live else 0,
        states=16 * MIB,
        activations=3 * MIB * live,
        parked=MIB if offloads else 0,
        offloaded=MIB * live if offloads else 0,
        other=100 * MIB,
        bytes_out=MIB * moved if offloads else 0,
        bytes_back=MIB * (moved - live) if offloads else 0,
    )


def write_events(folder: Path, *, offloads: bool = True, num_bytes: int = 1024) -> Path:
    """Write the events alone, as `SMPKIT_EVENTS_DIR` has them."""
    for log in logs_of(chain(RANKS, MICROBATCHES, num_bytes), num_steps=STEPS):
        write_log(folder, with_memory(log, offloads))
    return folder


def write_run(parent: Path, time: str, *, offloads: bool = True, failed: bool = False, name: str = "odd") -> runs.Run:
    """Write all of a run."""
    folder = parent / "runs" / f"{name}-{time}"
    write_events(folder / runs.EVENTS, offloads=offloads)
    environment = {"host": "vm", "packages": {"torch": "2.13"}, "note": ODD, "settings": settings(offloads)}
    (folder / runs.ENVIRONMENT).write_text(json.dumps(environment))
    values = [{"loss": 4 / (1 + step), ODD: step} for step in range(STEPS)]
    lines = [json.dumps({"step": step, "time": 0.0, "values": each}) for step, each in enumerate(values)]
    (folder / runs.VALUES).write_text("\n".join([*lines, '{"step": 9, "va']), encoding="utf-8")
    (folder / runs.WARNINGS).write_text(json.dumps({"rank": 1, "time": 0.0, "text": f"be careful {ODD}"}) + "\n")
    (folder / runs.LOGS).mkdir()
    (folder / runs.LOGS / "rank-0.log").write_text("all is well\n")
    (folder / runs.LOGS / "rank-1.log").write_text(f"step 1\nTraceback (most recent call last):\nValueError: {ODD}\n")
    write_summary(folder, summary("failed: rank 1: ValueError" if failed else "finished"))
    found = runs.open_run(str(folder))
    assert found.name == name
    return found


def settings(offloads: bool) -> list[tuple[str, object, str]]:
    """What `smpkit run` notes of the job: name, value and origin."""
    parameters = "distribution.smdistributed.modelparallel.parameters"
    return [
        ("entry_point", "train.py", "job.yaml:1"),
        ("hyperparameters.steps", 8, "--set hyperparameters.steps"),
        (f"{parameters}.pipeline_parallel_degree", 2, "job.yaml:10"),
        (f"{parameters}.microbatches", 4, "-p microbatches"),
        (f"{parameters}.offload_activations", offloads, "job.yaml:12"),
        (f"{parameters}.active_microbatches", 4, "default"),
    ]


def summary(exit_reason: str) -> RunSummary:
    planned = KindBytes(weights=8 * MIB, gradients=8 * MIB, states=16 * MIB, activations=9 * MIB, offloaded=4 * MIB)
    peak = replace(planned, activations=12 * MIB, other=100 * MIB)
    ranks = [
        RankSummary(rank, "vm", Split(0.01, 0.003, 0.001, 0.0005, 0.0002, 0.0003), peak, 144 * MIB, None, planned)
        for rank in range(RANKS)
    ]
    gain = Gain("offload_activations", 0, 30 * MIB, 60 * MIB, "measured", 0.004)
    rates = RunSummary(
        "odd", 1.7e9, 12.0, STEPS, exit_reason, steps_per_s=66.0, samples_per_s=660.0, tokens_per_s=6600.0
    )
    return replace(rates, world_size=RANKS, pipeline=RANKS, ranks=tuple(ranks), gains=(gain,))
