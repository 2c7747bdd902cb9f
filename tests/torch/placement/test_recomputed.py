"""What the cost pass says of checkpointed layers, inside of units and around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import smpkit.torch as smp
from smpkit.plan.partition.assignment import UnitCost
from smpkit.torch.core.offload_hooks import current_offloader
from smpkit.torch.describe import describe

_INPUT = 16 * 64 * 4
_HIDDEN = 16 * 256 * 4
_FLOPS = 2 * 2 * 16 * 64 * 256


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def _costs(*layers: nn.Module, checkpointed: bool = True) -> list[UnitCost]:
    def factory() -> tuple[nn.Module, torch.Tensor]:
        model = nn.Sequential(*layers)
        if checkpointed:
            smp.set_activation_checkpointing(model)
        return model, torch.zeros(16, 64)

    return describe(factory).costs


def test_a_checkpointed_unit_keeps_its_boundary_and_makes_the_rest_again() -> None:
    for cost in _costs(_Block(), _Block()):
        assert cost.activation_bytes == cost.boundary_bytes == _INPUT
        assert cost.recomputed_flops == cost.flops == _FLOPS
        # Two hidden tensors, what the second layer gives, and the sum.
        assert cost.recomputed_bytes == 2 * _HIDDEN + 2 * _INPUT


def test_what_checkpointing_spares_is_what_would_be_kept_without_it() -> None:
    for checkpointed, plain in zip(_costs(_Block()), _costs(_Block(), checkpointed=False), strict=True):
        assert checkpointed.spared_bytes == plain.activation_bytes == _INPUT + 2 * _HIDDEN
        assert plain.spared_bytes == 0


class Checkpointing(nn.Module):
    """Two blocks in checkpoints of torch's or smpkit's."""

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(64, 64), nn.ModuleList([_Block(), _Block()])
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_own_checkpoint_is_planned_as_smpkits(reentrant: bool) -> None:
    def costs(run: Callable[..., torch.Tensor]) -> list[UnitCost]:
        return describe(lambda: (Checkpointing(run), torch.zeros(16, 64))).costs

    expected, found = costs(smp.checkpoint), costs(partial(checkpoint, use_reentrant=reentrant))
    if reentrant:  # it saves nothing of which to tell
        expected = [replace(cost, spared_bytes=0) for cost in expected]
    assert found == expected


def test_a_checkpointed_layer_of_several_units_is_counted_with_the_first() -> None:
    up, down = _costs(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
    assert (up.activation_bytes, up.boundary_bytes, up.recomputed_flops) == (_INPUT, _INPUT, _FLOPS)
    assert (down.activation_bytes, down.boundary_bytes, down.recomputed_flops) == (0, 0, 0)
    assert up.flops + down.flops == _FLOPS


def test_nothing_is_recomputed_without_checkpointing() -> None:
    (cost,) = _costs(_Block(), checkpointed=False)
    assert (cost.boundary_bytes, cost.recomputed_bytes, cost.recomputed_flops) == (0, 0, 0)
    assert cost.activation_bytes > _INPUT


def test_nobody_is_told_of_boundaries_afterwards() -> None:
    before = current_offloader()
    _costs(_Block())
    assert current_offloader() is before
