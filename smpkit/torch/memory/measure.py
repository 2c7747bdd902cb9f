"""What a layer's forward takes, first and again, what autograd saves of it, and how large its inputs are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from smpkit.torch.core.module_call import OriginalCall
from smpkit.torch.core.tensor_spec import tensors_in
from smpkit.torch.offload.link import Link

__all__ = ["Calls", "Probe", "input_bytes"]


@dataclass
class Calls:
    """The calls of one layer in one step."""

    saved_bytes: int = 0
    input_bytes: int = 0
    times: list[tuple[Any, Any]] = field(default_factory=list)
    """Stamps before and after each."""
    again: list[tuple[Any, Any]] = field(default_factory=list)
    """The same of recomputations."""


class _Storages:
    """Distinct storages and their sizes.

    The references are weak, so nothing stays in memory, and no other storage gets the address of one that is gone: the
    layers that are measured are recomputed, and what they save is dropped at once.
    """

    def __init__(self) -> None:
        self._references: dict[int, StorageWeakRef] = {}
        self.num_bytes = 0

    def add(self, tensor: Tensor) -> bool:
        """Add a tensor's storage; return whether it is new."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._references:
            return False
        self._references[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.num_bytes += storage.nbytes()
        return True

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._references


class Probe:
    """Measures the forwards of one step.

    What several layers save or are given, such as a mask, counts for the first of them: it is there once.

    Args:
        link: whose clock is used.
        stays: tensors that are there in any case: parameters and buffers.
    """

    def __init__(self, link: Link, stays: Iterable[Tensor]) -> None:
        self._link = link
        self._known = _Storages()
        for tensor in stays:
            self._known.add(tensor)
        self.calls: dict[str, Calls] = {}

    def around(self, name: str, original: OriginalCall) -> OriginalCall:
        """Return a layer's call that is measured when it runs first, and timed when it is recomputed."""
        return _MeasuredCall(self, name, original)

    def run(self, name: str, original: OriginalCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer's call and measure it."""
        calls = self.calls.setdefault(name, Calls())
        given, saved = _Storages(), _Storages()
        for tensor in _tensors((args, kwargs)):
            if tensor not in self._known:
                given.add(tensor)

        def note(tensor: Tensor) -> None:
            if tensor not in self._known:
                saved.add(tensor)

        begin = self._link.stamp()
        with _noting(note):
            output = original(*args, **kwargs)
        calls.times.append((begin, self._link.stamp()))
        calls.input_bytes += given.num_bytes
        calls.saved_bytes += saved.num_bytes
        for tensor in _tensors((args, kwargs)):
            self._known.add(tensor)
        return output

    def run_again(self, name: str, original: OriginalCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer's call and time it."""
        begin = self._link.stamp()
        try:
            return original(*args, **kwargs)
        finally:  # a recomputation ends with an exception, as soon as everything is saved
            self.calls[name].again.append((begin, self._link.stamp()))

    def seconds(self, name: str) -> tuple[float, float]:
        """Return what the layer's forwards took, and what their recomputations did; the device must have run them."""
        calls = self.calls[name]
        first, again = (
            sum(self._link.seconds_between(*each) or 0.0 for each in times) for times in (calls.times, calls.again)
        )
        return first, again


class _MeasuredCall:
    """Measures the first run of a call, times the second, and lets others be."""

    def __init__(self, probe: Probe, name: str, original: OriginalCall) -> None:
        self._name, self._original = name, original
        self._ways = iter((probe.run, probe.run_again))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        way = next(self._ways, None)
        if way is None:
            return self._original(*args, **kwargs)
        return way(self._name, self._original, args, kwargs)


def _noting(note: Callable[[Tensor], None]) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which `note` is called with all that autograd saves; the hooks outside it work as before."""
    outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack, unpack = outer or (_same, _same)

    # `wraps`: whether a call is checkpointed shows in the module of the innermost hook.
    @functools.wraps(pack)
    def noted(tensor: Tensor) -> Any:
        if _is_plain(tensor):
            note(tensor)
        return pack(tensor)

    return torch.autograd.graph.saved_tensors_hooks(noted, unpack)


def _same(value: Any) -> Any:
    return value


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has one storage, which is its memory."""
    return type(tensor) is Tensor and tensor.layout is torch.strided


def _tensors(value: Any) -> Sequence[Tensor]:
    return [tensor for tensor in tensors_in(value) if _is_plain(tensor)]


def input_bytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the size of the storages of a call's inputs."""
    given = _Storages()
    for tensor in _tensors((args, kwargs)):
        given.add(tensor)
    return given.num_bytes
