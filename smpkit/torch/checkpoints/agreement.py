"""Agree between all ranks: rank 0 gets what each rank says, decides, and all get the same answer, or the same error.

An agreement takes four messages for each rank but the first: size and text of what it says, and of the answer. So a
save or a resume costs as many messages as there are ranks, times a number of agreements that does not depend on them.

`together` is how saving and loading fail: all ranks succeed, or all of them raise. Whatever may take longer than ranks
wait for each other calls `go_on` again and again meanwhile.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from smpkit.errors import CheckpointError, SmpkitError
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.distributed.objects import object_from
from smpkit.torch.distributed.rendezvous import name_ranks

_WHAT: Final = "an agreement on a checkpoint"
_TAG: Final = 0x5AA
"""Separates these messages from others between the same ranks."""
_T = TypeVar("_T")
_Answer = TypeVar("_Answer")
_tell_others: ContextVar[Callable[[], None]] = ContextVar("_tell_others", default=lambda: None)
"""Of the `together` that this thread is in."""


def agree(value: _T, decide: Callable[[list[_T]], _Answer], group: dist.ProcessGroup | None = None) -> _Answer:
    """Return on all ranks what `decide` makes on rank 0 of the values of all ranks; all ranks call this.

    Args:
        group: of all ranks, for a thread beside training; None: that of ordinary messages.
    """
    if state.size == 1:
        return decide([value])
    group = state.object_group if group is None else group
    with waiting(_WHAT, group):
        values = _gather(value, group)
    answer: Any = decide(values) if state.rank == 0 else None
    result: _Answer = object_from(0, answer, group, _WHAT)
    return result


def _gather(value: _T, group: dist.ProcessGroup) -> list[_T]:
    """Return the values of all ranks on rank 0, and nothing on the others."""
    if state.rank > 0:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for part in (torch.tensor([data.numel()], device="cpu"), data):
            group.send([part], 0, _TAG).wait(state.timeout)
        return []
    values = [value]
    for rank in range(1, state.size):
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        group.recv([size], rank, _TAG).wait(state.timeout)
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        group.recv([data], rank, _TAG).wait(state.timeout)
        values.append(pickle.loads(data.numpy().tobytes()))  # noqa: S301 - from a rank of this job, which runs this script
    return values


def all_or_raise(failure: str, attempt: Callable[[], _T], group: dist.ProcessGroup | None = None) -> _T:
    """Run `attempt` on all ranks; return this rank's result if all succeed. The rest is as in `together`."""
    result: list[_T] = []  # it stays on this rank, unlike what `together` passes to rank 0
    together(failure, lambda: result.append(attempt()), lambda _: None, group)
    return result[0]


def together(
    failure: str,
    attempt: Callable[[], _T],
    decide: Callable[[list[_T]], _Answer],
    group: dist.ProcessGroup | None = None,
) -> tuple[_T, _Answer]:
    """Run `attempt` on all ranks; return this rank's result, and what rank 0 decides from all of them, if all succeed.

    Otherwise raise CheckpointError on all ranks, which begins with `failure` and names the ranks that failed.
    """
    last = time.monotonic()

    def tell_others() -> None:
        nonlocal last
        if time.monotonic() - last > state.timeout.total_seconds() / 3:
            agree(None, lambda _: None, group)
            last = time.monotonic()

    def settle(ends: list[Any]) -> tuple[list[str], Any] | None:
        """Return who failed, and else what is decided; None if somebody is still at it."""
        if None in ends:
            return None
        ranks: dict[str, list[int]] = {}  # that say the same: of hundreds, one sentence
        for rank, (message, _) in enumerate(ends):
            if message is not None:
                ranks.setdefault(message, []).append(rank)
        failed = [f"{name_ranks(those)}: {message}" for message, those in ranks.items()]
        try:
            return failed, None if failed else decide([result for _, result in ends])
        except CheckpointError as error:
            return [error.message], None

    cause: Exception | None = None
    result: Any = None
    outside = _tell_others.set(tell_others)
    try:
        result = attempt()
    except Exception as error:  # of any kind: this rank must reach the agreement below, or the others wait for it
        cause = error
    finally:
        _tell_others.reset(outside)
    end = None if cause is None else message_of(cause), result
    while (answer := agree(end, settle, group)) is None:
        pass
    failed, decision = answer
    if failed:
        hint = cause.hint if isinstance(cause, SmpkitError) else None
        raise CheckpointError(f"{failure}; {'; '.join(failed)}", hint=hint) from cause
    return result, decision


def go_on() -> None:
    """Tell the ranks that wait for this one in `together` that it is still at work; elsewhere do nothing."""
    _tell_others.get()()


def message_of(error: Exception) -> str:
    """Return what the other ranks are told of an error."""
    return error.message if isinstance(error, SmpkitError) else f"{type(error).__name__}: {error}"
