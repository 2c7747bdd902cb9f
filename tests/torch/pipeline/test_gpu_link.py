"""GPUs send each other messages in whatever order ranks need them, and training over them gives the same results.

Here gloo takes nccl's place. Both pair sends and receives in the order in which they are begun, as long as all of them
have one tag.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import smpkit.torch as smp
from smpkit.errors import DeadlineError
from smpkit.plan.mesh import CommGroup
from smpkit.testing.ranks import RankFailed
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import spec_of
from smpkit.torch.distributed.init import message_groups
from smpkit.torch.pipeline.messages import Message, P2PTransfer
from smpkit.torch.pipeline.transport import GpuLink, Transport
from tests.models import CASES, MODELS, Case
from tests.ranks import run_ranks
from tests.torch.pipeline.test_rerecorded import SKIPPING, WAYS
from tests.torch.steps import on_ranks
from tests.train import Trace, Way, same, train, train_with_sleeps

VALUES = {
    0: torch.arange(6.0).view(2, 3),
    1: torch.arange(6.0).view(2, 3).t(),
    2: torch.tensor([[1 + 2j]], dtype=torch.complex64).conj(),
    3: torch.empty(0, 3),
    4: torch.tensor(True),
    5: torch.randn(300, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
}


def connected(**config: Any) -> Transport:
    """Return the transport of two ranks whose GPUs are connected."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, **config})
    ranks = state.group(CommGroup.PP_GROUP)
    transport = Transport(state.process_group(CommGroup.PP_GROUP), ranks, state.device, message_groups(tuple(ranks)))
    transport.connect([move_of(0)])
    return transport


def value_of(number: int) -> torch.Tensor:
    """Return a value, where this rank computes."""
    return VALUES[number].to(state.device)


def move_of(number: int) -> P2PTransfer:
    return P2PTransfer(number, 0, 1, 0, 0, spec_of(VALUES[number]).as_sent, "layers.1")


def message_of(number: int, *, backward: bool = False) -> Message:
    return Message(0, move_of(number), backward)


@pytest.mark.also_on("sim:copies:0")
@on_ranks(2)
def test_values_are_taken_in_another_order_than_they_are_sent() -> None:
    """Send gradients back, too, one of which is None."""
    transport = connected()
    if smp.pp_rank() == 0:
        for number in VALUES:
            transport.send(value_of(number), message_of(number))
        for number in (5, 0):
            torch.testing.assert_close(transport.receive(message_of(number, backward=True)), value_of(number) * 2)
        assert transport.receive(message_of(1, backward=True)) is None
    else:
        for number in (4, 5, 2, 0, 3, 1):
            arrived: Any = transport.receive(message_of(number))
            assert torch.equal(arrived, value_of(number))
            assert (arrived.dtype, arrived.is_contiguous()) == (VALUES[number].dtype, number != 1)
        transport.send(value_of(0) * 2, message_of(0, backward=True))
        transport.send(None, message_of(1, backward=True))
        transport.send(value_of(5) * 2, message_of(5, backward=True))
        assert transport.gpus is not None
        assert len(transport.gpus._sent[0]) == 2, "a gradient of None is a header alone"
    transport.end_step()


def changed_on_its_way(copy: bool) -> None:
    transport = connected()
    value = value_of(5).clone()
    if smp.pp_rank() == 0:
        transport.send(value, message_of(5), copy=copy)
        value.zero_()
    else:
        arrived: Any = transport.receive(message_of(5))
        assert torch.equal(arrived, value_of(5)) or not copy
    transport.end_step()
    smp.shutdown()


@pytest.mark.also_on("sim:copies:0")
def test_a_value_that_is_changed_in_place_on_its_way_is_noticed_or_a_copy_of_it_travels() -> None:
    run_ranks(changed_on_its_way, 2, True)
    with pytest.raises(RankFailed, match="changed in place on its way to pipeline rank 1: forward of microbatch 0"):
        run_ranks(changed_on_its_way, 2, False)


@on_ranks(2, meets=False)
def test_a_wait_for_what_nobody_sends_ends_and_says_for_what() -> None:
    transport = connected(timeout_seconds=3)
    if smp.pp_rank() == 0:
        time.sleep(6)  # alive, and silent
        return
    message = r"in forward of microbatch 0 \(float32\[2, 3\] for `layers.1`\) .*for rank 0"
    with pytest.raises(DeadlineError, match=message):
        transport.receive(message_of(0))


@on_ranks(2, fails=r"rank 0 has ended the step and not sent forward of .* for `layers.1`")
def test_a_rank_that_ends_its_step_without_a_message_is_named() -> None:
    transport = connected()
    if smp.pp_rank() == 1:
        transport.receive(message_of(0))
    transport.end_step()


@contextlib.contextmanager
def links() -> Iterator[None]:
    """Connect all ranks that values travel between as if they were GPUs, and see that this is used."""
    sending = mock.patch.object(GpuLink, "send", autospec=True, side_effect=GpuLink.send)
    with mock.patch("smpkit.torch.pipeline.pipeline.connects", return_value=True), sending as send:
        yield
    assert send.called


def train_over_links(case: Case, way: Way) -> Trace:
    with links():
        return train(case, way)


def train_late_over_links(seed: int, case: Case, way: Way) -> Trace:
    with links():
        return train_with_sleeps(seed, case, way)


ROWS = [
    ("skip connections", Way(pipeline=3, placement=13)),
    ("tied neighbours", Way(pipeline=3, placement=-1, config={"pipeline": "simple"})),
    ("frozen and unused parameters", Way(pipeline=3, placement=13, config={"pipeline": "zero_bubble"})),
    ("a branch on a value in the model", Way(pipeline=3, placement=13)),
]


@pytest.mark.parametrize(("model", "way"), ROWS, ids=str)
def test_models_train_over_links(model: str, way: Way) -> None:
    same(MODELS[model], way, by=train_over_links)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4], ids=["pp2", "pp4"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_between_gpus(model: str, degree: int) -> None:
    for placement, schedule in itertools.product((None, 11), ("interleaved", "simple")):
        way = Way(pipeline=degree, placement=placement, config={"pipeline": schedule})
        same(MODELS[model], way, by=train_over_links)


@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 100)]])
def test_delays_change_nothing_between_gpus(seed: int) -> None:
    way = Way(pipeline=4, placement=12, microbatches=8)
    same(CASES["skip connections"], way, by=functools.partial(train_late_over_links, seed))


@pytest.mark.also_on("sim:copies:0", way=WAYS[1])
@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_microbatches_may_leave_the_record(way: Way) -> None:
    same(SKIPPING, way, by=train_over_links)


@on_ranks(2)
def test_lazy_negatives_and_values_of_another_size_than_was_posted_arrive() -> None:
    transport = connected()
    for number, value in enumerate([torch.tensor([1 + 2j]).conj().imag, VALUES[5]]):
        message = Message(0, P2PTransfer(number, 0, 1, 0, 0, spec_of(value).as_sent), False)
        if smp.pp_rank() == 0:
            transport.send(value.to(state.device), message)
        else:
            transport.links[0].post(message_of(number))
            arrived: Any = transport.receive(message)
            assert torch.equal(arrived, value.to(state.device))
    transport.end_step()
