"""Ranks that share the GPU: processes of their own, gloo between them, or a NCCL that allows it.

On the simulated device each has a device of its own, and the process group for it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.on_gpu.parts import NCCL
from tests.device.device import gpu
from tests.device.on_sim import call_pickled
from tests.ranks import run_ranks


def run_on_gpu(function: Callable[..., Any], *args: Any, size: int = 2, timeout: float = 120) -> list[Any]:
    """Call `function(*args)` on ranks and return their results, tensors on the host; see `tests.ranks.run_ranks`."""
    shared = {"SMPKIT_SHARED_GPU_NCCL": "1"} if os.environ.get(NCCL) == "1" else {}
    call = pickle.dumps((_with_gpu, {"function": function, "args": args}))
    return run_ranks(call_pickled, size, call, timeout=timeout, env=shared)


def _with_gpu(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    assert torch.get_device_module(gpu()).is_available(), "this rank sees no GPU"
    return function(*args)
