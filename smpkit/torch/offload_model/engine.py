"""What all forwards of one OffloadModel share: slices on the host, buffers on the device, copy streams.

`forward_pass.Run` drives a `SliceEngine` through one forward and backward. An optimizer can attach itself as the
`GradientConsumer`. Modules inside the model wait for its updates before their state dict is read or loaded
(`synchronize_on_state_dict`).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.offload.arena import arena_for
from smpkit.torch.offload.link import Link, link_for
from smpkit.torch.offload_model.activation_offload import TensorOffloader
from smpkit.torch.offload_model.chain import ModelShard
from smpkit.torch.offload_model.counted_link import DEADLINE_SECONDS, HostBuffers, Traffic, Transfers
from smpkit.torch.offload_model.gradients import BufferedGradients, GradientCopy, InPlaceGradients
from smpkit.torch.offload_model.weights import DeviceWeights, SliceWeights

__all__ = ["GradientConsumer", "Modes", "Slice", "SliceEngine", "synchronize_on_state_dict"]

Modes = tuple[bool, ...]
"""Which modules of a slice are in training mode."""


class Slice:
    """One slice: its layers and its weights."""

    def __init__(self, shard: ModelShard, weights: SliceWeights, device: torch.device) -> None:
        self.shard = shard
        self.weights = weights
        for module in shard.modules():  # buffers stay on the device: they are small, and forward changes them
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self.overwrites_input: dict[Modes, bool] = {}
        """Whether it changes its input in place, by modes (dropout may, in training only); known once it has run so."""
        self._modules = list(shard.modules())

    @property
    def modes(self) -> Modes:
        """Which modules are in training mode now."""
        return tuple([module.training for module in self._modules])


class GradientConsumer(Protocol):
    """Takes the gradients instead of the parameters' `.grad`; `OffloadOptimizer` is one."""

    def consume(self, gradient_copy: GradientCopy) -> None:
        """Take the gradients of one slice; called during backward, last slice first."""

    def wait_for_update(self, index: int) -> None:
        """Block until the weights of a slice may be copied to the device."""

    def synchronize(self) -> None:
        """Block until all parameters are up to date."""

    def zero_grad(self) -> None:
        """Drop gradients that no step has used."""

    def invalidate(self) -> None:
        """Assume that the values of parameters may have changed."""


