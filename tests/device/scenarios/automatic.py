"""Layers that keep, recompute or offload as a script says, or as a job chooses while it runs, on simulated devices."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from smpkit.torch.offload import link
from tests.device.scenarios.common import WIDTH, add, assert_same
from tests.torch.steps import train_step

ROOM_OF_A_STAGE = 255_000
"""Bytes with which the second stage of `smp_chosen_by_stages` keeps two of its three layers: the first its only one."""


class Small(nn.Module):
    """A layer of few operators."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(functional.gelu(self.linear(x)), self.dropout)


class Stack(nn.Module):
    """Layers that can be checkpointed in groups, or inside of each other."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(Small(dropout), Small(0.0)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def smp_choose(
    config: Mapping[str, Any], strategy: str, room: int = 0
) -> tuple[list[Tensor], int, list[dict[str, str]]]:
    """Train; return losses and gradients of all steps, the peak of the last, and what layers did in each.

    Args:
        room: bytes for all of it; 0: no bound.
    """
    gc.collect()
    before = torch.accelerator.memory_allocated()  # trainings before this one may have left something
    smp.init({**config, **({"memory_budget_gib": (before + room) / 2**30} if room else {})})
    with torch.device("cpu"):
        torch.manual_seed(0)
        module = Stack(0.3)
        x = torch.randn(8, 32, WIDTH)
    smp.set_activation_checkpointing(module.layers, strategy=strategy)
    if "default_partition" in config:
        smp.set_partition(module.layers[0], 0)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), foreach=False))
    found, choices = [], []
    for number in range(7):
        torch.manual_seed(number)
        optimizer.zero_grad()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        passed = x.clone(memory_format=torch.contiguous_format).pin_memory()
        loss = train_step(model, passed)
        passed.fill_(float("nan"))  # the user's memory is the user's again
        found.append(loss.reduce_mean().detach().cpu())
        found += [each.grad.cpu() for _, each in model.local_named_parameters() if each.grad is not None]
        optimizer.step()
        choices.append(model.activation_choices())
    torch.accelerator.synchronize()
    peak = torch.accelerator.max_memory_allocated() - before
    smp.shutdown()
    return found, peak, choices


def smp_offloaded() -> None:
    """Compare a training with and without `offload_activations`."""
    expected, *_ = smp_choose({"microbatches": 2}, "group_2")
    with mock.patch.object(link.AcceleratorLink, "min_bytes", 0):
        assert_same(smp_choose({"microbatches": 2, "offload_activations": True}, "group_2")[0], expected)


def smp_chosen(strategy: str, offloads: bool | str, share: float, words: str) -> None:
    """Compare a training whose layers are chosen for with one that recomputes all of them.

    Args:
        share: of the memory between what the smallest choice takes and what all layers kept would take. Where layers
            are offloaded, the engine takes some, too.
        words: each of them must be the choice for a layer.
    """
    plain = {"microbatches": 2}
    expected, least, _ = smp_choose(plain, "each")
    _, most, _ = smp_choose(plain, "auto")
    room = int(least + share * (most - least))
    with mock.patch.object(link.AcceleratorLink, "min_bytes", 0):
        found, peak, choices = smp_choose({**plain, "offload_activations": offloads}, strategy, room)
    assert_same(found, expected)
    assert peak <= room, f"a peak of {peak} within {room}"
    assert set(words.split()) <= set(choices[-1].values()), choices


def smp_chosen_by_stages() -> None:
    """Let two stages choose for themselves: the first keeps its only layer, the second two of its three."""
    config: dict[str, Any] = {"microbatches": 4, "pipeline_parallel_degree": 2, "timeout_seconds": 30}
    config |= {"auto_partition": False, "default_partition": 1}
    expected, _, _ = smp_choose(config, "each")
    found, peak, choices = smp_choose(config, "auto", ROOM_OF_A_STAGE)
    assert_same(found, expected)
    assert peak <= ROOM_OF_A_STAGE
    assert [*choices[-1].values()].count("keep") == (2 if len(choices[-1]) > 1 else 1), choices


add("step, group_2", smp_offloaded, is_quick=True)
add("auto, kept and recomputed", partial(smp_chosen, "auto", False, 0.6, "keep recompute"))
add("auto, kept and offloaded", partial(smp_chosen, "auto", True, 1.1, "keep offload"))
add("auto, of all three", partial(smp_chosen, "auto", "auto", 0.9, "keep"))
add("offloading auto", partial(smp_chosen, "each", "auto", 0.5, ""))
add("auto, stages", smp_chosen_by_stages, ranks=2, is_quick=True)
