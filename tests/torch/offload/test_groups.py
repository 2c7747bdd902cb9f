"""What is saved together leaves together, comes back together, and ends together."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from smpkit.plan.schedule.graph import Kind
from smpkit.plan.schedule.templates import one_f_one_b
from smpkit.testing.checked_offload import CheckedEngine, CheckedLink
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.emulated import ThreadWait
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.link import CopyBatch, Event
from smpkit.torch.offload.prefetch import BackwardOrder
from smpkit.torch.offload.saved_storage import COPYING, DEAD, HOST, LIVE
from tests.torch.offload.chains import BATCH, BOUNDARY_BYTES, WIDTH, assert_idle, engine_on, inputs, slow
from tests.torch.offload.streams import StreamLink


class CountingLink(StreamLink):
    """Knows how many tensors each copy had, and for what it was waited."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []
        self.fetched: list[int] = []
        self.waited: list[str] = []

    def send(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        self.sent.append(len(copies.sources))
        return super().send(copies, after, what)

    def fetch(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        self.fetched.append(len(copies.sources))
        return super().send(copies, after, what)

    def wait(self, event: Event, what: str) -> ThreadWait:
        self.waited.append(what)
        return super().wait(event, what)


def counted(link: CountingLink, lead: int = 1) -> CheckedEngine:
    return CheckedEngine(CheckedLink(link), Arena(), lead=lead)


def checkpointed(engine: CheckedEngine, num_layers: int, num_inputs: int) -> tuple[Tensor, list[Tensor]]:
    """Run layers with so many inputs of their own; return the result and the leaves."""
    x, leaves = inputs() * 1, list[Tensor]()
    for number in range(num_layers):
        own = [torch.randn(BATCH, WIDTH, requires_grad=True) for _ in range(num_inputs - 1)]
        leaves += own
        with engine.offload_inputs(f"layers.{number}"):
            x = checkpoint(lambda y, *more: y * 2 + sum(each * each for each in more), x, *own, use_reentrant=False)
    return x, leaves


def test_a_boundary_leaves_in_one_copy_once_its_size_is_known_and_when_that_changes() -> None:
    link = CountingLink()
    engine = counted(link)
    sent = []
    for num_inputs in (3, 3, 2, 4, 4, 1):
        link.sent.clear()
        y, leaves = checkpointed(engine, 3, num_inputs)
        sent.append(list(link.sent))
        y.sum().backward()
        assert all(torch.equal(leaf.grad, _expected(leaf, leaves, num_inputs)) for leaf in leaves)  # type: ignore[arg-type]
        del y
        gc.collect()
        assert engine.end_step().bytes_out == 3 * num_inputs * BOUNDARY_BYTES
    # The first time all leave at the end, and so does what is fewer; what is more leaves one by one.
    assert sent == [[3] * 3, [3] * 3, [2] * 3, [2, 1, 1] * 3, [4] * 3, [1] * 3]
    assert_idle(engine)


def _expected(leaf: Tensor, leaves: list[Tensor], num_inputs: int) -> Tensor:
    layer = next(place for place, each in enumerate(leaves) if each is leaf) // (num_inputs - 1)
    return leaf.detach() * 2 * 2.0 ** (2 - layer)


def test_what_comes_back_together_is_waited_for_once_by_each_stream() -> None:
    link = CountingLink()
    engine = counted(link)
    y, _ = checkpointed(engine, 4, 3)
    y.sum().backward()
    assert link.fetched == [3] * 2  # the latest two stay
    assert link.waited == ["`layers.1`", "`layers.0`"]
    del y

    context, x = engine.offload_saved_tensors("layer"), [torch.randn(4), torch.randn(4)]
    handles = [context._pack(each) for each in x]
    for name in ("next", "last"):
        context.next_layer(name)
        context._pack(torch.randn(4))
    link.waited.clear()
    back = [context._unpack(handles[0])]
    with link.on("side"):
        back.append(context._unpack(handles[1]))
    assert all(map(torch.equal, back, x))
    assert link.waited == ["`layer`"] * 2


def test_a_storage_that_ended_while_it_was_found_is_taken_anew() -> None:
    """A destructor may run at any time: between the look for a storage and its use."""
    engine, x = engine_on(), torch.randn(BATCH, WIDTH)
    context = engine.offload_saved_tensors("layer")
    first = context._pack(x)[0][0]
    context.next_layer("next")
    assert first.state == DEAD
    engine.storages[first.key] = first  # as if it had been looked up before
    handle = context._pack(x)
    assert handle[0][0] is not first
    context.next_layer("last")
    assert torch.equal(context._unpack(handle), x)
    del handle, context
    assert_idle(engine)


@pytest.mark.parametrize("num_turns", [1, 3])
def test_layers_in_turn_need_what_they_share_once_each(num_turns: int) -> None:
    link = CountingLink()
    engine, mask = counted(link), torch.randn(BATCH, WIDTH)
    scopes = [engine.offload_saved_tensors(f"layers.{number}") for number in range(2)]
    handles = [(context, context._pack(mask)) for _ in range(num_turns) for context in scopes]
    for context in scopes:
        context.next_layer("next")
    with engine.offload_inputs("later"):
        (torch.randn(2, requires_grad=True) * 1).square()
    assert link.sent[:1] == [1]
    for context, handle in handles:
        assert torch.equal(context._unpack(handle), mask)
    assert sum(link.fetched) == 1
    del handles, context, handle, scopes
    assert_idle(engine)


@pytest.mark.parametrize("is_shared", [False, True], ids=["of each microbatch", "of all"])
def test_a_block_that_ends_with_its_last_tensor_holds_no_more_than_is_needed_in_pipeline_order(is_shared: bool) -> None:
    """A mask outlives the layer that it left with; if it held that layer's input back, this would be one more."""
    engine, mask = engine_on(slow(), order=BackwardOrder(4), lead=1), torch.ones(BATCH, WIDTH)
    actions = one_f_one_b(4, 8).actions[0]
    for _ in range(3):
        ends = dict[int, Tensor]()
        engine.follow(actions)
        for action in actions:
            engine.begin_action(action.kind, action.segment, action.microbatch)
            if action.kind is Kind.BACKWARD:
                ends.pop(action.microbatch).sum().backward()
                continue
            x, own = inputs() * 1, mask if is_shared else mask.clone()
            for number in range(4):
                with engine.offload_inputs(f"layers.{number}"):
                    x = checkpoint(torch.mul, x, own, use_reentrant=False)
            ends[action.microbatch] = x
            del x, own
        most = engine.end_step().peak_host_bytes
    # Four microbatches wait for their backward at once, with four layers and a mask each or one mask.
    assert most == (4 * 4 + (1 if is_shared else 4)) * BOUNDARY_BYTES
    assert_idle(engine)


def test_nothing_is_done_with_a_storage_whose_state_forbids_it() -> None:
    engine = ActivationEngine(StreamLink(), Arena(), lead=1)
    context = engine.offload_saved_tensors("layer")
    handles = [context._pack(torch.randn(BATCH, WIDTH)) for _ in range(2)]
    (saved, group), (other, _) = handles
    assert saved.state == LIVE
    context.next_layer("next")
    assert saved.state == COPYING
    context._unpack(handles[0])
    assert saved.state == HOST
    with pytest.raises(AssertionError):  # the device has nothing of it to release
        engine.release(group, saved)
    with pytest.raises(AssertionError):  # it has left
        engine.send(group, (saved,))
    group.storages.remove(other)
    engine.retire(other)
    assert other.state == DEAD
    with pytest.raises(AssertionError):
        engine.retire(other)


class BreakingLink(CountingLink):
    """Fails where it is told to."""

    fails = False

    def send(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        if self.fails:
            raise ZeroDivisionError
        return super().send(copies, after, what)


def test_a_storage_whose_copy_could_not_begin_stays_on_the_device() -> None:
    link = BreakingLink()
    engine, x = ActivationEngine(link, Arena(), lead=1), [torch.randn(BATCH, WIDTH) for _ in range(2)]
    context = engine.offload_saved_tensors("layer")
    handles = [context._pack(each) for each in x]
    link.fails = True
    with pytest.raises(ZeroDivisionError):
        context.next_layer("next")
    for _ in range(2):  # also in a second backward through the same graph
        assert all(torch.equal(context._unpack(handle), each) for handle, each in zip(handles, x, strict=True))
    assert link.fetched == []
    del handles, context
    gc.collect()
    assert_idle(engine)
