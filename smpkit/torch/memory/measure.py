"""What one step shows: what its layers take, save and are given, and what the optimizer holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakMethod, finalize

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.module_call import OriginalCall
from smpkit.torch.core.tensor_spec import tensors_in
from smpkit.torch.distributed.host_memory import container_limit
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.link import Link
from smpkit.torch.placement.dtensor import local_tensor_of
from smpkit.units import amount

_USABLE: Final = 0.95
"""The part of a device that tensors can have: driver, libraries and the allocator's fragments take the rest."""


@dataclass
class Calls:
    """The calls of one layer in one step."""

    saved_bytes: int = 0
    input_bytes: int = 0
    first: list[tuple[Any, Any]] = field(default_factory=list)
    """Stamps before and after each forward."""
    again: list[tuple[Any, Any]] = field(default_factory=list)
    """Stamps before and after each recomputation."""


class _Storages(dict[int, tuple[StorageWeakRef, int]]):
    """Distinct storages and their sizes.

    The references are weak, so nothing stays in memory, and no other storage gets the address of one that is gone: the
    layers that are measured are recomputed, and what they save is dropped at once.
    """

    def add(self, tensor: Tensor) -> None:
        # Weights stay in any case, and the memory of other kinds of tensors is not their storage.
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in self:
                self[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]

    def num_bytes_beside(self, others: Collection[int] = ()) -> int:
        return sum(num_bytes for storage, (_, num_bytes) in self.items() if storage not in others)


def _storages_of(values: Any) -> _Storages:
    storages = _Storages()
    for tensor in tensors_in(values):
        storages.add(tensor)
    return storages


def input_bytes(args: Any, kwargs: Any) -> int:
    """Return the size of the storages of a call's inputs."""
    return _storages_of((args, kwargs)).num_bytes_beside()


class Probe:
    """Measures one step, which begins with it.

    What several layers save or are given, such as a mask, counts for the first of them: it is there once. What `stays`
    is there in any case: weights and buffers. The engine's stalls are no part of the work.
    """

    def __init__(self, link: Link, stays: Iterable[Tensor], engine: ActivationEngine | None = None) -> None:
        self._link, self._engine = link, engine
        self._known = _storages_of([tensor.detach() for tensor in stays])
        self.calls: dict[str, Calls] = {}
        self.first_bytes = 0
        """The most that the first layer was given."""
        self.forward_bytes = 0
        """The most that the device held before the first recomputation; 0: not known, or the CPU."""
        self.busy_seconds = self.stall_seconds = 0.0
        devices.wait_for_stream(link.device)  # for the stalls of the step before
        self._stalled, self._began = self._stalls(), link.stamp()

    def end(self) -> None:
        """End the step, and wait until the device has done it."""
        ended = self._link.stamp()
        devices.wait_for_stream(self._link.device)
        self.stall_seconds = self._stalls() - self._stalled
        self.busy_seconds = self._seconds(self._began, ended) - self.stall_seconds

    def around(self, name: str, original: OriginalCall) -> OriginalCall:
        """Return a layer's call that is measured when it runs first, and timed when it is recomputed."""
        runs = iter((self._run_first, self._run_again))

        def measured(*args: Any, **kwargs: Any) -> Any:
            run = next(runs, None)
            return original(*args, **kwargs) if run is None else run(name, original, args, kwargs)

        return measured

    def seconds(self, name: str) -> tuple[float, float]:
        """Return what the forwards of a layer took, and their recomputations; without any they would take as long."""
        calls = self.calls[name]
        first, again = (sum(self._seconds(*pair) for pair in pairs) for pairs in (calls.first, calls.again))
        return first, again or first

    def _run_first(self, name: str, original: OriginalCall, args: Any, kwargs: Any) -> Any:
        calls = self.calls.setdefault(name, Calls())
        inputs, saved = _storages_of((args, kwargs)), _Storages()
        begin = self._link.stamp()
        with _noting(saved.add):
            output = original(*args, **kwargs)
        calls.first.append((begin, self._link.stamp()))
        calls.input_bytes += inputs.num_bytes_beside(self._known)
        calls.saved_bytes += saved.num_bytes_beside(self._known)
        self._known |= inputs
        return output

    def _run_again(self, name: str, original: OriginalCall, args: Any, kwargs: Any) -> Any:
        self.forward_bytes = self.forward_bytes or devices.peak_bytes(self._link.device) or 0
        begin = self._link.stamp()
        try:
            return original(*args, **kwargs)
        finally:  # a recomputation ends with an exception, as soon as everything is saved
            self.calls[name].again.append((begin, self._link.stamp()))

    def _seconds(self, first: Any, last: Any) -> float:
        return self._link.seconds_between(first, last) or 0.0

    def _stalls(self) -> float:
        return 0.0 if self._engine is None else self._engine.stats.stall_seconds


