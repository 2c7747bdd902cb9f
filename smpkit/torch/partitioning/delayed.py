"""Make a model without memory for its weights; each rank allocates and initialises its own part later.

Inside `smp.delay_param_initialization()` a parameter has its shape over a single element, and initialising it does
nothing. When the model is placed, a rank allocates what it holds and runs the initialisation of those modules: the
`_init_weights` of a Hugging Face model, or `reset_parameters`, each under random numbers keyed by the module's name, so
weights do not depend on the partition.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smpkit.errors import UsageError

__all__ = ["delay_param_initialization", "fill", "initialize", "is_delayed"]

_MARK: Final = "_smpkit_delayed"


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Create modules in this block without memory for their parameters (the context of the same name in SMP v1).

    Buffers are made as ever. The parameters get memory and values when the model is wrapped, or with a pipeline when it
    is partitioned: each rank makes its own only. A module whose parameters are not initialised by a
    `reset_parameters()` of its own or the model's `_init_weights(module)` cannot be made this way.
    """
    if not enabled:
        yield
        return
    plain = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        plain(self, name, param)
        if param is not None and not is_delayed(param):
            param.data = torch.empty((), dtype=param.dtype).expand(param.shape)
            setattr(param, _MARK, True)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        with _NoInitialisation():
            yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def is_delayed(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter has no memory yet."""
    return getattr(parameter, _MARK, False)


def fill(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Give a delayed parameter its memory and the values of a state dict."""
    parameter.data = value.detach().to(parameter.dtype).clone()
    setattr(parameter, _MARK, False)


def initialize(root: nn.Module, parameters: list[nn.Parameter], device: torch.device, seed: int) -> None:
    """Allocate and initialise the delayed ones of `parameters` on `device`.

    Raises:
        UsageError: nothing says how to initialise one of them.
    """
    waiting = {id(parameter): parameter for parameter in parameters if is_delayed(parameter)}
    for name, module in root.named_modules():
        own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) in waiting]
        if not own:
            continue
        for parameter in own:
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(waiting.pop(id(parameter)), _MARK, False)
        initializer = _initializer(root, module)
        if initializer is None:
            raise UsageError(
                f"nothing says how to initialise the parameters of `{name}` ({type(module).__name__})",
                hint="give the class a `reset_parameters()`, or make it outside smp.delay_param_initialization()",
            )
        with _seeded(seed, name, device):
            initializer()


def _initializer(root: nn.Module, module: nn.Module) -> Callable[[], Any] | None:
    """Return what initialises a module's own parameters."""
    for owner in (root, *root.children()):
        init_weights = getattr(owner, "_init_weights", None)
        if callable(init_weights):
            return lambda: init_weights(module)
    reset = getattr(module, "reset_parameters", None)
    return reset if callable(reset) else None


@contextlib.contextmanager
def _seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed((seed + zlib.crc32(name.encode())) % (1 << 63))
        yield


class _NoInitialisation(TorchFunctionMode):
    """Skips what would write to a parameter without memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        target = args[0] if args else (kwargs or {}).get("tensor")
        name = getattr(func, "__name__", "")
        changes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        if changes and isinstance(target, torch.Tensor) and _is_placeholder(target):
            return target
        return func(*args, **(kwargs or {}))


def _is_placeholder(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is (a view of) a parameter without memory: more elements than its storage has."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return bool(strides) and not any(strides)
