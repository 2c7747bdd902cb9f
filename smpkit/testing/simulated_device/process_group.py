"""The process group of the simulated device, which torch.distributed takes for tensors of it: backend "sim"."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed's, which its types hide


def register() -> None:
    """Make `sim` the backend of tensors of the simulated device, as `nccl` is of CUDA's."""
    if dist.is_available() and not hasattr(dist.Backend, "SIM"):
        dist.Backend.register_backend("sim", _create, extended_api=True, devices=["sim"])


def _create(options: Any, _: object) -> Any:
    """Return a backend, for torch, which calls this in each rank of a new group."""
    rank, size = options.group_rank, options.group_size
    # Gloo of its own: the threads that carry messages must not come between the operations of the user's gloo.
    store = PrefixStore("sim", options.store)
    carrier = dist.ProcessGroupGloo(store, rank, size, options.timeout)
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, carrier)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    torch.ops.sim.add_backend(group.boxed(), options.group_id, options.timeout.total_seconds())
    return group._get_backend(torch.device("sim"))
