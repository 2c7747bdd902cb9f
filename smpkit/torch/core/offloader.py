"""Where the inputs of checkpointed calls wait for backward: on the device, or with the engine that is installed.

A checkpointed call *parks* its inputs when its forward begins, and takes them when backward runs it again. Without an
engine that offloads (`smpkit/torch/offload`), they stay where they are. Callers import this file, and not the engine,
which lies above it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from smpkit.errors import UsageError
from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.core.tensor_spec import version_of

_log = logging.getLogger("smpkit")


class Parked:
    """Tensors of one call, from its forward until its graph is gone. These stay on the device."""

    def __init__(self, keeper: Offloader, name: str, tensors: Iterable[Tensor]) -> None:
        self._keeper, self._name = keeper, name
        self._tensors = [(tensor, version_of(tensor)) for tensor in tensors]

    def add(self, tensor: Tensor, *, must_leave: str | None) -> None:
        """Park one more: an output of an operator, which `take` returns after the inputs.

        Args:
            tensor: an alias of the caller's own, whose memory may be taken from it.
            must_leave: the operator's name, if it is an error that the tensor stays on the device.
        """
        self._keeper.say_it_stays(f"`{self._name}`", must_leave, self._keeper.why_not)
        self._tensors.append((tensor, version_of(tensor)))

    def take(self) -> list[Tensor]:
        """Return the tensors on the device, ready for the current stream; raise if one was changed in place."""
        if any(version_of(tensor) != version for tensor, version in self._tensors):
            raise changed_in_place(f"`{self._name}`")
        # Without their graph, or a hook that the forward adds to an input would run twice in this backward. A subclass
        # stays as it is: without `__torch_function__`, as in a backward, `detach` may return another class.
        return [
            tensor.detach().requires_grad_() if tensor.requires_grad and type(tensor) is Tensor else tensor
            for tensor, _ in self._tensors
        ]


@dataclass(frozen=True)
class OffloadUse:
    """What an engine holds, and has moved since the step began, in bytes."""

    parked: int = 0
    """On the device."""
    offloaded: int = 0
    """On the host."""
    mapped: int = 0
    """Taken from the host, in use or not."""
    bytes_out: int = 0
    bytes_back: int = 0


class Offloader:
    """Keeps what is parked where it is; engines that offload derive from it."""

    why_not = "nothing offloads here"
    """Why outputs stay that are parked with `Parked` itself."""
    hint = "call smpkit.offload_activations(model), or set `offload_activations: true`"
    begin_action: Callable[[Kind, int, int], None] | None = None
    """Takes the kind, segment and microbatch of each action that begins; None where nobody needs them."""
    _warned: frozenset[str] = frozenset()

    def park(self, name: str, tensors: Iterable[Tensor]) -> Parked:
        """Take over the inputs of a call; reports and errors name it by the path of its module."""
        return Parked(self, name, tensors)

    def say_it_stays(self, label: str, must_leave: str | None, why: str) -> None:
        """Report that an output which a policy offloads stays on the device: raise if it must leave, else warn once."""
        if must_leave:
            raise UsageError(
                f"a policy names MUST_CPU_OFFLOAD for {must_leave} in {label}, whose output cannot leave: {why}",
                hint=self.hint,
            )
        self._warn_once(
            "outputs", f"outputs that a policy offloads stay on the device, in {label} and elsewhere: {why}"
        )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned |= {kind}
            _log.warning("%s", text)

    def trial(self, inputs: Sequence[Tensor]) -> AbstractContextManager[object] | None:  # noqa: ARG002
        """Return a context to run a checkpointed call in, if only its costs are wanted; None: the call trains."""
        return None

    def follow(self, actions: Sequence[Action]) -> None:
        """Take the order of this rank's actions in the step that begins."""

    def footprint(self) -> int:
        """Return the host memory, in bytes, that live graphs need: after a first forward, that of a microbatch."""
        return 0

    def reserve(self, num_bytes: int) -> None:
        """Reserve host memory before a step begins.

        Pinning it may wait for the device: in the middle of a step, two ranks that send to each other could deadlock.
        """

    def use(self) -> OffloadUse:
        """Count what is held and was moved."""
        return OffloadUse()


def changed_in_place(name: str) -> UsageError:
    """Return the error for a tensor that backward needs as it was."""
    return UsageError(
        f"a tensor that {name} saved for backward was changed in place afterwards",
        hint="write `x = x + y` instead of `x += y`, or clone the tensor first",
    )


KEEPING: Final = Offloader()
_current: Offloader = KEEPING
"""One per process, like the model; suspended microbatches see it from their own threads."""


class _Forwards(threading.local):
    """What the models whose forwards run in this thread park with, the outermost first."""

    def __init__(self) -> None:
        self.offloaders: list[Offloader] = []


_forwards: Final = _Forwards()


def current() -> Offloader:
    """Return what inputs are parked with."""
    return _forwards.offloaders[-1] if _forwards.offloaders else _current


def begin_forward(offloader: Offloader) -> None:
    """Park inputs with `offloader` in this thread: other threads may train other models."""
    _forwards.offloaders.append(offloader)


def end_forward(offloader: Offloader) -> None:
    """Park inputs with what was there before the forward of this offloader's model, if that has begun."""
    # Also before one that was interrupted: torch calls no hook at the end of that.
    if offloader in _forwards.offloaders:
        del _forwards.offloaders[_forwards.offloaders.index(offloader) :]


def install(offloader: Offloader) -> Offloader:
    """Park inputs with `offloader` from now on; return the one before it."""
    global _current
    previous, _current = _current, offloader
    return previous
