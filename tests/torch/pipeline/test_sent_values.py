"""Values on their way: kept as long as somebody needs them and no longer, and never torn by a change in place."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.core.tensor_spec import TensorSpec
from smpkit.torch.pipeline.message_order import P2PTransfer
from tests.ranks import RankFailed, run_ranks
from tests.torch.pipeline.test_transport import open_transport

NUM_MICROBATCHES = 6


def change_before_it_is_gone() -> None:
    transport = open_transport()
    transfer = P2PTransfer(0, 0, 1, 0, 0, TensorSpec((3,), (1,), torch.float32, requires_grad=False), "layers.1")
    if smp.pp_rank() == 0:
        value = torch.zeros(3)
        transport.send(value.detach(), 2, transfer)
        value.add_(1)
        with pytest.raises(UsageError, match=r"on its way to pipeline rank 1: forward of microbatch 2 .*`layers.1`"):
            transport.end_step()
    else:
        transport.receive(2, transfer)


def test_an_unforeseen_change_of_a_value_on_its_way_is_an_error_that_names_it() -> None:
    run_ranks(change_before_it_is_gone, 2)


def send_to_the_dead() -> None:
    transport = open_transport()
    transfer = P2PTransfer(0, 0, 1, 0, 0, TensorSpec((1 << 20,), (1,), torch.float32, requires_grad=False), "layers.7")
    if smp.pp_rank() == 1:
        transport.receive(0, transfer)  # so that both have met, and rank 0 is soon through
        raise ValueError("gone")
    for microbatch in range(1000):
        transport.send(torch.zeros(1 << 20), microbatch, transfer)
        transport.end_step()


def test_a_send_that_fails_says_what_and_to_whom() -> None:
    with pytest.raises(RankFailed, match=r"rank 0 lost rank 1 in forward of microbatch \d+ .*for `layers.7`"):
        run_ranks(send_to_the_dead, 2)


# --- memory ---------------------------------------------------------------------------------------------------------


class Doubling(nn.Module):
    """Its backward needs no activation, so nobody must keep what it made once that has arrived."""

    alive: ClassVar[weakref.WeakSet[Tensor]] = weakref.WeakSet()
    peak = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        made = x + self.weight
        Doubling.alive.add(made)
        Doubling.peak = max(Doubling.peak, len(Doubling.alive))
        return made


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).mean()
    model.backward(loss)
    return loss


def count_alive(pipeline: str) -> int:
    """Return how many results of this rank's layer were alive at once in the third step."""
    smp.init(
        {"pipeline_parallel_degree": 2, "microbatches": NUM_MICROBATCHES, "pipeline": pipeline, "ddp": True}
        | {"auto_partition": False, "default_partition": 0, "active_microbatches": NUM_MICROBATCHES}
    )
    module = nn.Sequential(Doubling(), Doubling())
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)
    gc.disable()  # what is free must be so at once
    for _ in range(3):
        Doubling.alive.clear()
        Doubling.peak = 0
        train_step(model, torch.zeros(NUM_MICROBATCHES, 4))
    assert not Doubling.alive
    smp.shutdown()
    return Doubling.peak


def test_a_sent_value_that_backward_does_not_need_is_free_when_it_has_arrived() -> None:
    first, second = run_ranks(count_alive, 2, "interleaved")
    # Rank 0 learns with each gradient what has arrived: at most what is on its way, and the one that is being made.
    assert first <= 4
    assert second == 1
