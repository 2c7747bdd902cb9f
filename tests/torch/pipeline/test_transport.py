"""Messages carry exact bytes, early receives are found, and values are let go in time and never torn by a change."""

from __future__ import annotations

import gc
import weakref
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import TensorSpec, spec_of
from smpkit.torch.pipeline.executor import num_ahead
from smpkit.torch.pipeline.messages import (
    Message,
    P2PTransfer,
    is_none_gradient,
    none_gradient_message,
    pack,
    packed_bytes,
    unpack,
)
from smpkit.torch.pipeline.transport import Transport
from tests.torch.steps import in_a_row, on_ranks, train_step

VALUE = torch.arange(6.0).view(2, 3)
TENSORS = [
    torch.tensor(True),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.empty(0, 3),
    torch.tensor([[1 + 2j]], dtype=torch.complex64).conj(),
    torch.arange(6).view(2, 3).t(),
    torch.ones(1).expand(3),
    torch.arange(6.0).view(1, 6)[:, 3],  # one element: contiguous, with a stride of 6
]

CHANNELS_LAST = torch.arange(16.0).view(1, 4, 2, 2).contiguous(memory_format=torch.channels_last)


def open_transport() -> Transport:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    return Transport(state.process_group(CommGroup.PP_GROUP), state.group(CommGroup.PP_GROUP), state.device)


def value() -> torch.Tensor:
    """Return the value that travels, where this rank computes."""
    return VALUE.to(state.device)


def message_of(number: int, microbatch: int, *, backward: bool = False) -> Message:
    spec = TensorSpec((2, 3), (3, 1), torch.float32, requires_grad=True)
    return Message(microbatch, P2PTransfer(number, 0, 1, 0, 0, spec), backward)


def received(transport: Transport, *messages: Message) -> list[list[list[float]]]:
    """Receive messages in this order; return their values."""
    return [value.tolist() for value in map(transport.receive, messages) if value is not None]


@pytest.mark.parametrize("tensors", [TENSORS, [CHANNELS_LAST] * 3, [torch.eye(3).requires_grad_()], []], ids=len)
def test_packed_tensors_come_out_as_they_went_in(tensors: list[torch.Tensor]) -> None:
    packed = pack(tensors)
    specs = [spec_of(tensor) for tensor in tensors]
    assert packed.nbytes == packed_bytes(specs)
    for before, after in zip(tensors, unpack(packed, specs), strict=True):
        assert after.dtype == before.dtype
        assert after.is_contiguous()
        assert torch.equal(before, after)


def test_packed_and_unpacked_tensors_are_tensors_of_their_own() -> None:
    tensor, specs = torch.zeros(2), [spec_of(torch.zeros(2))] * 2
    packed = pack([tensor, tensor])
    tensor.fill_(7)
    first, second = unpack(packed, specs)
    first.add_(torch.ones(2, requires_grad=True))
    assert first.requires_grad
    assert second.tolist() == unpack(packed, specs)[0].tolist() == [0, 0]


@pytest.mark.also_on("sim:copies:0")
@on_ranks(2)
def test_values_go_forward_and_gradients_back_under_tags_of_their_own() -> None:
    """Send two values in one order, receive them in the other, and send gradients back."""
    transport = open_transport()
    seen: list[tuple[str, int, int]] = []
    tags: set[int] = set()

    def note(direction: str, peer: int, num_bytes: int, tag: int, start_ns: int, end_ns: int) -> None:
        assert start_ns <= end_ns
        seen.append((direction, peer, num_bytes))
        tags.add(tag)

    transport.recorder = note
    if smp.pp_rank() == 0:
        for microbatch in (0, 1):
            transport.send(value().t().contiguous().t() + microbatch, message_of(5, microbatch))
        gradients = received(transport, message_of(5, 0, backward=True), message_of(5, 1, backward=True))
        assert gradients == [(VALUE * 10).tolist(), (VALUE * 10 + 1).tolist()]
    else:
        transport.links[0].post(message_of(5, 0))
        transport.links[0].post(message_of(5, 1))
        transport.links[0].post(message_of(5, 1))  # posted already
        assert received(transport, message_of(5, 1), message_of(5, 0)) == [(VALUE + 1).tolist(), VALUE.tolist()]
        for microbatch in (0, 1):
            transport.send(value() * 10 + microbatch, message_of(5, microbatch, backward=True))
    transport.end_step()
    directions = ("send", "receive") if smp.pp_rank() == 0 else ("receive", "send")
    assert seen == [(direction, 1 - smp.pp_rank(), 24) for direction in directions for _ in range(2)]
    assert len(tags) == 4


@pytest.mark.also_on("sim:copies:0")
@on_ranks(2)
def test_a_value_is_let_go_when_its_gradient_comes_and_all_else_when_the_step_ends() -> None:
    transport = open_transport()
    values = transport.hosts._values
    if smp.pp_rank() == 0:
        for microbatch in range(3):
            transport.send(value(), message_of(0, microbatch))
        assert len(values) == 3
        for held, microbatch in ((2, 1), (1, 0)):
            transport.receive(message_of(0, microbatch, backward=True))
            assert len(values) == held
    else:
        for microbatch in range(3):
            transport.receive(message_of(0, microbatch))
        for microbatch in (1, 0):
            transport.send(value(), message_of(0, microbatch, backward=True))
    transport.end_step()
    assert not transport.hosts._values
    assert not transport.hosts._sent


