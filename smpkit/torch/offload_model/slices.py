"""Slices: layers that are on the device together, where their parameters lie on the host, and what passes through them.

::

    parameter (the user's own object)          host buffer, pinned           device buffer
    ├─ of the computation's dtype: lies in ──► one flat buffer per slice ──► the same bytes
    └─ wider (fp32, computed in bf16): rounded into it by `publish`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import accumulate, pairwise
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from smpkit.errors import UnsupportedError, UsageError
from smpkit.plan.partition.cut import cut
from smpkit.torch.core.tensor_spec import map_tensors, tensors_in
from smpkit.torch.distributed.host_memory import pinned_bytes, zeros
from smpkit.torch.offload.link import DONE, Event, Link

Balance = Literal["params", "bytes"]
"""Whether slices have equal numbers of parameters or of bytes."""
_ALIGNMENT: Final = 64
"""Elements: enough for the vector loads of every dtype, and equal in buffers of different dtypes."""


# --- which layers -----------------------------------------------------------------------------------------------------


def cut_layers(
    layers: Sequence[nn.Module], num_slices: int, balance: Balance, may_begin: Callable[[nn.Module], bool]
) -> list[list[nn.Module]]:
    """Cut layers into slices, so that the largest one is as small as possible; none is empty.

    Args:
        layers: in the order in which they are called.
        num_slices: at most; more than there are layers means one layer each.
        may_begin: whether a layer can be the first of a slice; where it cannot, the cut is one layer later.
    """
    if balance not in ("params", "bytes"):
        raise UsageError(f"balance is {balance!r}; it must be 'params' or 'bytes'")
    size = Tensor.numel if balance == "params" else (lambda parameter: parameter.nbytes)
    total = [0, *accumulate(sum(size(parameter) for parameter in layer.parameters()) for layer in layers)]
    count = min(num_slices, len(layers))
    ends = cut(len(layers), count, lambda start, end: total[end] - total[start])
    starts = []
    for start in [0, *ends[:-1]]:
        while 0 < start < len(layers) and not may_begin(layers[start]):
            start += 1  # noqa: PLW2901 - moved on
        starts.append(start)
    bounds = sorted({*starts, len(layers)})
    return [list(layers[start:end]) for start, end in pairwise(bounds)]


def check_layers(model: nn.Module) -> None:
    """Refuse a model whose weights cannot be moved."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UnsupportedError(
                f"`{name}` has max_norm={module.max_norm:g}, which writes to its weight in forward: the device has a"
                " copy, which never comes back",
                hint="leave max_norm out, and scale the table between steps",
            )
        for own, parameter in module._parameters.items():
            if parameter is not None and is_lazy(parameter):
                raise UsageError(
                    f"`{own}` of a {type(module).__name__} has no shape yet",
                    hint="run the model once before it is wrapped: lazy modules learn their shapes from inputs",
                )


def make_slices(
    model: nn.Module, groups: Sequence[Iterable[nn.Module]], dtype: torch.dtype | None, device: torch.device
) -> list[Slice]:
    """Return a slice for each group of layers, and at the end the resident one.

    That has the parameters of no group (a norm behind the blocks) and of several (an embedding tied to the head), and
    is on the device for the whole step.
    """
    uses: dict[nn.Parameter, set[int]] = {}
    for index, layers in enumerate(groups):
        for layer in layers:
            for parameter in layer.parameters():
                uses.setdefault(parameter, set()).add(index)
    slices = [
        Slice(index, [parameter for parameter, users in uses.items() if users == {index}], dtype, device)
        for index in range(len(groups))
    ]
    resident = [parameter for parameter in model.parameters() if len(uses.get(parameter, ())) != 1]
    return [*slices, Slice(len(slices), resident, dtype, device)]


# --- where they lie ---------------------------------------------------------------------------------------------------


