"""Save in the background: the values are copied at once, and a thread writes the copies while training goes on.

::

    save_checkpoint    copies what this rank writes to host memory, starts the thread, returns
    thread             writes, agrees with the other ranks' threads, publishes, marks as newest
    next save, resume, shutdown    wait for it, and raise its error

The threads agree through the store of the job: a collective of theirs could meet one of training in another order on
another rank. There is one save at a time, so the memory of the copies is used again by the next one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from smpkit.errors import CheckpointError, DeadlineError, SmpkitError
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed import deadline
from smpkit.torch.distributed.init import shared_store
from smpkit.torch.distributed.objects import allgather
from smpkit.torch.distributed.rendezvous import name_ranks

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Gather", "PendingSave", "Snapshot", "StoreGather", "finish_previous_save", "start"]

Gather = Callable[[Any], list[Any]]
"""Returns what each rank passed; all ranks call it."""

_POLL_SECONDS: Final = 0.02
_SERVE_SECONDS: Final = 3.0
"""How long the rank that may serve the store waits, after an error, for the others to read the last answer."""


class PendingSave:
    """A save that a thread of this rank finishes; returned by `smp.save_checkpoint(..., blocking=False)`."""

    def __init__(self, tag: str, work: Callable[[], None]) -> None:
        self.tag = tag
        self._error: Exception | None = None
        self._is_reported = False
        self._work = work
        # A daemon: after a failure of the job, the process must be able to end. Otherwise shutdown waits for it.
        self._thread = threading.Thread(target=self._run, name="smpkit-save", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
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
        self._thread.join()
        return None if self._is_reported else self._error


_previous: PendingSave | None = None


def start(tag: str, work: Callable[[], None]) -> PendingSave:
    """Run `work` in a thread; the next save waits for it."""
    global _previous  # noqa: PLW0603
    _previous = PendingSave(tag, work)
    _previous.start()
    return _previous


def finish_previous_save() -> None:
    """Wait for the save that runs in the background, if there is one; all ranks call this.

    Raises:
        CheckpointError: on all ranks, if it failed and a rank has not been told.
    """
    global _previous
    pending, _previous = _previous, None
    if pending is None:
        return
    error = pending.unreported_error()
    texts = allgather(None if error is None else _message(error))
    if text := next(filter(None, texts), None):
        raise CheckpointError(f"the save in the background failed: {text}") from error


def _finish_at_end() -> Exception | None:
    """Wait for the save without the other ranks' help, when the script ends; return its error."""
    global _previous
    pending, _previous = _previous, None
    _memory.clear()
    return None if pending is None else pending.unreported_error()


state.end_hooks.append(_finish_at_end)


def _message(error: Exception) -> str:
    return error.message if isinstance(error, SmpkitError) else f"{type(error).__name__}: {error}"


# --- agreement --------------------------------------------------------------------------------------------------------


class StoreGather:
    """Gathers values of all ranks through the job's store: numbers, strings, lists and dicts.

    Args:
        save_id: of the save, the same on all ranks.
        tag: for messages.
    """

    def __init__(self, save_id: str, tag: str) -> None:
        self._store = shared_store(f"saves/{save_id}")
        self._tag = tag
        self._round = 0

    def __call__(self, value: Any) -> list[Any]:
        """Return the value of each rank.

        Raises:
            CheckpointError: another rank failed, or did not come in time.
        """
        self._round += 1
        keys = [f"{self._round}/{rank}" for rank in range(state.size)]
        try:
            self._store.set(keys[state.rank], json.dumps(value))
            self._wait(keys)
            return [json.loads(text) for text in self._store.multi_get(keys)]
        except (dist.DistError, RuntimeError) as error:
            raise CheckpointError(f"checkpoint `{self._tag}` was not saved: the job's store is gone: {error}") from None

    def _wait(self, keys: list[str]) -> None:
        # `Store.wait` would keep the connection busy, which the rest of the process needs.
        end = time.monotonic() + state.timeout.total_seconds()
        while not self._store.check(keys):
            if deadline.failed():
                raise CheckpointError(f"checkpoint `{self._tag}` was not saved: the job failed meanwhile")
            if time.monotonic() > end:
                absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise CheckpointError(
                    f"checkpoint `{self._tag}` was not saved: rank {state.rank} waited"
                    f" {state.timeout.total_seconds():g} s for {name_ranks(absent)} to write its part",
                    hint="if it is only slow, raise `timeout_seconds` in the configuration",
                )
            time.sleep(_POLL_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Remove the keys when all ranks have read them. Never raises."""
        try:
            self._store.add("read", 1)
            if state.rank == 0:  # it may serve the store, and end after this
                # After an error a rank may be gone; else all come, however late: the checkpoint is complete.
                end = time.monotonic() + (state.timeout.total_seconds() if error is None else _SERVE_SECONDS)
                while self._store.add("read", 0) < state.size:
                    if deadline.failed() or time.monotonic() > end:
                        return  # without the keys, a rank that is only late would take the others for absent
                    time.sleep(_POLL_SECONDS)
                for number in range(1, self._round + 1):
                    for rank in range(state.size):
                        self._store.delete_key(f"{number}/{rank}")
                self._store.delete_key("read")
        except (dist.DistError, RuntimeError):
            pass


# --- copies -----------------------------------------------------------------------------------------------------------

_memory: dict[int, list[torch.Tensor]] = {}
"""Blocks of host memory by their size, from the save before."""


class Snapshot:
    """Copies of what is to be written, in host memory (pinned, where there is a device).

    The copies of device tensors are only queued, before the kernels of the next step; `wait` for them in the thread.
    """

    def __init__(self) -> None:
        self._device = state.device
        self._free = dict(_memory)
        _memory.clear()
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._event: torch.Event | None = None

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy with the same strides; tensors that share all of their memory share that of their copies."""
        plain = value.detach()
        if plain.layout is not torch.strided or type(plain) is not torch.Tensor or not plain.nbytes:
            return plain.to("cpu", copy=True)
        storage = plain.untyped_storage()
        if storage.nbytes() > plain.nbytes:  # a part of something larger, of which only this part is saved
            strides = tuple(map(int, torch.empty_like(plain, device="meta").stride()))
            return _view(self._block(plain.nbytes), plain, 0, strides).copy_(plain, non_blocking=True)
        key = storage.data_ptr()
        if key not in self._storages:
            block = self._block(storage.nbytes())
            whole = torch.empty(0, dtype=torch.uint8, device=plain.device).set_(storage)
            # The original is kept, or its memory could become another tensor's while this looks for shared memory.
            self._storages[key] = plain, block.copy_(whole, non_blocking=True)
        return _view(self._storages[key][1], plain, int(plain.storage_offset()), plain.stride())

    def copy(self, value: Any) -> Any:
        """Return a copy of a tensor, or of another value with all that is in it."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
        return deepcopy(value, {id(each): self.tensor(each) for each in tensors})

    def _block(self, size: int) -> torch.Tensor:
        free = self._free.get(size)
        block = free.pop() if free else devices.host_memory(size, self._device)
        _memory.setdefault(size, []).append(block)
        return block

    def finish(self) -> None:
        """Note the end of the copies; the next save may use the memory again."""
        self._event = devices.record_event(self._device)
        self._storages.clear()
        self._free.clear()

    def wait(self) -> None:
        """Return when the copies are complete; for the thread."""
        devices.make_current(self._device)
        devices.wait_for_event(self._event)


def _view(block: torch.Tensor, like: torch.Tensor, offset: int, strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(0, dtype=like.dtype, device="cpu").set_(block.untyped_storage(), offset, like.shape, strides)
