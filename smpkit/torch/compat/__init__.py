"""What old scripts and libraries expect: `torch.cuda` on the CPU, Hugging Face's Trainer, SMP v1's helpers."""

from __future__ import annotations

from smpkit.drop_in import after_import
from smpkit.torch.compat import cuda_on_cpu

__all__ = ["prepare"]


def prepare() -> None:
    """Set up what old scripts need beside the API (called by `import smdistributed.modelparallel.torch`).

    `cuda` means the CPU on a machine without a GPU, and Hugging Face's `Trainer` is corrected when it is loaded.
    """
    cuda_on_cpu.install()
    after_import.install()
