"""Apply an assignment: every rank keeps the weights of its own units, and those that several ranks use."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from smpkit.torch.partitioning.delayed import initialize
from smpkit.torch.tensor_parallel.shards import copy_mark_to

__all__ = ["holders_of", "keep_local_parameters", "names_by_module", "pp_rank_of", "running_pp_rank_of"]


def holders_of(root: nn.Module, placement: Mapping[str, int], size: int) -> dict[int, frozenset[int]]:
    """Return, by parameter (its id), the pipeline ranks that hold it.

    A parameter of one unit is on one rank; one that several units share is on each of theirs; one that belongs to a
    module that spans ranks is on all.
    """
    holders: dict[int, frozenset[int]] = {}
    for unit, rank in placement.items():
        for parameter in root.get_submodule(unit).parameters():
            holders[id(parameter)] = holders.get(id(parameter), frozenset()) | {rank}
    for parameter in root.parameters():
        holders.setdefault(id(parameter), frozenset(range(size)))
    return holders


def keep_local_parameters(
    root: nn.Module,
    placement: Mapping[str, int],
    holders: Mapping[int, frozenset[int]],
    rank: int,
    device: torch.device,
) -> None:
    """Move what this rank holds to its device and let go of the memory of everything else.

    Parameters stay the same objects, which optimizers made earlier hold; those of other ranks keep their shape, over
    one element of NaN, so that using one by mistake shows.
    """
    held = [parameter for parameter in root.parameters() if rank in holders[id(parameter)]]
    initialize(root, held, device, torch.initial_seed())
    for parameter in root.parameters():
        if rank in holders[id(parameter)]:
            parameter.data = parameter.data.to(device)
        else:
            filler = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
            parameter.data = torch.full((), filler, dtype=parameter.dtype, device=parameter.device).expand(
                parameter.shape
            )
    for module, names in names_by_module(root).items():
        is_here = any(pp_rank_of(name, placement) in (None, rank) for name in names)
        target = device if is_here else torch.device("meta")
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.device != target:
                module._buffers[key] = copy_mark_to(buffer.to(target), buffer)


def names_by_module(root: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every module with all of its names: layers on several ranks may share one."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def pp_rank_of(name: str, placement: Mapping[str, int]) -> int | None:
    """Return the rank that holds a module; None if it lies above those that are placed."""
    while True:
        if name in placement:
            return placement[name]
        if not name:
            return None
        name = name.rpartition(".")[0]


def running_pp_rank_of(name: str, placement: Mapping[str, int]) -> int | None:
    """Return the rank whose calls of a module change its buffers; None if all ranks run it.

    Besides what is placed, a module above whose placed parts all lie on one rank runs there alone.
    """
    pp_rank = pp_rank_of(name, placement)
    if pp_rank is not None:
        return pp_rank
    below = f"{name}." if name else ""
    pp_ranks = {rank for unit, rank in placement.items() if unit.startswith(below)}
    return pp_ranks.pop() if len(pp_ranks) == 1 else None
