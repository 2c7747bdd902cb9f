"""`smp.log`: values of a script go into the folder of the run, and to TensorBoard, W&B, MLflow and others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from smpkit.errors import UsageError
from smpkit.observe.runs import RUN_DIR
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.objects import allgather
from smpkit.torch.recording import step_values
from smpkit.torch.step import StepOutput
from smpkit.torch.trackers import Trackers, open_trackers

__all__ = ["log"]


class _Log:
    """Where rank 0's values go while the job lasts."""

    def __init__(self) -> None:
        folder = os.environ.get(RUN_DIR)
        self._last = step_values.last_step()
        self._trackers: Trackers = open_trackers(None if not folder else Path(folder))

    def take(self, values: Mapping[str, float], step: int | None) -> None:
        self._last = self._last + 1 if step is None else step
        step_values.log(values, self._last)
        self._trackers.log(values, self._last)

    def close(self) -> None:
        self._trackers.close()


_open: _Log | None = None


def log(values: Mapping[str, Any], step: int | None = None, *, mean_over: CommGroup | None = None) -> None:
    """Record values such as the loss; any rank may call it, and rank 0's values count.

    They go as lines into `values.jsonl` in the folder SMPKIT_RUN_DIR, which `smpkit run` and managed jobs set, and to
    the trackers that the job file names (`track: [tensorboard]`). Without either, nothing is written.

    The mean of a scalar that a step returns is recorded without this call, if the script takes it by `reduce_mean()`:
    as `loss`, or by the name of its key or step function. A name that is given here is not recorded so again.

    A step's output counts as its mean over microbatches, which is the same on all ranks of a pipeline. Replicas have
    losses of their own, and so has rank 0: `mean_over=smp.DP_GROUP` averages over them. All ranks of the group must
    then call this, as with `smp.allgather`; without it no rank waits for another. On a GPU, rank 0 waits for the
    values to be computed.

    ::

        loss = train_step(model, tokens, targets)
        optimizer.step()
        smp.log({"loss": loss, "lr": scheduler.get_last_lr()[0]}, step, mean_over=smp.DP_GROUP)

    Args:
        values: name -> number, tensor of one element, or output of a step with one element for each microbatch.
        step: from 0, as the script counts. Default: one more than in the call before, also if that was before a
            restart in the same folder; so log what belongs to a step in one call.
        mean_over: average over the ranks of this group.

    Raises:
        UsageError: on ranks that look at the values, if one is no number, `step` is none, or ranks of the group have
            values of other names; on rank 0, if a tracker that the job file names cannot be started.
    """
    global _open  # noqa: PLW0603
    rank = state.rank
    if mean_over is None and rank != 0:
        return
    if step is not None and step < 0:
        raise UsageError(f"smp.log was given the step {step!r}", hint="it is a number from 0")
    numbers = _numbers(values)
    if mean_over is not None:
        numbers = _averaged(numbers, mean_over)
    if rank != 0:
        return
    if _open is None:
        _open = _Log()
    _open.take(numbers, step)


def _close() -> None:
    global _open
    closing, _open = _open, None
    if closing is not None:
        closing.close()


state.end_hooks.append(_close)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise UsageError(f"smp.log was given a {type(values).__name__}", hint='it takes names: smp.log({"loss": loss})')
    return {str(name): _number(str(name), value) for name, value in values.items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, StepOutput):
        value = StepOutput(value.outputs).reduce_mean()  # under the script's own name alone
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach().item())
    if isinstance(value, (int, float)):
        return float(value)
    if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
        return float(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    raise UsageError(
        f"smp.log cannot take `{name}`: it is a {type(value).__name__}{shape}",
        hint="log numbers, or tensors of one element, such as `.mean()`",
    )


def _averaged(numbers: dict[str, float], group: CommGroup) -> dict[str, float]:
    parts: list[dict[str, float]] = allgather(numbers, group)
    for rank, part in enumerate(parts):
        if part.keys() != parts[0].keys():
            message = f"smp.log: the first rank of the group has {sorted(parts[0])}, number {rank} has {sorted(part)}"
            raise UsageError(message, hint="log the same names on all ranks of the group")
    return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
