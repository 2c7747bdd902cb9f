"""Let scripts that were written for GPUs run where there is none: what they put on `cuda` stays on the CPU.

SMP v1 existed on GPUs only, so its scripts say `torch.cuda.set_device(smp.local_rank())` and `.to("cuda")` without
asking. `import smdistributed` switches this on where a machine has no GPU: such a script could only fail there.
`SMPKIT_CUDA_ON_CPU` decides otherwise:

===== ==================================================================================================================
unset calls that name a GPU use the CPU; `torch.cuda.is_available()` tells the truth. Not on a machine with a GPU that
      torch cannot use: there a script shall fail
0     never
1     also there, and for scripts that insist on CUDA: `torch.cuda` answers as with a GPU, in the whole process, and
      tensors say `cuda:0` to all code but torch's and smpkit's, which act on where a tensor really is
===== ==================================================================================================================

What is not listed here stays as it is, and fails as without a GPU.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from smpkit.torch.distributed import gpus

_log = logging.getLogger("smpkit")

_installed = False


def install(environ: Mapping[str, str] = os.environ) -> None:
    """Begin, if there is no GPU, or it shall not be used, and nobody said no; once, for the life of this process."""
    global _installed  # noqa: PLW0603
    if _installed or torch.cuda.is_available() or environ.get(gpus.CUDA_ON_CPU) == "0" or gpus.wants_gpu(environ):
        return
    _installed = True
    insists = environ.get(gpus.CUDA_ON_CPU) == "1"
    for name, replacement in (PRETENDED if insists else _WITHOUT_EFFECT).items():
        for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):  # scripts use both names of a function
            if hasattr(module, name):
                setattr(module, name, replacement)
    if insists:
        torch.autocast.__init__ = _init_autocast  # type: ignore[method-assign]
    elif environ.get("RANK", "0") == "0":
        _log.warning("there is no GPU: what a script puts on `cuda` stays on the CPU, unless SMPKIT_CUDA_ON_CPU=0")
    _CpuForCuda(shows_cuda=insists).__enter__()  # type: ignore[no-untyped-call]


def installed() -> bool:
    """Whether `cuda` means the CPU in this process."""
    return _installed


# --- calls that name a GPU --------------------------------------------------------------------------------------------


class _CpuForCuda(TorchFunctionMode):
    """Makes calls of torch that name a GPU use the CPU.

    Args:
        shows_cuda: show tensors as if they were on the GPU. A helper of public scripts skips those on the CPU silently.
    """

    def __init__(self, shows_cuda: bool) -> None:
        super().__init__()
        self._shown = _SHOWN if shows_cuda else {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self._shown and not _calls_from_torch_or_smpkit():
            return self._shown[func](*args, **(kwargs or {}))
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(_to_cpu, args[1:]))
        if kwargs and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _to_cpu(kwargs["device"])}
        return func(*args, **(kwargs or {}))


def _calls_from_torch_or_smpkit() -> bool:
    """Return whether the caller of the function that asks this is code of torch or smpkit."""
    name = str(sys._getframe(2).f_globals.get("__name__"))
    return name.partition(".")[0] in ("torch", "smpkit")


def _to_cpu(value: Any) -> Any:
    """Return the CPU for a GPU, named in any way that torch understands, and anything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str):
        return "cpu" if value.partition(":")[0] == "cuda" else value
    return torch.device("cpu") if isinstance(value, int) and not isinstance(value, bool) else value


# --- what `torch.cuda` answers ----------------------------------------------------------------------------------------


class _Current:
    index = 0
    """Of the device that the script has chosen."""


def _set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    _Current.index = max(0, index or 0)


def _answering(get: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
    """Return a function that ignores its arguments; one for each name, since torch's compiler keeps a table of them."""
    return lambda *_, **__: get()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _TensorType(type):
    """The class of `torch.cuda.FloatTensor` and its kin, each of which stands for a type on the CPU, `on_cpu`."""

    on_cpu: Any

    def __call__(cls, *args: Any, device: Any = None) -> Any:  # noqa: ARG002  which GPU has no meaning here
        return cls.on_cpu(*args)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.on_cpu)


def _type_of(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """Stand for `Tensor.type`, which returns the name of a type or converts to one."""
    if dtype is None:
        return tensor.type().replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    return tensor.type(getattr(dtype, "on_cpu", dtype), non_blocking, **kwargs)


_SHOWN: Final[Mapping[Any, Callable[..., Any]]] = {
    torch.Tensor.device.__get__: lambda *_: torch.device("cuda", _Current.index),
    torch.Tensor.is_cuda.__get__: lambda *_: True,  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda *_: _Current.index,
    torch.Tensor.type: _type_of,
}
"""What scripts get from methods and attributes of tensors."""

_generator: Final = torch.Generator("cpu")
"""Its state is what scripts save and restore as the GPU's; all numbers come from the CPU's generator."""

_WITHOUT_EFFECT: Final[Mapping[str, Callable[..., Any]]] = {
    **{
        name: _answering()
        for name in (
            *("empty_cache", "reset_max_memory_allocated", "reset_max_memory_cached", "reset_peak_memory_stats"),
            *("set_device", "synchronize"),
        )
    },
    "current_device": _answering(lambda: 0),
}
"""Functions of `torch.cuda` that fail without a GPU, or may, and ask for what a CPU has no need of."""

PRETENDED: Final[Mapping[str, Any]] = {
    **_WITHOUT_EFFECT,
    "is_available": _answering(lambda: True),
    "is_bf16_supported": _answering(lambda: True),
    "device_count": _answering(lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
    "current_device": _answering(lambda: _Current.index),
    "set_device": _set_device,
    "memory_allocated": _answering(_resident_bytes),
    "memory_reserved": _answering(_resident_bytes),
    "max_memory_allocated": _answering(_peak_bytes),
    "max_memory_reserved": _answering(_peak_bytes),
    "manual_seed": _answering(),
    "manual_seed_all": _answering(),
    "get_rng_state": _answering(_generator.get_state),
    "set_rng_state": lambda state, *_: _generator.set_state(state),
    "get_rng_state_all": lambda: [_generator.get_state()],
    "set_rng_state_all": lambda states: _generator.set_state(next(iter(states))),
    **{
        f"{kind}Tensor": _TensorType(f"{kind}Tensor", (), {"on_cpu": getattr(torch, f"{kind}Tensor")})
        for kind in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
    },
}
"""What names of `torch.cuda` are where scripts insist on CUDA."""

_init_real_autocast: Final[Callable[..., None]] = torch.autocast.__init__


def _init_autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    if device_type == "cuda":
        device_type = "cpu"
        if not args and kwargs.get("dtype") is None:  # torch's default on a GPU; the CPU's own is bfloat16
            kwargs["dtype"] = torch.float16
    _init_real_autocast(self, device_type, *args, **kwargs)
