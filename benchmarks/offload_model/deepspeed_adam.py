"""DeepSpeed's step on the CPU, compiled in bounded time.

It compiles when its first optimizer is made, which takes minutes on a small machine; and a compilation that was killed
leaves a lock behind that every later one waits for, for ever. So it happens in a process of its own first, which is
ended with its compilers when its time is up, and leaves no lock.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

OPTIONS = {"lr": 1e-3, "weight_decay": 0.01}
_BUILD = """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))])
"""


def why_not(seconds: float) -> str | None:
    """Compile it unless it is compiled; return why it cannot be used, or None.

    Args:
        seconds: the most that compiling may take.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    lock = _folder() / "lock"
    if lock.exists():
        return f"{lock} is there: it is being compiled; if not, a compilation was killed and the file is to be removed"
    command = [sys.executable, "-W", "ignore", "-c", _BUILD]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # not SIGKILL: ninja ends its compilers, which are groups of their own
        process.communicate()
        lock.unlink(missing_ok=True)
        return f"it was not compiled within {seconds:.0f} s (--build-seconds)"
    return None if process.returncode == 0 else f"it cannot be compiled: {errors.strip().splitlines()[-1]}"


def _folder() -> Path:
    """Return where torch compiles extensions of this name."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("cpu_adam", verbose=False))


def step_of(master: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> Callable[[], object]:
    """Return a step on this memory, the states' too."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

    parameter = torch.nn.Parameter(master)
    parameter.grad = gradient
    optimizer = DeepSpeedCPUAdam([parameter], **OPTIONS)
    step: Callable[[], object] = optimizer.step
    step()  # makes states of its own, in memory of torch
    optimizer.state[parameter].update(exp_avg=first, exp_avg_sq=second)
    return step