class SliceEngine:
    """The slices of one model and the buffers and streams that move them.

    Args:
        shards: the slices, in order.
        unpack_tuple: see `SlicedModel`.
        device: where they run.
        dtype: what weights are computed in; None keeps theirs.
        prefetch: load the next slice while one computes.
        checkpoint: keep only the inputs of slices, and run each again in backward.
        num_microbatches: how many pieces of the batch pass through a slice per load.
        links: one for weights and gradients, one for slice boundaries. None makes them, and copies nothing if the
            device is the CPU.
        host_budget_bytes: for slice boundaries; what does not fit stays on the device.
    """

    def __init__(
        self,
        shards: Sequence[ModelShard],
        *,
        unpack_tuple: bool,
        device: torch.device,
        dtype: torch.dtype | None,
        prefetch: bool,
        checkpoint: bool,
        num_microbatches: int,
        links: tuple[Link, Link] | None = None,
        host_budget_bytes: int | None = None,
    ) -> None:
        self.device = device
        self.unpack_tuple = unpack_tuple
        self.checkpoint = checkpoint
        self.num_microbatches = num_microbatches
        self._consumer: Callable[[], GradientConsumer | None] = lambda: None
        self.averaged_by: str | None = None
        self.traffic = Traffic()
        self.links = links
        self._in_use = threading.RLock()
        """Never waited for: who finds it taken is told so."""
        self._user = ""
        bulk, boundary_link = links or (link_for(device, DEADLINE_SECONDS), link_for(device, DEADLINE_SECONDS))
        self.weight_link = bulk
        in_place = links is None and is_the_host(device)
        transfers = Transfers(bulk, self.traffic)
        memory = HostBuffers(bulk)
        weights: list[SliceWeights] = []
        owned_before = set[int]()
        for shard in shards:  # a parameter that several slices use belongs to the first
            owned = {id(parameter) for parameter in shard.parameters()} - owned_before
            weights.append(SliceWeights(shard, owned, dtype, memory))
            owned_before |= owned
        self.slices = [Slice(shard, each, device) for shard, each in zip(shards, weights, strict=True)]
        self.parameters = list(dict.fromkeys(p for each in weights for p in each.layout.parameters))
        self.device_weights = DeviceWeights(weights, device, transfers, prefetch=prefetch, in_place=in_place)
        self.gradients: BufferedGradients | InPlaceGradients
        if in_place:
            self.gradients = InPlaceGradients(weights)
        else:
            self.gradients = BufferedGradients(weights, device, transfers, memory)
        arena = None if in_place else arena_for(boundary_link, host_budget_bytes)
        self.offloader = TensorOffloader(device, Transfers(boundary_link, self.traffic), arena)
        # A weak reference: the model's memory must be freed with the last reference, not by the garbage collector.
        device_weights = weakref.ref(self.device_weights)
        for shard in shards:
            shard.attach(lambda index: _load(device_weights(), index))

    @property
    def consumer(self) -> GradientConsumer | None:
        """What takes the gradients; None: the parameters' `.grad`."""
        return self._consumer()

    def attach(self, consumer: GradientConsumer) -> None:
        """Give gradients to `consumer` from now on; holds it weakly. No other one may be updating weights.

        Raises:
            UsageError: gradients are averaged over processes.
        """
        self._consumer = weakref.ref(consumer)
        self._check_averages()
        this = weakref.ref(self)  # the engine holds `device_weights`: a strong reference back would make a cycle
        self.device_weights.wait_before_loads(lambda index: _wait_for_update(this(), index))

    def synchronize(self) -> None:
        """Block until all parameters on the host are up to date and no copy reads them: they may be written."""
        self.device_weights.wait_for_loads()
        if (consumer := self.consumer) is not None:
            consumer.synchronize()

    def note_averaging(self, who: str) -> None:
        """Note who averages gradients over processes.

        Raises:
            UsageError: a consumer takes the gradients, and `who` looks for them at the parameters.
        """
        self.averaged_by = who
        self._check_averages()

    def _check_averages(self) -> None:
        if self.averaged_by is not None and self.consumer is not None:
            raise UsageError(
                f"{self.averaged_by} averages the gradients of parameters over processes, and an OffloadOptimizer"
                " takes them before they are there",
                hint="use an optimizer of torch.optim over model.parameters()",
            )

    def invalidate(self) -> None:
        """Assume that parameters may have changed: writes to `.data` do not change their version."""
        self.synchronize()
        for piece in self.slices:
            piece.weights.invalidate()
        if (consumer := self.consumer) is not None:
            consumer.invalidate()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Use the engine inside.

        Raises:
            UsageError: another thread does so at present; both would load slices into the same buffers.
        """
        if not self._in_use.acquire(blocking=False):
            raise UsageError(
                f"an OffloadModel is used by two threads at once: `{threading.current_thread().name}` called it while"
                f" `{self._user}` was in its forward or backward",
                hint="call it from one thread at a time, or give each thread a model of its own (copy.deepcopy)",
            )
        self._user = threading.current_thread().name
        try:
            yield
        finally:
            self._in_use.release()

    @contextlib.contextmanager
    def on_device(self, index: int, *, fresh: bool, next_index: int | None) -> Iterator[list[nn.Parameter]]:
        """Replace the parameters of a slice's modules by those on the device inside; yield these."""
        device_parameters = self.device_weights.acquire(index, fresh=fresh, next_index=next_index)
        with self.slices[index].weights.replaced_by(device_parameters):
            yield device_parameters

    def call(self, index: int, value: Any) -> Any:
        """Run a slice with what the previous one returned; the first gets (args, kwargs)."""
        shard = self.slices[index].shard
        if index == 0:
            args, kwargs = value
            return shard(*args, **kwargs)
        return shard(*value) if self.unpack_tuple and isinstance(value, tuple) else shard(value)


def is_the_host(device: torch.device) -> bool:
    """Return whether the device computes with the host's memory, so that nothing must be copied."""
    return device.type == "cpu"


def _load(device_weights: DeviceWeights | None, index: int) -> None:
    if device_weights is not None:
        device_weights.load(index, fresh=True)


def _wait_for_update(engine: SliceEngine | None, index: int) -> None:
    if engine is not None and (consumer := engine.consumer) is not None:
        consumer.wait_for_update(index)


def synchronize_on_state_dict(modules: Iterable[nn.Module], engine: SliceEngine) -> None:
    """Wait for updates before the state dict of any of these modules is read or loaded, while `engine` lives.

    Loading with `assign=True` is refused: it would put other parameters in the place of those that train.
    """
    handles: list[Any] = []
    for module in modules:
        handles.append(module.register_state_dict_pre_hook(_SynchronizeHook(engine)))  # type: ignore[no-untyped-call]
        handles.append(module.register_load_state_dict_pre_hook(_SynchronizeHook(engine)))  # type: ignore[no-untyped-call]
    weakref.finalize(engine, lambda: [handle.remove() for handle in handles])


class _SynchronizeHook:
    """Called before a state dict is read (prefix, keep_vars) or loaded (state, prefix, metadata, ...)."""

    def __init__(self, engine: SliceEngine | None = None) -> None:
        self._engine = (lambda: None) if engine is None else weakref.ref(engine)

    def __reduce__(self) -> tuple[type[_SynchronizeHook], tuple[()]]:
        """Return a hook without an engine: a copy of the module is independent of it."""
        return _SynchronizeHook, ()

    def __call__(self, module: nn.Module, *details: Any) -> None:
        engine = self._engine()
        if engine is None:
            return
        if len(details) > 2 and details[2].get("assign_to_params_buffers"):
            raise UsageError(
                f"load_state_dict(assign=True) would take the parameters of this {type(module).__name__} out of its"
                " OffloadModel",
                hint="load without assign: values are copied into the parameters",
            )
        engine.synchronize()
