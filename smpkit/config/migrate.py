"""Keys of SMP v2 and of v1's past, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["HISTORIC", "V2_KEYS"]


HISTORIC: Mapping[str, str] = {
    "deterministic_server": "smpkit has no server: every rank follows the same static schedule",
    "overlapping_allreduce": "it is an argument of `smp.DistributedModel` now",
    "trace_device": "it is an argument of `smp.DistributedModel` now",
    "use_times": "partitions are decided by estimated costs, which do not change between runs",
}
"""Keys of early releases that mean nothing as parameters any more: key -> where the meaning went."""


V2_KEYS: Mapping[str, str] = {
    "hybrid_shard_degree": "use `sharded_data_parallel_degree`, where 1 means no sharding",
    "sm_activation_offloading": "use `offload_activations`, which is off by default",
    "fsdp_cache_flush_warnings": "there is no FSDP allocator to warn about; remove it",
    "allow_empty_shards": "empty shards are always allowed; remove it",
    "context_parallel_degree": "v1 has no context parallelism; remove it",
    "expert_parallel_degree": "v1 has no expert parallelism; remove it",
    "random_seed": "use `tensor_parallel_seed`",
}
"""Keys that only SMP v2 has, and what to do; `tensor_parallel_degree` and `activation_loading_horizon` are in both."""
