"""Let scripts that were written for GPUs run where there is none: what they put on `cuda` stays on the CPU.

SMP v1 existed on GPUs only, so its scripts say `torch.cuda.set_device(smp.local_rank())` and `.to("cuda")` without
asking. Installed by importing `smdistributed` on a machine without a GPU, and nowhere else: such a script could only
fail there. On a machine with a GPU that torch cannot use it shall fail, unless `SMPKIT_CUDA_ON_CPU=1` says that it is
meant. `torch.cuda.is_available()` keeps telling the truth, and `SMPKIT_CUDA_ON_CPU=0` switches all of it off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from smpkit.torch.distributed import gpus

__all__ = ["install", "installed"]

_log = logging.getLogger("smpkit")

_NO_OPS: Final = ("empty_cache", "reset_peak_memory_stats", "set_device", "synchronize")
"""Functions of `torch.cuda` that fail without a GPU, or may, and ask for what a CPU has no need of."""

_installed = False


class _CudaToCpuMode(TorchFunctionMode):
    """Changes the device in calls of torch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _IDENTITY_METHODS:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(_to_cpu, args[1:]))
        if kwargs and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _to_cpu(kwargs["device"])}
        return func(*args, **(kwargs or {}))


_IDENTITY_METHODS: Final = (torch.Tensor.cuda, torch.Tensor.pin_memory)
_MODE: Final = _CudaToCpuMode()


def install(environ: Mapping[str, str] = os.environ) -> None:
    """Begin, if there is no GPU, or it shall not be used, and nobody said no; once."""
    global _installed  # noqa: PLW0603
    if _installed or torch.cuda.is_available() or environ.get(gpus.CUDA_ON_CPU) == "0" or gpus.wants_gpu(environ):
        return
    _installed = True
    for name in _NO_OPS:
        setattr(torch.cuda, name, _no_op(name))
    torch.cuda.current_device = lambda: 0
    _MODE.__enter__()  # type: ignore[no-untyped-call]
    if environ.get("RANK", "0") == "0":
        _log.warning("there is no GPU: what the script puts on `cuda` stays on the CPU, unless SMPKIT_CUDA_ON_CPU=0")


def installed() -> bool:
    """Whether `cuda` means the CPU in this process."""
    return _installed


def _to_cpu(value: Any) -> Any:
    """Return the CPU for a GPU, named in any way that torch understands, and anything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str):
        return "cpu" if value.partition(":")[0] == "cuda" else value
    return torch.device("cpu") if isinstance(value, int) and not isinstance(value, bool) else value


def _no_op(name: str) -> Callable[..., None]:
    """Return a function of its own for each name: torch's compiler keeps a table of them, without duplicates."""

    def no_op(*args: object, **kwargs: object) -> None:
        """Stand for a function of `torch.cuda`."""

    no_op.__name__ = name
    return no_op
