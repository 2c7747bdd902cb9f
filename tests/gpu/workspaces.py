"""What cuBLAS takes of torch's memory by itself, so that bounds of a peak are about ours."""

from __future__ import annotations

import gc

import torch
from torch import nn

__all__ = ["workspace_bytes"]


def workspace_bytes(dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes that stay allocated when a plain layer has run forward and backward, and is gone.

    That is a workspace for each thread that calls cuBLAS and each stream: 32 MiB on Hopper, for the thread of forward
    and for autograd's. They stay, so call this before what is measured.
    """
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    layer = nn.Linear(256, 256, device="cuda", dtype=dtype)
    layer(torch.ones(64, 256, device="cuda", dtype=dtype)).sum().backward()
    del layer
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before
