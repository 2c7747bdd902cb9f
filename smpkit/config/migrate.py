"""Keys of SMP v2 and of v1's past, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smpkit.errors import Problem

__all__ = ["HISTORIC", "V2_KEYS", "Counterpart", "from_v2"]


HISTORIC: Mapping[str, str] = {
    "deterministic_server": "smpkit has no server: every rank follows the same static schedule",
    "overlapping_allreduce": "it is an argument of `smp.DistributedModel` now",
    "trace_device": "it is an argument of `smp.DistributedModel` now",
    "use_times": "partitions are decided by estimated costs, which do not change between runs",
}
"""Keys of early releases that mean nothing as parameters any more: key -> where the meaning went."""


@dataclass(frozen=True)
class Counterpart:
    """What an SMP v2 key is in v1: a key (or None if there is nothing like it) and what to know about the change."""

    key: str | None
    note: str

    @property
    def hint(self) -> str:
        return f"a key of SMP v2: {self.note}"


V2_KEYS: Mapping[str, Counterpart] = {
    "hybrid_shard_degree": Counterpart(
        "sharded_data_parallel_degree",
        "use `sharded_data_parallel_degree`, where 1 means no sharding",
    ),
    "sm_activation_offloading": Counterpart(
        "offload_activations",
        "use `offload_activations`, which is off by default",
    ),
    "fsdp_cache_flush_warnings": Counterpart(None, "there is no FSDP allocator to warn about; remove it"),
    "allow_empty_shards": Counterpart(None, "empty shards are always allowed; remove it"),
    "context_parallel_degree": Counterpart(None, "v1 has no context parallelism; remove it"),
    "expert_parallel_degree": Counterpart(None, "v1 has no expert parallelism; remove it"),
    "random_seed": Counterpart("tensor_parallel_seed", "use `tensor_parallel_seed`"),
}
"""Keys that only SMP v2 has. `tensor_parallel_degree` and `activation_loading_horizon` exist in both."""


def from_v2(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Translate SMP v2 parameters to v1 ones; the notes say what changed its meaning or has no counterpart.

    The result still has to be validated, as its values are taken over unseen.
    """
    translated: dict[str, Any] = {}
    notes: list[Problem] = []
    for key, value in parameters.items():
        if key == "activation_loading_horizon":
            notes.append(Problem((key,), "left out: v2 counts layers, v1 counts pipeline tasks", "v1's default is 4"))
        elif key == "hybrid_shard_degree" and value == 0:
            notes.append(Problem((key,), "left out: 0 lets v2 choose", "set `sharded_data_parallel_degree`"))
        elif key in V2_KEYS:
            counterpart = V2_KEYS[key]
            notes.append(Problem((key,), counterpart.note))
            if counterpart.key is not None:
                translated[counterpart.key] = value
        else:
            translated[key] = value
    if _needs_ddp(translated):
        translated["ddp"] = True
        notes.append(Problem(("ddp",), "added: v1 asks for `ddp: true` with tensor or sharded data parallelism"))
    return translated, notes


def _needs_ddp(parameters: Mapping[str, Any]) -> bool:
    degrees = (parameters.get("tensor_parallel_degree"), parameters.get("sharded_data_parallel_degree"))
    return any(isinstance(degree, int) and degree > 1 for degree in degrees) and "ddp" not in parameters
