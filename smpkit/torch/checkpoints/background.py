"""Save in the background: the values are copied at once, and a thread writes the copies while training goes on.

::

    save_checkpoint    copies what this rank writes to host memory, starts the thread, returns
    thread             writes, agrees with the other ranks' threads, publishes, marks as newest
    next save, resume, shutdown    wait for it, and raise its error

The threads agree in a process group of their own: in another one their messages could meet those of training in another
order on another rank. There is one save at a time, so the memory of the copies is used again by the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from smpkit.errors import CheckpointError, DeadlineError
from smpkit.torch.checkpoints.agreement import agree, message_of
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state

_T = TypeVar("_T")
_Answer = TypeVar("_Answer")


class PendingSave:
    """A save that a thread of this rank finishes; returned by `smp.save_checkpoint(..., blocking=False)`."""

    def __init__(self, tag: str, work: Callable[[], None]) -> None:
        self.tag = tag
        self._error: Exception | None = None
        self._is_reported = False
        # A daemon: after a failure of the job, the process must be able to end. Otherwise shutdown waits for it.
        self._thread = threading.Thread(target=self._run, args=(work,), name="smpkit-save", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # raised by whoever waits
            self._error = error

    def done(self) -> bool:
        """Return whether the save has ended on this rank, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is complete on all ranks.

        Args:
            timeout: in seconds; None: as long as writing takes.

        Raises:
            CheckpointError: it was not saved; it names the ranks that failed, and why.
            DeadlineError: it was not complete in time.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise DeadlineError(
                f"rank {state.rank} waited {timeout:g} s for checkpoint `{self.tag}`, which is still being written",
                hint="wait longer: the save goes on",
            )
        if self._error is not None:
            self._is_reported = True
            raise self._error

    def unreported_error(self) -> Exception | None:
        """Wait for the thread; return its error unless `wait` has raised it."""
        if self._thread.ident is not None:  # else a signal ended the script before the thread was there
            self._thread.join()
        return None if self._is_reported else self._error


_previous: PendingSave | None = None


def start(tag: str, work: Callable[[], None]) -> PendingSave:
    """Run `work` in a thread; the next save waits for it."""
    global _previous  # noqa: PLW0603
    pending = _previous = PendingSave(tag, work)
    # Only now: a signal that ends the script while the thread starts must find a save to wait for.
    pending.start()
    return pending


def finish_previous_save() -> None:
    """Wait for the save that runs in the background, if there is one; all ranks call this.

    Raises:
        CheckpointError: on all ranks, if it failed and a rank has not been told.
    """
    if _previous is not None:
        agree_after_previous_save(None, lambda _: None)


def agree_after_previous_save(value: _T, decide: Callable[[list[_T]], _Answer]) -> _Answer:
    """Do `finish_previous_save`, and agree on something else at the same time; see `agree`."""
    error = end_previous_save()
    own_reason = None if error is None else message_of(error)

    def settle(ranks: list[tuple[str | None, _T]]) -> tuple[str | None, _Answer]:
        reasons, values = zip(*ranks, strict=True)
        return next(filter(None, reasons), None), decide([*values])

    reason, answer = agree((own_reason, value), settle)
    if reason is not None:
        raise CheckpointError(f"the save in the background failed: {reason}") from error
    return answer


def end_previous_save() -> Exception | None:
    """Wait for the save that runs in the background, if there is one; return its error if nobody was told of it."""
    global _previous
    pending, _previous = _previous, None
    return None if pending is None else pending.unreported_error()


def _finish_at_end() -> Exception | None:
    """Wait for the save without the other ranks' help, when the script ends; return its error."""
    _memory.clear()
    return end_previous_save()


state.end_hooks.append(_finish_at_end)


# --- copies -----------------------------------------------------------------------------------------------------------

_memory: dict[str, torch.Tensor] = {}
"""Host memory of the save before, uint8, by what was copied to it."""


class Snapshot:
    """Copies of what is to be written, in host memory (pinned, where there is a device).

    The copies of device tensors are only queued, before the kernels of the next step; `wait` for them in the thread.
    """

    def __init__(self) -> None:
        self._device = state.device
        self._before = dict(_memory)
        self._event: torch.Event | None = None
        _memory.clear()

    def copy(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a row-major copy; `name` is the same in each save."""
        memory = self._before.pop(name, None)
        if memory is None or memory.nbytes != value.nbytes:
            memory = devices.host_memory(value.nbytes, self._device)
        _memory[name] = memory
        return memory.view(value.dtype).view(value.shape).copy_(value.detach(), non_blocking=True)

    def finish(self) -> None:
        """Note the end of the copies; the next save may use the memory again."""
        self._event = devices.record_event(self._device)
        self._before.clear()

    def wait(self) -> None:
        """Return when the copies are complete; for the thread."""
        devices.make_current(self._device)
        devices.wait_for_event(self._event)
