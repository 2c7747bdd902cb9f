"""What cuBLAS takes of torch's memory by itself, so that bounds of a peak are about ours."""

from __future__ import annotations

import gc

import torch
from torch import nn

from tests.device.device import allocated_bytes, gpu, synchronize

__all__ = ["workspace_bytes"]


def workspace_bytes(dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes that stay allocated when a plain layer has run forward and backward, and is gone.

    That is a workspace for each thread that calls cuBLAS and each stream: 32 MiB on Hopper, for the thread of forward
    and for autograd's. They stay, so call this before what is measured.
    """
    gc.collect()
    synchronize()
    before = allocated_bytes()
    layer = nn.Linear(256, 256, device=gpu(), dtype=dtype)
    layer(torch.ones(64, 256, device=gpu(), dtype=dtype)).sum().backward()
    del layer
    gc.collect()
    synchronize()
    return allocated_bytes() - before