def _noting(note: Callable[[Tensor], None]) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which `note` is called with all that autograd saves; the hooks outside it work as before."""
    outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack, unpack = outer or (lambda value: value,) * 2

    def noted(tensor: Tensor) -> Any:
        note(tensor)
        return pack(tensor)

    return torch.autograd.graph.saved_tensors_hooks(noted, unpack)


class Updates:
    """What optimizers hold, and the most that the device held when one has updated the model.

    The script may begin the statistics of the device anew at any time between two steps.

    Args:
        tensors: returns those of the model, as they are now: `fully_shard` puts others in their place.
        any_optimizer: count every optimizer, also one of parameters that are not the model's, such as float32 masters.
    """

    def __init__(
        self, tensors: Callable[[], Iterable[Tensor]], device: torch.device, *, any_optimizer: bool = False
    ) -> None:
        self._tensors, self._device, self._any_optimizer = tensors, device, any_optimizer
        self._sizes: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """The size of each optimizer's states; those of one that the script has replaced are gone with it."""
        self.num_updates = 0
        self.peak_bytes = 0
        """0: not known, or the CPU."""
        on_step = WeakMethod(self._on_step)

        def tell(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (method := on_step()) is not None:
                method(optimizer)

        # torch holds the hook: a model that the script drops before the choice must go all the same.
        self.handle = register_optimizer_step_post_hook(tell)
        finalize(self, self.handle.remove)

    @property
    def state_bytes(self) -> int:
        """The size of the states of all optimizers that have made a step, and of the masters that they update."""
        return sum(self._sizes.values())

    def _on_step(self, optimizer: torch.optim.Optimizer) -> None:
        own = set(map(id, self._tensors()))
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        masters = [parameter for parameter in updated if id(parameter) not in own]
        if not self._any_optimizer:
            if len(masters) == len(updated):
                return  # of another model
            masters = []
        self.num_updates += 1
        self.peak_bytes = max(self.peak_bytes, devices.peak_bytes(self._device) or 0)
        counted = {*own, *map(id, masters)}
        states = [values for parameter, values in optimizer.state.items() if id(parameter) in counted]
        tensors = [value for values in states for value in values.values() if isinstance(value, Tensor)]
        self._sizes[optimizer] = sum(map(num_bytes_of, (*tensors, *masters)))


def num_bytes_of(tensor: Tensor) -> int:
    """Return what a tensor, or this rank's part of it, takes."""
    local: Tensor = local_tensor_of(tensor)
    return local.numel() * local.element_size()


def device_limit(name: str, device: torch.device, limit_gib: float | None, num_sharers: int | None = None) -> int:
    """Return how many bytes a process may hold on a device.

    Args:
        name: of the setting.
        limit_gib: its value; None: the device, less what tensors cannot have.
        num_sharers: how many processes share a CPU, of which each may fill its part; None: `limit_gib` must tell.
    """
    total = devices.total_bytes(device)
    if limit_gib is not None:
        if total is not None and limit_gib * 2**30 > total:
            raise UsageError(f"{name} is {limit_gib:g}, and {device} has {amount(total)}", hint="give at most that")
        return int(limit_gib * 2**30)
    if total is not None:
        return int(_USABLE * total)
    if num_sharers is None:
        raise UsageError(f"{device} does not tell how much memory it has", hint=f"give `{name}`")
    of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(of_machine, container_limit() or of_machine) // num_sharers
