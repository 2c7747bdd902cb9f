"""What importing `smdistributed.modelparallel.torch` sets up beside the API, so that old scripts run as they are."""

from __future__ import annotations

from smpkit.torch.compat import cuda_on_cpu
from smpkit.torch.compat import trainer as huggingface_trainer

__all__ = ["prepare"]


def prepare() -> None:
    """Let `cuda` mean the CPU on a machine without a GPU, and correct Hugging Face's `Trainer` when it is loaded."""
    cuda_on_cpu.install()
    huggingface_trainer.install()
