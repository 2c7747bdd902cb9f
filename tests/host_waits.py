"""Count where a step would make the host wait for a GPU, on a machine that has none.

The engine is told that the CPU is a device that computes on its own (`devices` answers so), so it does what it does on
a GPU: it copies through pinned memory, records events, sends when they have happened. What lies on the host is known
by how it was made, since the engine says `device="cpu"` there: see scripts/check_devices.py. All other tensors count as
the device's. Then each read of a value, each copy between the two and each wait can be counted; that is what
`torch.cuda.set_sync_debug_mode` finds on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import smpkit.torch
from smpkit.torch.core import devices
from smpkit.torch.pipeline.transport import HostBuffers

__all__ = ["HostWaits", "counted_waits", "pretended_device"]

_PRODUCT: Final = Path(smpkit.torch.__file__).parent
_TESTS: Final = Path(__file__).parent
_FACTORIES: Final = ("arange", "empty", "empty_strided", "full", "ones", "rand", "randn", "tensor", "zeros")
_ALWAYS_HOST: Final = ("frombuffer", "from_numpy")
_WAITS: Final = ("wait_for_stream", "wait_for_event")


class _Event:
    """An event of a device that is as far behind as it may be: it happens when somebody waits for it."""

    def __init__(self) -> None:
        self._happened = False

    def query(self) -> bool:
        return self._happened

    def synchronize(self) -> None:
        self._happened = True


@contextlib.contextmanager
def pretended_device() -> Iterator[None]:
    """Let the engine take the CPU for a device that computes on its own."""
    answers: dict[str, Callable[..., Any]] = {
        "is_asynchronous": lambda device: True,
        "has_streams": lambda device: False,  # the link is the emulated one, and its memory the CPU's
        "current_stream": lambda device: None,
        "record_event": lambda device, **_: _Event(),
        "default_generator": lambda device: torch.Generator(),
        "host_memory": lambda num_bytes, device: torch.empty(num_bytes, dtype=torch.uint8, device="cpu"),
        "to_device": lambda tensor, device: tensor.to(device, non_blocking=True),
        "wait_for_stream": lambda device: None,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(devices, name, answer))
        yield


class HostWaits:
    """What made the host wait, and what did not."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        """By kind ("read", "copy to the host", "copy to the device", "wait"), and the product's module that does it."""
        self.queued: Counter[str] = Counter()
        """Copies that the host does not wait for, in the same way."""
        self._host: dict[int, Tensor] = {}
        """A tensor of each storage on the host, which stays alive so that no other has its number."""

    def clear(self) -> None:
        """Begin to count anew."""
        self.waits.clear()
        self.queued.clear()

    def note(self, kind: str, *, waits: bool = True) -> None:
        """Count something that happens now."""
        (self.waits if waits else self.queued)[f"{kind} @ {_place()}"] += 1

    def is_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies on the host."""
        return tensor.untyped_storage()._cdata in self._host

    def mark(self, tensor: Tensor) -> Tensor:
        """Note that a tensor lies on the host."""
        self._host[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def unmark(self, tensor: Tensor) -> Tensor:
        """Note that a tensor lies on the device."""
        self._host.pop(tensor.untyped_storage()._cdata, None)
        return tensor

    def copied(self, target_on_host: bool, *, waits: bool) -> None:
        """Count a copy between host and device."""
        self.note("copy to the host" if target_on_host else "copy to the device", waits=waits)


class _Follow(TorchDispatchMode):
    """Sees which tensors are the host's, what is read, and what is copied in place."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, waits = kwargs or {}, self._waits
        name = func.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if _is_plain(each)]
        on_host = [waits.is_host(each) for each in tensors]
        if name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero") and not all(on_host):
            waits.note("read")
        if name == "copy_" and len(set(on_host)) > 1:
            asked = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            waits.copied(on_host[0], waits=not asked)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if tensors and all(on_host):
            for each in tree_leaves(result):
                if _is_plain(each):
                    waits.mark(each)
        return result


@contextlib.contextmanager
def counted_waits() -> Iterator[HostWaits]:
    """Count what this thread, and those of microbatches, do; inside `pretended_device`."""
    waits = HostWaits()
    plain_to, plain_tolist, take = Tensor.to, Tensor.tolist, HostBuffers.take

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asked = [each for each in (*args, kwargs.get("device")) if isinstance(each, torch.device | str)]
        if not asked or not _is_plain(self) or waits.is_host(self) == (asked[0] == "cpu"):
            return plain_to(self, *args, **kwargs)
        waits.copied(asked[0] == "cpu", waits=not kwargs.get("non_blocking"))
        with _aside():
            return (waits.mark if asked[0] == "cpu" else waits.unmark)(plain_to(self, *args, **kwargs).clone())

    def tolist(self: Tensor) -> Any:
        if not _is_plain(self):
            return plain_tolist(self)
        if not waits.is_host(self):
            waits.note("read")
        with _aside():
            return plain_tolist(self)

    def made(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        tensor = function(*args, **kwargs)
        is_host = kwargs.get("device") == "cpu" or function.__name__ in _ALWAYS_HOST
        if function.__name__ == "tensor" and isinstance(kwargs.get("device"), torch.device):
            waits.copied(target_on_host=False, waits=True)  # made on the host
        return (waits.mark if is_host else waits.unmark)(tensor) if _is_plain(tensor) else tensor

    def waited(function: Callable[..., object], *args: Any) -> object:
        if not any(isinstance(each, _Event) and each.query() for each in args):
            waits.note("wait")
        return function(*args)

    with contextlib.ExitStack() as stack:
        for owner, name, changed in (
            (Tensor, "to", to),
            (Tensor, "cpu", lambda self: to(self, "cpu")),
            (Tensor, "tolist", tolist),
            (HostBuffers, "take", lambda self, spec: waits.unmark(take(self, spec))),  # as if it had come on a channel
            (torch.cuda, "synchronize", functools.partial(waited, lambda *_: None)),
            (torch.accelerator, "synchronize", functools.partial(waited, lambda *_: None)),
        ):
            stack.enter_context(mock.patch.object(owner, name, changed))
        for name in (*_FACTORIES, *_ALWAYS_HOST):
            stack.enter_context(mock.patch.object(torch, name, functools.partial(made, getattr(torch, name))))
        for name in _WAITS:
            stack.enter_context(mock.patch.object(devices, name, functools.partial(waited, getattr(devices, name))))
        stack.enter_context(_Follow(waits))
        yield waits


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and not value.is_meta and value.layout is torch.strided


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Count nothing of what is done to count."""
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        yield


def _place() -> str:
    """Return the product's module that does what happens now, or "the test"."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(_PRODUCT) and path.name != "devices.py":
            return path.stem
        if path.is_relative_to(_TESTS) and path != Path(__file__):
            break
    return "the test"
