"""What to try after a failure that does not say so itself."""

from __future__ import annotations

import re
import signal

from smpkit_container.root_cause import RankEnd

__all__ = ["hint_of", "ran_out_of_memory"]

_MEMORY = (
    "use more microbatches, checkpoint or offload activations, or raise a degree; `smpkit plan --model` shows what a"
    " rank needs"
)
_NO_GPU = re.compile(r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available")
_OUT_OF_MEMORY = re.compile(r"(?:^|\.)OutOfMemoryError$|^MemoryError$|DefaultCPUAllocator: can't allocate memory")
_UNKNOWN_ARGUMENT = re.compile(r"(?:unrecognized arguments|[Nn]o such option):? (--?[\w-]+)")
_MISSING_ARGUMENT = re.compile(r"error: the following arguments are required: (--?[\w-]+)")


def hint_of(end: RankEnd) -> str | None:
    """Return the hint of the rank's own error, or what is known to help after such an end."""
    error = end.error
    if error is not None and error.hint:
        return error.hint
    if error is not None and error.name == "SystemExit" and end.exit_code == 2:
        return _argument_hint("\n".join(end.last_lines))
    if error is not None and _NO_GPU.search(error.message):
        return (
            'torch has no GPU here: leave `.to("cuda")` out, as `smp.DistributedModel` moves the model and the step'
            " its inputs to the rank's device, or write `.to(smp.state.device)`"
        )
    if not ran_out_of_memory(end):
        return None
    return _MEMORY if end.doing is None or not end.doing.remedy else end.doing.remedy


def ran_out_of_memory(end: RankEnd) -> bool:
    """Tell whether a rank ended for want of memory, or probably did: the kernel kills without a word."""
    error = end.error
    if error is None:
        return end.status == -signal.SIGKILL
    return any(_OUT_OF_MEMORY.search(text) for text in (error.name, error.message))


def _argument_hint(said: str) -> str | None:
    """Explain an argument that the script does not know, or misses: the launcher made them of hyperparameters."""
    if (missing := _MISSING_ARGUMENT.search(said)) is not None:
        name = missing[1].lstrip("-").replace("-", "_")
        return f"the job's hyperparameters become arguments: write `hyperparameters: {{{name}: ...}}` in the job file"
    if (unknown := _UNKNOWN_ARGUMENT.search(said)) is not None:
        name = unknown[1].lstrip("-")
        return (
            f"the job's hyperparameters become arguments: let the script take `{unknown[1]}`, or remove `{name}` from"
            " `hyperparameters`"
        )
    return None
