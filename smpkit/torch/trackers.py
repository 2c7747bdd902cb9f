"""Trackers of experiments, such as TensorBoard, W&B and MLflow, through those of accelerate (`smpkit[track]`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smpkit.config.confidential import masked
from smpkit.errors import UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.core.warn import warn_user

__all__ = ["Trackers", "open_trackers"]

TRACK = "SMPKIT_TRACK"


class Trackers:
    """Those of a job; one that fails while the job runs is left out from then on, with a warning."""

    def __init__(self, trackers: list[Any]) -> None:
        self._trackers = trackers

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Give values to all."""
        for tracker in tuple(self._trackers):
            try:
                tracker.log(dict(values), step=step)
            except Exception as error:
                self._trackers.remove(tracker)
                warn_user(f"{tracker.name} failed, and gets no more values: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Let them write what they still hold."""
        for tracker in self._trackers:
            try:
                tracker.finish()
            except Exception as error:
                warn_user(f"{tracker.name} failed as it was closed: {type(error).__name__}: {error}")
        self._trackers = []


def open_trackers(run: Path | None) -> Trackers:
    """Start the trackers that SMPKIT_TRACK names, with the job's settings, without what is probably a secret.

    Args:
        run: the folder in which those that write files do so.

    Raises:
        UsageError: one is unknown, not installed, or does not start.
    """
    names = [name.strip() for name in os.environ.get(TRACK, "").split(",") if name.strip()]
    if not names:
        return Trackers([])
    if run is None:
        raise UsageError(f"{TRACK} is set, and SMPKIT_RUN_DIR is not", hint="name the folder of the run with it")
    try:
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    except ImportError:
        hint = "`pip install 'smpkit[track]'`, in the image too"
        raise UsageError(f"{', '.join(names)}: accelerate is not installed", hint=hint) from None
    PartialState()  # its trackers ask which rank this is
    known = [str(name) for name in LOGGER_TYPE_TO_CLASS]
    installed = [str(name) for name in get_available_trackers()]
    found = []
    for name in names:
        if name not in known:
            raise UsageError(f"`{name}` is no tracker of accelerate", hint=f"those are {', '.join(known)}")
        if name not in installed:
            raise UsageError(f"`{name}` is not installed", hint="install it beside smpkit, in the image too")
        found.append(_started(name, LOGGER_TYPE_TO_CLASS[name], run))
    return Trackers(found)


def _started(name: str, kind: Any, run: Path) -> Any:
    job = os.environ.get("TRAINING_JOB_NAME") or run.name
    folder = run / name
    try:
        tracker = _made(name, kind, job, run, folder)
        if hasattr(tracker, "start"):  # of newer versions of accelerate; older ones start at once
            tracker.start()
        tracker.store_init_configuration(_settings())
    except Exception as error:
        hint = "look at its own settings, such as WANDB_MODE=offline or MLFLOW_TRACKING_URI, or remove it from `track`"
        raise UsageError(f"{name} did not start: {type(error).__name__}: {error}", hint=hint) from error
    return tracker


def _made(name: str, kind: Any, job: str, run: Path, folder: Path) -> Any:
    """Make a tracker that writes below the run's folder, unless its own variables name another place."""
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
    given = json.loads(os.environ.get("SM_HPS") or "{}")
    found = {**state.cfg.values(), **{name: masked(name, value) for name, value in given.items()}}
    kept = {name: value for name, value in found.items() if name not in ("mp_parameters",)}
    return {name: value if isinstance(value, (str, int, float)) else str(value) for name, value in kept.items()}
