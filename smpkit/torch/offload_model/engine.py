"""The parts that all forwards of one OffloadModel share: its slices on the host, the device's buffers, the lanes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.offload.host import make_arena
from smpkit.torch.offload.link import Link, link_for
from smpkit.torch.offload_model.gradients import Gradients, Landing, OwnGradients
from smpkit.torch.offload_model.moment import Buffers
from smpkit.torch.offload_model.parking import Parking
from smpkit.torch.offload_model.residence import Residence
from smpkit.torch.offload_model.shard import ModelShard
from smpkit.torch.offload_model.transfers import DEADLINE_SECONDS, HostMemory, Traffic, Transfers
from smpkit.torch.offload_model.weights import SliceWeights

__all__ = ["Engine", "GradientSink", "Modes", "Slice"]


class GradientSink(Protocol):
    """Takes the gradients in the place of the parameters' `.grad`; `OffloadOptimizer` is one."""

    def receive(self, landing: Landing) -> None:
        """Take the gradients of one slice; called during backward, last slice first."""

    def wait_for(self, index: int) -> None:
        """Block until the weights of a slice may be copied to the device."""

    def synchronize(self) -> None:
        """Block until all parameters are up to date."""

    def zero_grad(self) -> None:
        """Forget gradients that no step has used."""

    def distrust(self) -> None:
        """Take nothing for known about the values of parameters."""


Modes = tuple[bool, ...]
"""Which modules of a slice are in training mode."""


class Slice:
    """One slice at work."""

    def __init__(self, shard: ModelShard, weights: SliceWeights, device: torch.device) -> None:
        self.shard = shard
        self.weights = weights
        self.buffers = Buffers(shard, device)
        self.overwrites_input: dict[Modes, bool] = {}
        """Whether it changes its input in place (dropout may, in training only); known once it has run so."""
        self._modules = list(shard.modules())

    @property
    def modes(self) -> Modes:
        """Which modules are in training mode now."""
        return tuple([module.training for module in self._modules])

    @contextlib.contextmanager
    def in_modes(self, modes: Modes) -> Iterator[None]:
        """Let modules be as they were: `eval()` between a forward and its backward must not change the backward."""
        before = self.modes
        if before == modes:
            yield
            return
        self._switch(modes)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, modes: Modes) -> None:
        for module, mode in zip(self._modules, modes, strict=True):
            module.training = mode


class Engine:
    """See the module's docstring.

    Args:
        shards: the slices, in order.
        splat: see `Chain`.
        device: where they run.
        dtype: what weights are computed in; None keeps theirs.
        prefetch: load the next slice while one computes.
        checkpoint: keep only the borders of slices, and run each again in backward.
        num_microbatches: how many pieces pass through a slice per load.
        links: for weights and gradients, and for borders; None makes them; where the device is the
            host nothing is copied then.
        host_budget_bytes: for borders; what does not fit stays on the device.
    """

    def __init__(
        self,
        shards: Sequence[ModelShard],
        *,
        splat: bool,
        device: torch.device,
        dtype: torch.dtype | None,
        prefetch: bool,
        checkpoint: bool,
        num_microbatches: int,
        links: tuple[Link, Link] | None = None,
        host_budget_bytes: int | None = None,
    ) -> None:
        self.device = device
        self.splat = splat
        self.checkpoint = checkpoint
        self.num_microbatches = num_microbatches
        self._sink: Callable[[], GradientSink | None] = lambda: None
        self.averaged_by: str | None = None
        self.traffic = Traffic()
        self.links = links
        bulk, borders = links or (link_for(device, DEADLINE_SECONDS), link_for(device, DEADLINE_SECONDS))
        self.bulk_link = bulk
        in_place = links is None and is_the_host(device)
        transfers = Transfers(bulk, self.traffic)
        memory = HostMemory(bulk)
        made = _weights(shards, dtype, memory)
        self.slices = [Slice(shard, weights, device) for shard, weights in zip(shards, made, strict=True)]
        self.parameters = list(dict.fromkeys(p for weights in made for p in weights.layout.parameters))
        self.residence = Residence(made, device, transfers, prefetch=prefetch, in_place=in_place)
        self.gradients = OwnGradients(made) if in_place else Gradients(made, device, transfers, memory)
        arena = None if in_place else make_arena(borders, host_budget_bytes)
        self.parking = Parking(device, Transfers(borders, self.traffic), arena)
        # Weakly: a model's memory is to go with the last reference, not when Python looks for cycles.
        residence = weakref.ref(self.residence)
        for shard in shards:
            shard.attach(lambda index: _load(residence(), index))

    @property
    def sink(self) -> GradientSink | None:
        """Who takes the gradients; None: the parameters."""
        return self._sink()

    def attach(self, sink: GradientSink) -> None:
        """Give gradients to `sink` from now on, for as long as somebody else holds it.

        Raises:
            UsageError: gradients are averaged over processes.
        """
        self.synchronize()
        self._sink = weakref.ref(sink)
        self._check_averages()
        this = weakref.ref(self)
        self.residence.wait_before_loads(lambda index: _wait_for(this(), index))

    def synchronize(self) -> None:
        """Block until all parameters on the host are up to date and no copy reads them: they may be written."""
        self.residence.complete()
        if (sink := self.sink) is not None:
            sink.synchronize()

    def share(self, who: str) -> None:
        """Note who averages gradients over processes.

        Raises:
            UsageError: there is a sink: `who` looks for gradients at the parameters.
        """
        self.averaged_by = who
        self._check_averages()

    def _check_averages(self) -> None:
        if self.averaged_by is not None and self.sink is not None:
            raise UsageError(
                f"{self.averaged_by} averages the gradients of parameters over processes, and an OffloadOptimizer"
                " takes them before they are there",
                hint="use an optimizer of torch.optim over model.parameters()",
            )

    def distrust(self) -> None:
        """Take nothing for known about parameters: who holds them may write to `.data`, which counts no version."""
        self.synchronize()
        for piece in self.slices:
            piece.weights.distrust()
        if (sink := self.sink) is not None:
            sink.distrust()

    @contextlib.contextmanager
    def on_device(self, index: int, *, fresh: bool, then: int | None) -> Iterator[list[nn.Parameter]]:
        """Let a slice's modules see their weights on the device; yield these."""
        stand_ins = self.residence.acquire(index, fresh=fresh, then=then)
        with self.slices[index].weights.replaced_by(stand_ins):
            yield stand_ins

    def call(self, index: int, value: Any) -> Any:
        """Run a slice with what the one before returned; the first gets (args, kwargs)."""
        shard = self.slices[index].shard
        if index == 0:
            args, kwargs = value
            return shard(*args, **kwargs)
        return shard(*value) if self.splat and isinstance(value, tuple) else shard(value)


def is_the_host(device: torch.device) -> bool:
    """Return whether what a device computes with may lie where it rests."""
    return device.type == "cpu"


def _load(residence: Residence | None, index: int) -> None:
    if residence is not None:
        residence.load(index, fresh=True)


def _wait_for(engine: Engine | None, index: int) -> None:
    if engine is not None and (sink := engine.sink) is not None:
        sink.wait_for(index)


def _weights(shards: Sequence[nn.Module], dtype: torch.dtype | None, memory: HostMemory) -> list[SliceWeights]:
    """Make the host's buffers; a parameter that several slices use belongs to the first."""
    made, taken = [], set[int]()
    for shard in shards:
        owned = {id(parameter) for parameter in shard.parameters()} - taken
        made.append(SliceWeights(shard, owned, dtype, memory))
        taken |= owned
    return made
