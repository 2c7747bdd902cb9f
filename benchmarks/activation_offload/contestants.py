"""Who takes part, each as documented, and what it moves per block on the CPU, in inputs of a block."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import smpkit
from benchmarks.activation_offload.blocks import Decoder, gradients_of, train_step

_WIDTH, _TOKENS, _LAYERS = 256, 256, 4
_TORCHS_OWN: Final = dict(vars(torch.utils.checkpoint))
Around = Callable[[], AbstractContextManager[Any]]
Enter = Callable[[Decoder], Around | smpkit.offload_activations]
"""Returns what forward runs in."""


def _save_on_cpu(model: Decoder) -> Around:
    pins = next(model.parameters()).is_cuda
    return lambda: save_on_cpu(pin_memory=pins)


def _peer(module: str, name: str, **options: Any) -> Enter:
    def enter(model: Decoder) -> Around:
        hooks = getattr(importlib.import_module(module), name)(**options)
        model.before_layer = getattr(hooks, "mark", model.before_layer)  # DeepSpeed takes what it marks
        return lambda: hooks

    return enter


UNCHECKPOINTED: Final = "no checkpoint"
CONTESTANTS: Final[dict[str, Enter]] = {
    UNCHECKPOINTED: lambda _: nullcontext,
    "torch checkpoint": lambda _: nullcontext,
    "torch save_on_cpu over checkpoint": _save_on_cpu,
    "smpkit over checkpoint": smpkit.offload_activations,
}
PEERS: Final[dict[str, Enter]] = {
    "torchtune over checkpoint": _peer("torchtune.training", "OffloadActivations", use_streams=True),
    "TRL over checkpoint": _peer("trl.models.activation_offloading", "OffloadActivations"),
    "DeepSpeed over checkpoint": _peer(
        "deepspeed.runtime.activation_checkpointing.offload_activations", "CheckpointHiddenStatesOffload"
    ),
}
"""Those that take part where they are installed; they offload from a GPU only."""


@contextlib.contextmanager
def torchs_own_checkpoint() -> Iterator[None]:
    """Undo afterwards what smpkit replaces in torch.utils.checkpoint: the next contestant is torch itself."""
    try:
        yield
    finally:
        vars(torch.utils.checkpoint).update(_TORCHS_OWN)


def rows() -> Iterator[dict[str, str]]:
    """Yield a row per contestant: inputs out, back and left on the device, and whether gradients are the same bits."""
    torch.manual_seed(0)
    model, x = Decoder(_WIDTH, 4, _LAYERS), torch.randn(1, _TOKENS, _WIDTH)
    train_step(model, x)
    expected = gradients_of(model)
    for name, enter in CONTESTANTS.items():
        model.is_checkpointed = name != UNCHECKPOINTED
        with torchs_own_checkpoint():
            moved = [num_bytes / x.nbytes / _LAYERS for num_bytes in _moved(enter(model), model, x)]
        same = all(map(torch.equal, gradients_of(model), expected))
        heads = ("out", "back", "on the device after forward")
        figures = {head: f"{inputs:.2f}" for head, inputs in zip(heads, moved, strict=True)}
        yield {"": name, **figures, "gradients": "same bits" if same else "DIFFERENT"}


def _moved(around: Around | smpkit.offload_activations, model: Decoder, x: Tensor) -> tuple[int, int, int]:
    """Return bytes out, bytes back, and bytes that are on the device when forward has ended."""
    if isinstance(around, smpkit.offload_activations):
        with around:
            for _ in range(3):  # the engine learns how far ahead to load
                train_step(model, x)
            step = around.report().steps[-1]
            y = model(x)
            held = around._engine.use().parked
            del y
            return step.bytes_out, step.bytes_back, held
    # Without hooks of the contestant's, each storage counts once, and parameters do not.
    hooks: Any = around()
    seen: dict[int, Tensor] = {_place(weight): weight for weight in model.parameters()}
    num_bytes = 0
    offloads = isinstance(hooks, saved_tensors_hooks)

    def pack(tensor: Tensor) -> Any:
        nonlocal num_bytes
        if offloads or _place(tensor) not in seen:
            num_bytes += tensor.nbytes if offloads else tensor.untyped_storage().nbytes()
            seen.setdefault(_place(tensor), tensor)  # alive, or the next one might take its place
        return hooks.pack_hook(tensor) if offloads else tensor

    unpack = hooks.unpack_hook if offloads else lambda tensor: tensor
    train_step(model, x, lambda: saved_tensors_hooks(pack, unpack))
    return (num_bytes, num_bytes, 0) if offloads else (0, 0, num_bytes)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
