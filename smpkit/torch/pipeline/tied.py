"""Tensors that modules on several pipeline ranks share: each rank has its own, and only gradients are added up.

An optimizer keeps such copies equal. A module that changes its copy in place, a codebook say, changes it on its rank
alone: in one process the other module would see it. That is refused as soon as it is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.partitioning.apply import names_by_module, pp_rank_of
from smpkit.torch.pipeline.messages import version_of
from smpkit.torch.pipeline.specs import storage_of
from smpkit.torch.rendezvous import name_ranks

__all__ = ["TiedTensor", "find_tied"]


@dataclass(frozen=True)
class TiedTensor:
    """A parameter or buffer of a module on this rank that lies in the same memory as one of another rank's module."""

    name: str
    module: nn.Module
    key: str
    ranks: list[int]

    @property
    def version(self) -> int:
        """How often it has been changed in place."""
        held = {**self.module._parameters, **self.module._buffers}
        tensor = held.get(self.key)
        return 0 if tensor is None else version_of(tensor)

    def in_place_error(self, rank: int) -> UsageError:
        """Return the error for a change in place by what rank `rank` runs."""
        return UsageError(
            f"`{self.name}`, which modules on pipeline {name_ranks(self.ranks)} share, was changed in place by one on"
            f" rank {rank}: the others keep it as it was",
            hint="put the modules that share it on one rank: auto_partition: false, and smp.set_partition for each",
        )


def find_tied(root: nn.Module, placement: Mapping[str, int], rank: int) -> list[TiedTensor]:
    """Return what this rank's modules share with those of others; called while every rank has the whole model."""
    ranks_by_memory: dict[object, set[int]] = {}
    found: list[tuple[str, nn.Module, str, object, set[int]]] = []
    for module, names in names_by_module(root).items():
        pp_ranks = {owner for name in names if (owner := pp_rank_of(name, placement)) is not None}
        if not pp_ranks:
            continue
        own: list[tuple[str, torch.Tensor]] = list(module.named_parameters(recurse=False))
        for key, tensor in [*own, *module.named_buffers(recurse=False)]:
            # Without memory (delayed initialisation, no elements) only the object can be the same.
            memory = id(tensor) if tensor.is_meta or not tensor.numel() else storage_of(tensor)
            ranks_by_memory.setdefault(memory, set()).update(pp_ranks)
            found.append((f"{names[0]}.{key}", module, key, memory, pp_ranks))
    return [
        TiedTensor(name, module, key, sorted(ranks_by_memory[memory]))
        for name, module, key, memory, pp_ranks in found
        if rank in pp_ranks and len(ranks_by_memory[memory]) > 1
    ]