@pytest.mark.also_on("sim:copies:0")
@pytest.mark.parametrize("times", [1, 64])
@on_ranks(2)
def test_receives_that_were_posted_for_a_record_do_not_meet_the_next_step(times: int) -> None:
    """Leave the record in steps in which a value is awaited that nobody sends; then go on."""
    transport = open_transport()
    for _ in range(times):
        if smp.pp_rank() == 1:
            transport.links[0].post(message_of(1, 0))
        transport.hosts.forget_posted(1)
    if smp.pp_rank() == 0:
        transport.send(value() * 7, message_of(0, 0))
        transport.send(value() * 8, message_of(1, 0))
        transport.end_step()
    else:
        found = received(transport, message_of(0, 0), message_of(1, 0))
        assert found == [(VALUE * 7).tolist(), (VALUE * 8).tolist()]


@on_ranks(2)
def test_tags_of_forgotten_receives_never_come_back() -> None:
    transport = open_transport()
    for _ in range(3):
        transport.hosts.forget_posted(4096)
    with pytest.raises(UnsupportedError, match="no tags are left for their messages: 16,384 microbatches in all"):
        transport.hosts.forget_posted(4096)


@pytest.mark.also_on("sim:copies:0")
@on_ranks(2, fails=r"forward of microbatch 4 \(float32\[2, 3\]\)")
def test_a_value_that_never_comes_is_named() -> None:
    transport = open_transport()
    if smp.pp_rank() == 1:
        transport.receive(message_of(2, 4))


@on_ranks(2)
def test_an_unforeseen_change_of_a_value_on_its_way_is_an_error_that_names_it() -> None:
    transport = open_transport()
    transfer = P2PTransfer(0, 0, 1, 0, 0, TensorSpec((3,), (1,), torch.float32, requires_grad=False), "layers.1")
    if smp.pp_rank() == 0:
        value = torch.zeros(3)
        transport.send(value.detach(), Message(2, transfer, False))
        value.add_(1)
        with pytest.raises(UsageError, match=r"on its way to pipeline rank 1: forward of microbatch 2 .*`layers.1`"):
            transport.end_step()
    else:
        transport.receive(Message(2, transfer, False))


@on_ranks(2, fails=r"rank 0 lost rank 1 in forward of microbatch \d+ .*for `layers.7`")
def test_a_send_that_fails_says_what_and_to_whom() -> None:
    transport = open_transport()
    transfer = P2PTransfer(0, 0, 1, 0, 0, TensorSpec((1 << 20,), (1,), torch.float32, requires_grad=False), "layers.7")
    if smp.pp_rank() == 1:
        transport.receive(Message(0, transfer, False))  # so that both have met, and rank 0 is soon through
        raise ValueError("gone")
    for microbatch in range(1000):
        transport.send(torch.zeros(1 << 20), Message(microbatch, transfer, False))
        transport.end_step()


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


@on_ranks(2)
def test_a_sent_value_that_backward_does_not_need_is_free_when_it_has_arrived() -> None:
    model = in_a_row(Doubling(), Doubling(), microbatches=6, active_microbatches=6)
    gc.disable()  # what is free must be so at once
    for _ in range(3):
        Doubling.alive.clear()
        Doubling.peak = 0
        train_step(model, torch.zeros(6, 4))
    assert not Doubling.alive
    # Rank 0 learns with each gradient what has arrived: at most what is on its way, and the one that is being made.
    assert 0 < Doubling.peak <= (4 if smp.pp_rank() == 0 else 1)


# --- what tells of no gradient, and what is posted ahead --------------------------------------------------------------


MIB = 2**20


def test_all_small_receives_are_posted_before_the_first_wait_and_of_large_ones_the_first() -> None:
    assert num_ahead([MIB // 4] * 6) == 4
    assert num_ahead([0, 0, 2 * MIB, 0]) == 2
    assert num_ahead([2 * MIB, 2 * MIB]) == 1


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128]
named = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def arrived(value: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a message as its receiver has it."""
    buffer = torch.empty(shape, dtype=dtype)
    buffer.untyped_storage().copy_(value.untyped_storage())
    return buffer


@named
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0)])
def test_it_has_the_size_of_a_gradient_and_is_known_by_every_element(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    value = torch.empty(shape, dtype=dtype)
    message = none_gradient_message(spec_of(value))
    assert message.nbytes == value.nbytes
    got = arrived(message, dtype, shape)
    assert bool(got.isnan().all())
    assert is_none_gradient(got, spec_of(value)) == (got.numel() > 0)
    if got.numel() > 1:
        got.view(-1)[-1] = 1
        assert not is_none_gradient(got, spec_of(value))


@named
def test_what_is_computed_is_none_of_it(dtype: torch.dtype) -> None:
    spec = spec_of(torch.empty(4, dtype=dtype))
    zeros, infinity = torch.zeros(4, dtype=dtype), torch.full((4,), float("inf"), dtype=dtype)
    nan = torch.full((4,), float("nan"), dtype=dtype)
    computed = [zeros, infinity, zeros / 0, infinity - infinity, infinity * 0, nan]
    for value in [*computed, *[-each for each in computed]]:
        assert not is_none_gradient(value, spec)
        assert not is_none_gradient(value.to(torch.complex128 if dtype.is_complex else torch.float64).to(dtype), spec)


def test_types_without_room_for_it_send_zeros() -> None:
    spec = spec_of(torch.empty(3, dtype=torch.float8_e5m2))
    got = arrived(none_gradient_message(spec), torch.float8_e5m2, (3,))
    assert got.float().tolist() == [0, 0, 0]
    assert not is_none_gradient(got, spec)
