"""Let scripts that were written for GPUs run where there is none: what they put on `cuda` stays on the CPU.

SMP v1 existed on GPUs only, so its scripts say `torch.cuda.set_device(smp.local_rank())` and `.to("cuda")` without
asking. Installed by importing `smdistributed` on a machine without a GPU, and nowhere else: such a script could only
fail there. `torch.cuda.is_available()` keeps telling the truth. `SMPKIT_CUDA_ON_CPU=0` switches all of it off, and
`SMPKIT_CUDA_ON_CPU=1` is for scripts that insist on CUDA: `pretended_cuda`. On a machine with a GPU that torch cannot
use a script shall fail, unless `SMPKIT_CUDA_ON_CPU=1` says that the CPU is meant.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from traceback import extract_tb
from types import TracebackType
from typing import Final

import torch

from smpkit.torch.compat import pretended_cuda
from smpkit.torch.compat.devices_in_calls import CudaToCpuMode, answering
from smpkit.torch.distributed import gpus

__all__ = ["explain_failures", "install", "installed", "prepare_process"]

_log = logging.getLogger("smpkit")

_NO_OPS: Final = ("empty_cache", "reset_peak_memory_stats", "set_device", "synchronize")
"""Functions of `torch.cuda` that fail without a GPU, or may, and ask for what a CPU has no need of."""

_installed = False

_MODE: Final = CudaToCpuMode()


def install(environ: Mapping[str, str] = os.environ) -> None:
    """Begin, if there is no GPU, or it shall not be used, and nobody said no; once."""
    global _installed  # noqa: PLW0603
    if _installed or torch.cuda.is_available() or environ.get(gpus.CUDA_ON_CPU) == "0" or gpus.wants_gpu(environ):
        return
    _installed = True
    if environ.get(gpus.CUDA_ON_CPU) == "1":
        pretended_cuda.install()
        return
    for name in _NO_OPS:
        setattr(torch.cuda, name, answering())
    torch.cuda.current_device = answering(lambda: 0)
    _MODE.__enter__()  # type: ignore[no-untyped-call]
    explain_failures()
    if environ.get("RANK", "0") == "0":
        _log.warning("there is no GPU: what the script puts on `cuda` stays on the CPU, unless SMPKIT_CUDA_ON_CPU=0")


def explain_failures() -> None:
    """From now on, say what lets a script run on the CPU that an exception about CUDA ends."""
    outer = sys.excepthook
    if outer.__module__ == __name__:
        return

    def explained(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        outer(kind, error, traceback)
        if _is_about_cuda(error, traceback):
            _log.error("note: %s", _FLAG)

    sys.excepthook = explained


_FLAG: Final = (
    "the script asks for CUDA, which this machine does not have; `smpkit compat --cuda-on-cpu -- COMMAND`, or"
    " SMPKIT_CUDA_ON_CPU=1 in the environment, lets such scripts use the CPU"
)


def _is_about_cuda(error: BaseException, traceback: TracebackType | None) -> bool:
    """Return whether the message, or the line that failed (`assert torch.cuda.is_available()`), speaks of CUDA."""
    frames = extract_tb(traceback)
    line = (frames[-1].line or "") if frames else ""
    return "cuda" in f"{error} {line}".lower()


def prepare_process(_: object = None) -> None:
    """Do what can be done before a script imports `smdistributed` (called when it has imported torch)."""
    if os.environ.get(gpus.CUDA_ON_CPU) == "1":
        install()
    elif not torch.cuda.is_available():
        explain_failures()


def installed() -> bool:
    """Whether `cuda` means the CPU in this process."""
    return _installed
