"""The weights of one slice: a flat buffer on the host, and device parameters, views of a buffer on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from smpkit.errors import UsageError
from smpkit.torch.offload.link import Event, Link
from smpkit.torch.offload_model.layout import Layout, with_own_storage
from smpkit.torch.offload_model.transfers import HostBuffers

__all__ = ["SliceWeights"]


class SliceWeights:
    """The parameters of a slice in one buffer of the host, in the dtype that the device computes in.

    A parameter whose dtype that is, is a view of the buffer from then on, so the user's optimizer writes right there.
    Others (fp32 weights of a bf16 computation; a tied one that lies in an earlier slice) are copied into it before
    each forward.

    Args:
        module: the slice.
        owned: ids of parameters that no earlier slice has; tied ones belong to the first.
        dtype: what the device computes in; None keeps each parameter's own.
        memory: where the buffer comes from.
    """

    def __init__(self, module: nn.Module, owned: set[int], dtype: torch.dtype | None, memory: HostBuffers) -> None:
        self.module = module
        self.dtype = dtype
        self.layout = Layout(list(module.parameters()), dtype)
        self.buffer = memory.zeros(self.layout.num_bytes)
        self.views = self.layout.views(self.buffer)
        position = {id(parameter): index for index, parameter in enumerate(self.layout.parameters)}
        self._owners = [
            (holder, name, position[id(parameter)])
            for holder in module.modules()
            for name, parameter in holder._parameters.items()
            if parameter is not None
        ]
        self._rnns = [holder for holder in module.modules() if isinstance(holder, nn.RNNBase)]
        self._in_place: list[tuple[nn.Parameter, Tensor]] = []
        self._copied: list[tuple[nn.Parameter, Tensor]] = []
        self._synced: dict[int, tuple[int, int]] = {}
        self._reading: tuple[Link, Event] | None = None
        self.moved: set[int] = set()
        """Ids of parameters that have been moved out and back since somebody cleared this."""
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            with torch.no_grad():
                view.copy_(parameter)
            if id(parameter) in owned and view.dtype == parameter.dtype:
                parameter.data = with_own_storage(view)
                self._in_place.append((parameter, view))
            else:
                if id(parameter) in owned and parameter.device.type != "cpu":
                    parameter.data = parameter.data.to("cpu")
                self._copied.append((parameter, view))

    @property
    def is_copied(self) -> bool:
        """Whether some parameters do not lie in the buffer, so that `refresh` has work to do before each forward."""
        return bool(self._copied)

    def note_read(self, link: Link, event: Event) -> None:
        """Note that a copy reads the buffer until `event`; those before it are over by then."""
        self._reading = link, event

    def synchronize(self) -> None:
        """Block until no copy reads the buffer any more: whoever writes to it calls this first."""
        if self._reading is not None:
            link, event = self._reading
            link.synchronize(event, "the weights of a slice")

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the buffer up to date with the parameters."""
        self.reattach()
        for parameter, view in self._copied:
            if self._synced.get(id(parameter)) != _state(parameter):
                self.synchronize()
                view.copy_(parameter.detach())

    @torch.no_grad()
    def reattach(self) -> None:
        """Bring parameters back that have been moved out of the buffer."""
        for parameter, view in self._in_place:
            # `parameter.data = ...` (vector_to_parameters, some loaders) moves a parameter out of the buffer.
            if parameter.data_ptr() != view.data_ptr() and parameter.numel() > 0:
                self.synchronize()
                view.copy_(parameter.detach())
                parameter.data = with_own_storage(view)
                self.moved.add(id(parameter))

    def note_written(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note that the optimizer has itself put these parameters' values into the buffer."""
        for parameter in parameters:
            self._synced[id(parameter)] = _state(parameter)

    def invalidate(self) -> None:
        """Forget that: the next `refresh` copies all."""
        self._synced.clear()

    def device_parameters(self, device_buffer: Tensor) -> list[nn.Parameter]:
        """Return parameters that are views of a buffer on the device; the slice computes with them."""
        made = []
        for parameter, view in zip(self.layout.parameters, self.layout.views(device_buffer), strict=True):
            device_parameter = nn.Parameter(view, requires_grad=parameter.requires_grad)
            device_parameter.__dict__.update(parameter.__dict__)  # marks that libraries put on parameters
            made.append(device_parameter)
        return made

    @contextlib.contextmanager
    def replaced_by(self, device_parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Let the slice's modules see `device_parameters` in the place of their parameters.

        Raises:
            UsageError: a module has another parameter than when the model was wrapped.
        """
        for holder, name, position in self._owners:
            found = holder._parameters.get(name)
            if found is not self.layout.parameters[position] and found is not device_parameters[position]:
                raise UsageError(
                    f"`{name}` of a {type(holder).__name__} is not the parameter that the OffloadModel was made with",
                    hint="change parameters in place, load without assign=True, and do not call it through torch.func",
                )
        self._set_parameters(device_parameters)
        try:
            yield
        finally:
            self._set_parameters(self.layout.parameters)

    def _set_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        for holder, name, position in self._owners:
            holder._parameters[name] = parameters[position]
        for rnn in self._rnns:  # they keep a list of their own
            rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]


def _state(parameter: Tensor) -> tuple[int, int]:
    """Return what is another after most ways to change a parameter."""
    return parameter._version, parameter.data_ptr()
