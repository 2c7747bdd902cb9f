"""What a script tells of its run: its values by `smp.log`, and by `smp.progress` how far it is.

Values go into the folder of the run, and to TensorBoard, W&B, MLflow and others: the trackers of accelerate
(`smpkit[track]`) that SMPKIT_TRACK names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from tqdm import tqdm

from smpkit.config.confidential import masked
from smpkit.errors import UsageError
from smpkit.observe.runs import RUN_DIR
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.core.warn import warn_user
from smpkit.torch.distributed.objects import allgather
from smpkit.torch.recording.step_values import current_values
from smpkit.torch.step import StepOutput

_TRACK: Final = "SMPKIT_TRACK"
_Batch = TypeVar("_Batch")

_COLUMNS: Final = 70
"""Of the bar through a launcher, which puts the rank before it; its terminal is not ours to ask."""
_TERMINAL_SECONDS: Final = 0.2
_LOG_SECONDS: Final = 10.0
_DELAY_SECONDS: Final = 0.05
"""So that the first step, which says how the model was divided, does not write into the bar."""


class _Log:
    """Where rank 0's values go, from its first call of `log` to the end of the job."""

    def __init__(self) -> None:
        self._trackers: list[Any] | None = None
        self._last = -1

    def take(self, values: Mapping[str, float], step: int | None) -> None:
        """Write values down, and give them to the trackers; one that fails gets no more, with a warning."""
        if self._trackers is None:
            self._trackers = _start_trackers()
            self._last = current_values().last_step()
        self._last = self._last + 1 if step is None else step
        current_values().log(values, self._last)
        for tracker in tuple(self._trackers):
            try:
                tracker.log(dict(values), step=self._last)
            except Exception as error:
                self._trackers.remove(tracker)
                warn_user(f"{tracker.name} failed, and gets no more values: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Let the trackers write what they still hold."""
        trackers, self._trackers = self._trackers or [], None
        for tracker in trackers:
            try:
                tracker.finish()
            except Exception as error:
                warn_user(f"{tracker.name} failed as it was closed: {type(error).__name__}: {error}")


_log = _Log()
state.end_hooks.append(_log.close)


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
    rank = state.rank
    if mean_over is None and rank != 0:
        return
    if step is not None and step < 0:
        raise UsageError(f"smp.log was given the step {step!r}", hint="it is a number from 0")
    if not isinstance(values, Mapping):
        raise UsageError(f"smp.log was given a {type(values).__name__}", hint='it takes names: smp.log({"loss": loss})')
    numbers = {str(name): _number(str(name), value) for name, value in values.items()}
    if mean_over is not None:
        numbers = _averaged(numbers, mean_over)
    if rank == 0:
        _log.take(numbers, step)


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


# --- trackers ---------------------------------------------------------------------------------------------------------


def _start_trackers() -> list[Any]:
    """Start the trackers that SMPKIT_TRACK names, with the job's settings, without what is probably a secret."""
    names = [name.strip() for name in os.environ.get(_TRACK, "").split(",") if name.strip()]
    if not names:
        return []
    if not (folder := os.environ.get(RUN_DIR)):
        raise UsageError(f"{_TRACK} is set, and {RUN_DIR} is not", hint="name the folder of the run with it")
    try:
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    except ImportError:
        hint = "`pip install 'smpkit[track]'`, in the image too"
        raise UsageError(f"{', '.join(names)}: accelerate is not installed", hint=hint) from None
    PartialState()  # its trackers ask which rank this is
    known = [str(name) for name in LOGGER_TYPE_TO_CLASS]
    installed = [str(name) for name in get_available_trackers()]
    for name in names:
        if name not in known:
            raise UsageError(f"`{name}` is no tracker of accelerate", hint=f"those are {', '.join(known)}")
        if name not in installed:
            raise UsageError(f"`{name}` is not installed", hint="install it beside smpkit, in the image too")
    return [_started(name, LOGGER_TYPE_TO_CLASS[name], Path(folder)) for name in names]


def _started(name: str, kind: Any, run: Path) -> Any:
    try:
        tracker = _tracker(name, kind, os.environ.get("TRAINING_JOB_NAME") or run.name, run)
        if hasattr(tracker, "start"):  # of newer versions of accelerate; older ones start at once
            tracker.start()
        tracker.store_init_configuration(_settings())
    except Exception as error:
        hint = "look at its own settings, such as WANDB_MODE=offline or MLFLOW_TRACKING_URI, or remove it from `track`"
        raise UsageError(f"{name} did not start: {type(error).__name__}: {error}", hint=hint) from error
    return tracker


def _tracker(name: str, kind: Any, job: str, run: Path) -> Any:
    """Return a tracker that writes below the run's folder, unless its own variables name another place."""
    folder = run / name
    if name == "wandb":
        folder.mkdir(parents=True, exist_ok=True)
        options = {} if "WANDB_DIR" in os.environ else {"dir": str(folder)}
        return kind(os.environ.get("WANDB_PROJECT") or "smpkit", name=job, **options)
    if name == "mlflow":
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ["MLFLOW_TRACKING_URI"] = folder.absolute().as_uri()
            # Files are what all versions read, and what needs no database beside the smallest of MLflow's packages.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        return kind("smpkit", run_name=job)
    if kind.requires_logging_directory:
        return kind(name if name == "tensorboard" else job, str(run))
    return kind(job)


def _settings() -> dict[str, Any]:
    """Return the degrees and the hyperparameters, as far as they are texts and numbers."""
    hyperparameters = json.loads(os.environ.get("SM_HPS") or "{}")
    hyperparameters.pop("mp_parameters", None)
    settings = {**state.cfg.model_dump(), **{name: masked(name, value) for name, value in hyperparameters.items()}}
    return {name: value if isinstance(value, (str, int, float)) else str(value) for name, value in settings.items()}


# --- progress ---------------------------------------------------------------------------------------------------------


def progress(batches: Iterable[_Batch], *, total: int | None = None, **options: Any) -> tqdm[_Batch]:
    """Iterate over `batches` with a bar: on rank 0, all others only iterate.

    ::

        bar = smp.progress(loader, desc="epoch 1")
        for tokens, targets in bar:
            loss = train_step(model, tokens, targets).reduce_mean()
            bar.set_postfix(loss=loss.item())

    The bar is tqdm's, so its methods and options are, too. On a terminal it stays on the bottom line, also through
    `smpkit run`; in a log it is a line every ten seconds at most, and one at the end.

    Args:
        total: how many batches there are, if `len(batches)` does not say.
        options: of `tqdm`.
    """
    launched = os.environ.get("SMPKIT_TERMINAL") == "1"
    chosen: dict[str, Any] = {
        "disable": state.initialized and state.rank != 0,
        "file": sys.stderr,
        "delay": _DELAY_SECONDS,
        "mininterval": _TERMINAL_SECONDS if launched or sys.stderr.isatty() else _LOG_SECONDS,
        **({} if sys.stderr.isatty() else {"ncols": _COLUMNS}),
        **options,
    }
    bar = tqdm(batches, total=total, **chosen)
    if "delay" not in options:
        bar.delay = 0  # only the first line waits; the last one is also written of a loop too short for others
    return bar
