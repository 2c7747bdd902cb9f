"""`activations(model)`: offload what a plain PyTorch model saves for backward to host memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smpkit.errors import UsageError
from smpkit.torch.core.arguments import check_module, check_num_bytes
from smpkit.torch.core.module_call import ModuleCall
from smpkit.torch.offload.engine import GROUP_BYTES, make_engine
from smpkit.torch.offload.hooks import HookContext
from smpkit.torch.offload.link import Link
from smpkit.torch.offload.prefetch import Lead, check_lead
from smpkit.torch.offload.report import OffloadReport

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["activations", "device_of", "layers_of"]

_LISTS = (nn.ModuleList, nn.Sequential)


class activations:  # noqa: N801 - used as a function, like torch.autograd.graph.save_on_cpu
    """Keep what autograd saves in host memory until backward needs it: a faster `torch.autograd.graph.save_on_cpu`.

    ::

        offload = smpkit.torch.offload.activations(model)
        for batch in loader:
            with offload:
                loss = model(batch).sum()
            loss.backward()
            ...
        print(offload.report())

    Copies run beside the computation, in both directions. Each storage leaves once, however many views of it were
    saved. Parameters, buffers and autocast's copies of trained parameters never leave. Gradients are the same bits as
    without offloading. Layers (the items of a `ModuleList` or `Sequential`) leave and come back one by one. Of
    `torch.utils.checkpoint` layers only what they keep leaves: their inputs. That is the combination to use; without
    checkpointing about 25 times as many bytes move. Autocast casts frozen weights anew in each call, and these copies
    leave like activations: convert frozen layers to the narrow type once, and they stay.

    Enter it around forward; backward may run inside or after it. Use one object for all steps: it keeps its host memory
    for the next. Not for two threads at a time.

    Args:
        model: whose parameters and buffers stay on the device.
        lead: how many layers ahead of backward loads are issued; "auto" takes the smallest number without a stall.
        min_bytes: smaller tensors stay; None: 1 MiB on a GPU, 0 on the CPU.
        host_budget_bytes: of host memory; what does not fit stays on the device, with one warning. None: three
            quarters of what is free.
        link: another link than the device's own, such as `smpkit.testing.EmulatedLink`.
        deadline_seconds: no wait for a copy lasts longer; then DeadlineError names the layer.

    Raises:
        UsageError: an argument of a wrong type or value, or a model without parameters or on several devices.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lead: Lead = "auto",
        min_bytes: int | None = None,
        host_budget_bytes: int | None = None,
        link: Link | None = None,
        deadline_seconds: float = 600.0,
    ) -> None:
        check_module("activations", model)
        check_lead(lead)
        check_num_bytes("min_bytes", min_bytes, of_none="1 MiB on a GPU, 0 on the CPU")
        check_num_bytes("host_budget_bytes", host_budget_bytes, of_none="three quarters of what is free")
        _check_seconds(deadline_seconds)
        if link is not None and not isinstance(getattr(link, "device", None), torch.device):
            raise UsageError(f"link is {link!r}; it must be a link, such as `smpkit.testing.EmulatedLink()`, or None")
        self._model = model
        self._engine = make_engine(
            device_of(model) if link is None else link.device,
            lead=lead,
            min_bytes=min_bytes,
            host_budget_bytes=host_budget_bytes,
            link=link,
            deadline_seconds=deadline_seconds,
        )
        self._context: HookContext | None = None
        self._hooks: list[RemovableHandle] = []
        self._layers = list(layers_of(model))
        self._is_counting = False

    def __enter__(self) -> Self:
        if self._context is not None:
            raise UsageError("these activations are offloaded already", hint="enter the object once at a time")
        self._end_step()
        self._is_counting = True
        self._engine.exclude(_tensors_of(self._model))
        context = self._engine.offload_saved_tensors(type(self._model).__name__, GROUP_BYTES)
        context.__enter__()  # first: it raises where saved-tensor hooks are forbidden, and nothing must be left behind
        self._context = context
        self._hooks = [layer.register_forward_pre_hook(_LayerHook(context, name)) for name, layer in self._layers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        context, self._context = self._context, None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if context is not None:
            context.__exit__(kind, error, traceback)

    def report(self) -> OffloadReport:
        """Return what was moved, held and waited for so far; each `with` counts as a step."""
        self._end_step()
        return self._engine.stats.report()

    def close(self) -> None:
        """Free the host memory; graphs recorded inside must not be used any more."""
        self._engine.close()

    def _end_step(self) -> None:
        if self._is_counting:
            self._is_counting = False
            self._engine.end_step()


class _LayerHook:
    """Tells the hook context which layer begins (a forward pre-hook)."""

    def __init__(self, context: HookContext, name: str) -> None:
        self._context, self._name = context, name

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        self._context.next_layer(self._name)


def _check_seconds(seconds: object) -> None:
    # NaN is in no range.
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise UsageError(
            f"deadline_seconds is {seconds!r}; it must be a number of seconds above 0", hint="the default is 600"
        )


def layers_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost items of lists of modules, with their paths."""
    # Not those of compiled modules: a hook on a module that torch.compile has traced would make it trace again.
    if hasattr(module, "_orig_mod") or ModuleCall.of(module).is_compiled:
        return
    for name, child in module.named_children():
        if isinstance(module, _LISTS):
            yield prefix + name, child
        else:
            yield from layers_of(child, f"{prefix}{name}.")


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(model.parameters(), model.buffers())


def device_of(model: nn.Module) -> torch.device:
    devices = {tensor.device for tensor in model.parameters()}
    if len(devices) != 1:
        places = ", ".join(sorted(map(str, devices))) or "no device"
        raise UsageError(
            f"the parameters of this {type(model).__name__} lie on {places}", hint="offload one GPU's part"
        )
    return devices.pop()
