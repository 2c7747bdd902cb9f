"""The block at the end of every run: gather what the ranks measured, print it on rank 0, write it to the run's folder.

Each rank leaves its figures in the store as it ends, without waiting; rank 0 waits for them, but not long. What it got
by then it prints: a rank that ended otherwise must not keep the job from ending.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch.distributed as dist
from pydantic import TypeAdapter
from torch._C._distributed_c10d import Store

from smpkit.errors import SmpkitError
from smpkit.observe.runs import RUN_DIR, run_at
from smpkit.observe.summary import Gain, KindBytes, RankSummary, RunSummary, write_summary
from smpkit.observe.summary_text import block
from smpkit.torch import run_plan
from smpkit.torch.core import devices, status
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.init import shared_store
from smpkit.torch.distributed.rendezvous import name_ranks
from smpkit.torch.recording.recorder import QUIET, Recorder, latest_recorder
from smpkit.torch.recording.step_values import current_values

_log = logging.getLogger("smpkit")

_WAIT: Final = timedelta(seconds=10)
_NAME: Final = "TRAINING_JOB_NAME"


@dataclass(frozen=True)
class _Figures:
    """What a rank leaves for rank 0."""

    rank: RankSummary
    steps: int
    step_seconds: float | None
    samples: float
    tokens: float
    gains: tuple[Gain, ...]


_FIGURES: Final = TypeAdapter(_Figures)
_num_summaries = 0


def install() -> None:
    """Let every job of this process end with its block."""
    if _at_end not in state.end_hooks:
        state.end_hooks.append(_at_end)
        status.planner = run_plan.planned


def _at_end() -> None:
    """Tell rank 0 what was measured; there, print it. Nothing that goes wrong here may end a job that went well."""
    recorder = latest_recorder()
    if recorder is None or not recorder.meter.num_steps or recorder.has_failed:
        return
    if os.environ.get(QUIET) == "0" and not os.environ.get(RUN_DIR):
        return  # nobody would see it
    try:
        _report(recorder)
    except (SmpkitError, OSError, ValueError, RuntimeError) as error:
        _log.warning("the block at the end of the run is missing: %s", error)


def _report(recorder: Recorder) -> None:
    global _num_summaries  # noqa: PLW0603 - a script may start over, and the store stays
    _num_summaries += 1
    store = shared_store(f"summary/{_num_summaries}")
    figures = summary_of_rank(recorder)
    if state.rank:
        store.set(str(state.rank), _FIGURES.dump_json(figures).decode())
        return
    summary = _gathered(figures, store, recorder)
    run_plan.write_plan()
    if os.environ.get(QUIET) != "0":
        sys.stderr.write("\n".join(block(summary)) + "\n")
        sys.stderr.flush()
    if folder := os.environ.get(RUN_DIR):
        with contextlib.suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
        write_summary(Path(folder), summary)


# --- one rank ---------------------------------------------------------------------------------------------------------


def summary_of_rank(recorder: Recorder) -> _Figures:
    meter, device = recorder.meter, state.device
    kinds = {field.name: recorder.most.kinds.get(field.name, 0) for field in fields(KindBytes)}
    rank = RankSummary(
        rank=state.rank,
        host=socket.gethostname(),
        split=meter.split(),
        peak=KindBytes(**kinds),
        device_peak=devices.peak_bytes(device) if devices.is_asynchronous(device) else recorder.most.on_device or None,
        device_size=devices.total_bytes(device),
        planned=run_plan.planned(),
    )
    gains = tuple(_gains(recorder, rank))
    return _Figures(rank, meter.num_steps, meter.step_seconds, *meter.size(), gains)


def _gains(recorder: Recorder, rank: RankSummary) -> list[Gain]:
    """Return what features gained on this rank."""
    cfg, most, gains = state.cfg, recorder.most, []
    if cfg.offload_activations and most.with_offloaded > most.on_device:
        busy = rank.split.total - rank.split.stall
        slower = rank.split.stall / busy if busy > 0 else None
        gains.append(Gain("offload_activations", rank.rank, most.on_device, most.with_offloaded, "measured", slower))
    model = state.model
    saved = 0 if model is None or model.pipeline is None else model.pipeline.checkpointing_saves
    if saved:
        gains.append(Gain("activation checkpointing", rank.rank, most.on_device, most.on_device + saved, "simulated"))
    if cfg.shard_optimizer_state and state.dp_size > 1 and rank.peak.states:
        whole = most.on_device + rank.peak.states * (state.dp_size - 1)
        gains.append(Gain("shard_optimizer_state", rank.rank, most.on_device, whole, "planned"))
    return gains


# --- all ranks --------------------------------------------------------------------------------------------------------


def _gathered(own: _Figures, store: Store, recorder: Recorder) -> RunSummary:
    deadline = time.monotonic() + _WAIT.total_seconds()
    others = {rank: _figures_of(store, rank, deadline) for rank in range(1, state.size)}
    figures = [own, *(figure for figure in others.values() if figure is not None)]
    notes = []
    if missing := [rank for rank, figure in others.items() if figure is None]:
        notes.append(f"{name_ranks(missing)} had not ended {_WAIT.total_seconds():g} s later")
    mesh, cfg = state.mesh, state.cfg
    slowest = max((figure.step_seconds or 0.0 for figure in figures), default=0.0)
    rate = 1 / slowest if slowest else None
    flops, peak = run_plan.flops_of_step(), run_plan.peak()
    share = None if flops is None or peak is None or rate is None else flops * rate / state.size / peak[0]
    # Ranks of a tensor-parallel group have batches of their own, unless the script gives all of them the same.
    batches = state.rdp_size if cfg.prescaled_batch else state.dp_size
    return RunSummary(
        name=_job_name(),
        started=recorder.meter.started,
        seconds=time.time() - recorder.meter.started,
        steps=own.steps,
        exit_reason="finished",
        steps_per_s=rate,
        samples_per_s=(rate or 0.0) * own.samples * batches or None,
        tokens_per_s=(rate or 0.0) * own.tokens * batches or None,
        flops_share=share,
        flops_basis="" if share is None or peak is None else peak[1],
        world_size=state.size,
        pipeline=mesh.pp_size,
        tensor=mesh.tp_size,
        data=mesh.rdp_size,
        ranks=tuple(_filled(figure.rank, slowest) for figure in figures),
        gains=tuple(_largest([gain for figure in figures for gain in figure.gains])),
        values=current_values().ends(),
        notes=tuple(notes),
    )


def _job_name() -> str:
    """Return the name of the job, which the folder of a run begins with; without one that of the script."""
    folder = os.environ.get(RUN_DIR)
    run = run_at(Path(folder)) if folder else None
    return os.environ.get(_NAME) or Path(sys.argv[0]).stem or "python" if run is None else run.name


def _figures_of(store: Store, rank: int, deadline: float) -> _Figures | None:
    """Return what a rank left; None if it did not come to it in time."""
    try:
        store.wait([str(rank)], timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except (dist.DistError, RuntimeError):
        return None
    return _FIGURES.validate_json(store.get(str(rank)))


def _filled(rank: RankSummary, slowest: float) -> RankSummary:
    """Let the parts of a rank's step add up to the job's step: what it was ahead by counts as other."""
    ahead = slowest - rank.split.total if rank.split.total else 0.0
    return replace(rank, split=replace(rank.split, other=rank.split.other + max(ahead, 0.0)))


def _largest(gains: list[Gain]) -> list[Gain]:
    """Return of each feature the gain of the rank that gains most."""
    ascending = sorted(gains, key=lambda gain: gain.bytes_without - gain.bytes_with)
    return list({gain.feature: gain for gain in ascending}.values())
