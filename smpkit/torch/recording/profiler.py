"""Profile chosen steps with torch's profiler where `SMPKIT_PROFILE` names them, beside the events of those steps.

Each rank leaves `profile_<rank>.json` in the folder of events. In it, `PROFILED` and the number mark each step, so that
`smpkit` can put it on the same axis of time as the events, whatever clock the profiler uses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smpkit.errors import ConfigError, Problem
from smpkit.observe.profiles import PROFILE, PROFILED, profile_name, steps_of
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting

_log = logging.getLogger("smpkit")


class Profiler:
    """Profiles the steps of a range, the last one included; without a folder none."""

    def __init__(self, folder: Path | None = None, steps: range | None = None) -> None:
        self._folder, self._steps = folder or Path(), steps or range(0)
        self._profile: Any = None
        self._mark: Any = None

    def wants(self, number: int) -> bool:
        """Tell whether a step is one of them."""
        return number in self._steps

    def begin_step(self, number: int) -> None:
        """Start the profile if the step that comes is the first of them, and mark the step if it is one of them."""
        if self.wants(number) and self._profile is None:
            self._profile = torch.profiler.profile(profile_memory=True)
            self._profile.start()
        if self._profile is not None:
            self._mark = torch.profiler.record_function(f"{PROFILED}{number}")
            self._mark.__enter__()

    def end_step(self) -> None:
        """End the mark of a step."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def after_step(self, number: int) -> None:
        """End the profile and write it, if the step was the last of them; all ranks come here."""
        if self._profile is None or number != self._steps[-1]:
            return
        # A message over gloo that began under the profiler must end before the profile does, or torch (seen in 2.13)
        # crashes. When all ranks have come, those of the step have arrived.
        with waiting("the end of the profile", state.object_group):
            dist.barrier(group=state.object_group)
        self.close()

    def close(self) -> None:
        """End the profile and write it, whatever has been profiled."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        devices.wait_for_stream(state.device)
        profile.stop()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self._folder / profile_name(state.rank)))
        except (OSError, RuntimeError) as error:
            _log.warning("the profile of rank %s cannot be written: %s", state.rank, error)


def profiler_of(environ: Mapping[str, str], folder: Path) -> Profiler:
    """Return the profiler that SMPKIT_PROFILE asks for."""
    text = environ.get(PROFILE)
    try:
        return Profiler(folder, steps_of(text)) if text else Profiler()
    except ValueError as error:
        raise ConfigError([Problem((PROFILE,), str(error))], subject="environment") from None
