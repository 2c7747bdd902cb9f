"""Who takes part: PyTorch, its checkpoint, and those who take activations to the host, each as documented."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import save_on_cpu

from benchmarks.activation_offload.blocks import Decoder
from smpkit import offload_activations
from smpkit.torch.offload.report import OffloadReport

__all__ = ["CONTESTANTS", "Absent", "Contestant", "Entry"]

Around = Callable[[], AbstractContextManager[object]]


class Absent(Exception):
    """A contestant cannot take part here; says why."""


@dataclass(frozen=True)
class Entry:
    """A contestant that is ready."""

    around: Around
    """What its forward runs in."""
    report: Callable[[], OffloadReport] | None = None
    before_layer: Callable[[Tensor], object] | None = None
    """Told of each layer's input."""
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Contestant:
    """One of them."""

    name: str
    is_checkpointed: bool
    enter: Callable[[Decoder], Entry]
    """Raises Absent."""
    package: str | None = None
    """What it takes besides torch and smpkit."""

    @property
    def why_not(self) -> str | None:
        """Why it cannot take part on this machine, as far as can be told without it."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return f"{self.package} is not installed"


def _plain(_: Decoder) -> Entry:
    return Entry(contextlib.nullcontext)


def _save_on_cpu(model: Decoder) -> Entry:
    pins = next(model.parameters()).is_cuda
    return Entry(lambda: save_on_cpu(pin_memory=pins))


def _trl(model: Decoder) -> Entry:
    made = _imported("trl.models.activation_offloading", "OffloadActivations", model)()
    return Entry(lambda: made)


def _torchtune(model: Decoder) -> Entry:
    made = _imported("torchtune.training", "OffloadActivations", model)(use_streams=True)
    return Entry(lambda: made)


def _deepspeed(model: Decoder) -> Entry:
    """Use its hooks, which take the tensors that were marked; it marks the inputs of checkpointed layers."""
    module = "deepspeed.runtime.activation_checkpointing.offload_activations"
    made = _imported(module, "CheckpointHiddenStatesOffload", model)()
    return Entry(lambda: made, before_layer=made.mark)


def _imported(module: str, name: str, model: Decoder) -> Callable[..., Any]:
    """Return a peer's context manager; they let tensors of the CPU be."""
    if not next(model.parameters()).is_cuda:
        raise Absent("it offloads from a GPU only")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # an optional package may fail to import in any way
        raise Absent(f"{type(error).__name__}: {error}") from error
    return found


def _smpkit(model: Decoder) -> Entry:
    made = offload_activations(model, min_bytes=None if next(model.parameters()).is_cuda else 0)
    return Entry(contextlib.nullcontext, made.report, close=made.close)


CONTESTANTS = (
    Contestant("no checkpoint", False, _plain),
    Contestant("torch checkpoint", True, _plain),
    Contestant("torch save_on_cpu", False, _save_on_cpu),
    Contestant("torch save_on_cpu over checkpoint", True, _save_on_cpu),
    Contestant("torchtune over checkpoint", True, _torchtune, "torchtune"),
    Contestant("TRL over checkpoint", True, _trl, "trl"),
    Contestant("DeepSpeed over checkpoint", True, _deepspeed, "deepspeed"),
    Contestant("smpkit over checkpoint", True, _smpkit),
)