class Layout:
    """Where tensors lie in one buffer of bytes, one behind the other."""

    def __init__(self, shapes: Iterable[torch.Size], dtypes: Iterable[torch.dtype]) -> None:
        self.shapes, self.dtypes, self.starts = [*shapes], [*dtypes], [0]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            length = -(-shape.numel() // _ALIGNMENT) * _ALIGNMENT
            self.starts.append(self.starts[-1] + length * dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        """Length of the buffer."""
        return self.starts[-1]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors in a buffer; each has a version counter of its own."""
        return [
            buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape).data
            for start, shape, dtype in zip(self.starts, self.shapes, self.dtypes, strict=False)
        ]


class Slice:
    """Parameters that are on the device together, in one flat buffer of the host.

    Args:
        dtype: of the computation with floating-point parameters; None keeps their own.
        device: for which the buffer is pinned.
    """

    def __init__(
        self, index: int, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None, device: torch.device
    ) -> None:
        def computed(parameter: nn.Parameter) -> torch.dtype:
            return dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype

        self.index = index
        self.parameters = sorted(parameters, key=lambda parameter: (str(parameter.dtype), str(computed(parameter))))
        self.layout = Layout([parameter.shape for parameter in self.parameters], map(computed, self.parameters))
        self.host = pinned_bytes(device, self.layout.num_bytes)
        self.is_entered = False
        """Whether the parameters are those on the device."""
        self.reading: Event = DONE
        """The latest copy from `host`; copies are made in order."""
        self.updates: list[Future[None]] = []
        self.is_stale = False
        """Whether somebody may have written to parameters in a way that leaves their versions alone."""
        self.masters: list[Tensor] = []
        self._rounded: list[tuple[Tensor, Tensor]] = []
        """Parameters that are wider than what the device computes in, and where they lie rounded."""
        wide = [parameter for parameter in self.parameters if computed(parameter) != parameter.dtype]
        apart = Layout([parameter.shape for parameter in wide], [parameter.dtype for parameter in wide])
        wide_views = iter(apart.views(zeros(apart.num_bytes, torch.uint8)))
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self.layout.views(self.host), strict=True):
                master = with_own_storage(view if parameter.dtype == view.dtype else next(wide_views))
                parameter.data = master.copy_(parameter)
                self.masters.append(master)
                if master.dtype != view.dtype:
                    self._rounded.append((master, view))
        self.publish()
        self._published = self._versions()

    def publish(self) -> None:
        """Round the wider parameters into the host buffer."""
        with torch.no_grad():
            for master, view in self._rounded:
                view.copy_(master)

    @property
    def is_rounded(self) -> bool:
        """Whether the host buffer holds other values than the parameters."""
        return bool(self._rounded)

    def note_published(self) -> None:
        """Note that the present values of the parameters are in the host buffer, or will be when updates end."""
        self._published, self.is_stale = self._versions(), False

    def gradient_bytes(self) -> int:
        """Return how long a buffer on the host for all gradients is."""
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        return Layout([parameter.shape for parameter in trained], [parameter.dtype for parameter in trained]).num_bytes

    def is_ready(self) -> bool:
        """Return whether the host buffer can be copied now."""
        return all(update.done() for update in self.updates) and not self._must_be_published()

    def make_ready(self, link: Link) -> None:
        """Wait for updates, and publish what others have written, so that the host buffer can be copied."""
        self.wait_for_updates()
        if self._must_be_published():
            link.synchronize(self.reading, "the weights of a slice")
            self.publish()
            self.note_published()

    def wait_for_updates(self) -> None:
        """Block until no thread updates the parameters; raise what one has raised."""
        while self.updates:
            self.updates[0].exception()  # waits; if Ctrl-C ends that, who waits next must know of the update
            self.updates.pop(0).result()

    def check_not_moved(self) -> None:
        """Raise UsageError if the script has given a parameter other memory."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.data_ptr() != master.data_ptr():
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} has been moved out of its OffloadModel's memory",
                    hint="write to it in place (`parameter.data.copy_(...)`), not by `parameter.data = ...`",
                )

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def _must_be_published(self) -> bool:
        return self.is_rounded and (self.is_stale or self._versions() != self._published)


def with_own_storage(view: Tensor) -> Tensor:
    """Return a tensor over the same memory whose storage is exactly that memory."""
    # `torch.save` takes whole storages: one parameter must not bring along its slice.
    if view.numel() == 0:
        return view
    start = view.storage_offset() * view.itemsize
    whole: Any = view.untyped_storage()
    own = torch.empty(0, dtype=view.dtype, device=view.device)
    return own.set_(whole[start : start + view.nbytes], 0, view.shape, view.stride())


# --- microbatches: the batch in pieces, which pass through a slice one after the other --------------------------------


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor has a row for each sample; others go to each microbatch whole."""
    return tensor.dim() > 0 and tensor.shape[0] > 1


def split(inputs: Any, count: int) -> list[Any]:
    """Return pieces of all tensors along dimension 0, which must have one number of rows; at most one piece a row."""
    batched = [tensor for tensor in tensors_in(inputs) if is_batched(tensor)]
    if count == 1 or not batched:
        return [inputs]
    rows = batched[0].shape[0]
    if (other := next((tensor for tensor in batched if tensor.shape[0] != rows), None)) is not None:
        raise UsageError(
            "microbatches need inputs of one batch size in dimension 0, but there are tensors of"
            f" {tuple(batched[0].shape)} and {tuple(other.shape)}"
        )
    # Slices, not `tensor_split`: a layer may change one of them in place.
    sizes = [len(part) for part in torch.arange(rows, device="cpu").tensor_split(min(count, rows))]

    def piece(start: int, end: int) -> Any:
        return map_tensors(lambda tensor: tensor[start:end] if is_batched(tensor) else tensor, inputs)

    return [piece(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]


def join(results: Sequence[Any], pieces: Sequence[Any]) -> Any:
    """Return the results for all pieces as one, in the structure of the first; what all hand on is returned once."""
    if len(results) == 1:
        return results[0]
    most = max(tensor.shape[0] for piece in pieces for tensor in tensors_in(piece) if tensor.dim())
    columns: Iterator[tuple[Tensor, ...]] = iter(zip(*map(tensors_in, results), strict=True))

    def joined(_: Tensor) -> Tensor:
        parts = next(columns)
        if all(part is parts[0] for part in parts):
            return parts[0]
        if not parts[0].dim():
            raise UsageError(
                "the last layer returned a tensor without dimensions, which cannot be joined over microbatches",
                hint="compute losses outside of the OffloadModel, or give num_microbatches=1",
            )
        if parts[0].shape[0] == 1 < most:
            raise UsageError(
                f"the last layer returned a tensor of shape {tuple(parts[0].shape)} for each of {len(parts)}"
                f" microbatches with up to {most} rows, which cannot be joined",
                hint="return a row for each sample, or give num_microbatches=1",
            )
        return torch.cat(parts)

    return map_tensors(joined, results[0])
