"""The queries of `smp`: ranks, sizes and groups of this process. Each asks `smp.state`."""

from __future__ import annotations

import torch.distributed as dist

from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state

__all__ = ["is_initialized", "is_tracing", "local_rank", "local_size", "rank", "size", "state"]
__all__ += ["dp_rank", "dp_size", "mp_rank", "mp_size", "pp_rank", "pp_size", "tp_rank", "tp_size"]
__all__ += ["get_dp_group", "get_mp_group", "get_pp_group", "get_rdp_group", "get_tp_group", "get_world_process_group"]
__all__ += ["get_dp_process_group", "get_mp_process_group", "get_pp_process_group", "get_tp_process_group"]
__all__ += ["get_rdp_process_group", "rdp_rank", "rdp_size"]


def is_initialized() -> bool:
    """Return whether `smp.init()` has been called."""
    return state.initialized


def is_tracing() -> bool:
    """Return whether the step runs on tensors without data, to measure the model before it is partitioned."""
    return state.tracing


def rank() -> int:
    """Return the global rank."""
    return state.rank


def size() -> int:
    """Return how many ranks the job has."""
    return state.size


def local_rank() -> int:
    """Return the rank among those of this host."""
    return state.local_rank


def local_size() -> int:
    """Return how many ranks this host has."""
    return state.local_size


def mp_rank() -> int:
    """Return the position in `MP_GROUP`: the ranks that together hold one model."""
    return state.mp_rank


def mp_size() -> int:
    """Return how many ranks together hold one model."""
    return state.mp_size


def dp_rank() -> int:
    """Return the position in `DP_GROUP`: the ranks that hold (parts of) the same pipeline partition."""
    return state.dp_rank


def dp_size() -> int:
    """Return how many ranks hold (parts of) the same pipeline partition."""
    return state.dp_size


def pp_rank() -> int:
    """Return the pipeline partition of this rank."""
    return state.pp_rank


def pp_size() -> int:
    """Return how many pipeline partitions there are."""
    return state.pp_size


def tp_rank() -> int:
    """Return the position in `TP_GROUP`: the ranks that share distributed modules."""
    return state.tp_rank


def tp_size() -> int:
    """Return how many ranks share distributed modules."""
    return state.tp_size


def rdp_rank() -> int:
    """Return the position in `RDP_GROUP`: exact replicas."""
    return state.rdp_rank


def rdp_size() -> int:
    """Return how many exact replicas there are."""
    return state.rdp_size


def get_mp_group() -> list[int]:
    """Return the global ranks of this rank's `MP_GROUP`."""
    return state.group(CommGroup.MP_GROUP)


def get_dp_group() -> list[int]:
    """Return the global ranks of this rank's `DP_GROUP`."""
    return state.group(CommGroup.DP_GROUP)


def get_tp_group() -> list[int]:
    """Return the global ranks of this rank's `TP_GROUP`."""
    return state.group(CommGroup.TP_GROUP)


def get_pp_group() -> list[int]:
    """Return the global ranks of this rank's `PP_GROUP`."""
    return state.group(CommGroup.PP_GROUP)


def get_rdp_group() -> list[int]:
    """Return the global ranks of this rank's `RDP_GROUP`."""
    return state.group(CommGroup.RDP_GROUP)


def get_world_process_group() -> dist.ProcessGroup:
    """Return the group of all ranks, for `torch.distributed`."""
    return state.process_group(CommGroup.WORLD)


def get_mp_process_group() -> dist.ProcessGroup:
    """Return this rank's `MP_GROUP`, for `torch.distributed`."""
    return state.process_group(CommGroup.MP_GROUP)


def get_dp_process_group() -> dist.ProcessGroup:
    """Return this rank's `DP_GROUP`, for `torch.distributed`."""
    return state.process_group(CommGroup.DP_GROUP)


def get_tp_process_group() -> dist.ProcessGroup:
    """Return this rank's `TP_GROUP`, for `torch.distributed`."""
    return state.process_group(CommGroup.TP_GROUP)


def get_pp_process_group() -> dist.ProcessGroup:
    """Return this rank's `PP_GROUP`, for `torch.distributed`."""
    return state.process_group(CommGroup.PP_GROUP)


def get_rdp_process_group() -> dist.ProcessGroup:
    """Return this rank's `RDP_GROUP`, for `torch.distributed`."""
    return state.process_group(CommGroup.RDP_GROUP)
