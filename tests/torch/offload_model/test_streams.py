"""What an OffloadModel must say to a device that runs behind. The CPU, which copies at once, forgives all of it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.emulated import ThreadWait
from smpkit.torch.offload.link import CopyBatch, Event
from smpkit.torch.offload_model import counted_link as transfers
from smpkit.torch.offload_model import kernels as workers
from smpkit.torch.offload_model import optimizer as optimizers
from smpkit.torch.offload_model import weights as residence
from smpkit.torch.offload_model.activation_offload import OffloadedTensor, TensorOffloader
from smpkit.torch.offload_model.counted_link import HostBuffers, Traffic, Transfers
from tests.torch.offload.streams import Pending, StreamLink

_WIDTH = 4


class Behind(StreamLink):
    """Records copies from the host, and the waits of streams."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Event] = []
        self.fetched: list[Event] = []
        self.settled: list[Event] = []
        self.held_back: list[Event] = []
        self.order: list[tuple[str, str, int]] = []
        """What was run, copied or waited for, and behind how much of what had been enqueued before."""

    def send(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        self.order.append(("send", what, max(map(number_of, after), default=0)))
        self.sent.append(super().send(copies, after, what))
        return self.sent[-1]

    def fetch(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        self.order.append(("fetch", what, max(map(number_of, after), default=0)))
        self.fetched.append(super().send(copies, after, what))
        return self.fetched[-1]

    def wait(self, event: Event, what: str) -> ThreadWait:
        self.order.append(("wait", what, number_of(event)))
        return super().wait(event, what)

    def synchronize(self, event: Event, what: str) -> None:
        self.settled.append(event)

    def before_reuse(self, event: Event, stream: Hashable) -> None:
        self.held_back.append(event)


def number_of(event: Event) -> int:
    """Return how much had been enqueued with an event; 0 of one that was always complete."""
    return event._number if isinstance(event, Pending) else 0


def make() -> tuple[OffloadModel, Behind]:
    link = Behind()
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(5)]
    return OffloadModel(nn.Sequential(*layers), torch.device("cpu"), num_slices=5, links=(link, Behind())), link


def test_copies_come_behind_what_used_their_buffers() -> None:
    """Two buffers for five slices: each load and each slice's gradients take the place of another slice's."""
    link = Behind()

    class Noted(nn.Linear):
        name = ""

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            link.order.append(("run", self.name, link.count))
            return super().forward(value)

    layers = [Noted(_WIDTH, _WIDTH) for _ in range(5)]
    for index, layer in enumerate(layers):
        layer.name = f"slice {index}"
    chain = nn.Sequential(*layers)
    model = OffloadModel(chain, torch.device("cpu"), num_slices=5, checkpoint_activation=True, links=(link, Behind()))
    model(torch.randn(2, _WIDTH)).sum().backward()
    users, sent = {0: 0, 1: 0}, dict[str, int]()
    for position, (kind, what, number) in enumerate(link.order):
        index = int(what.split()[-1])
        if kind == "run":
            assert ("wait", what) in [each[:2] for each in link.order[:position]]
            users[index % 2] = number
        elif kind == "fetch":
            assert number > users[index % 2]
        elif kind == "send":
            assert number > users[index % 2]
            if index + 2 < 5:  # whose gradients were in this buffer before
                assert ("wait", f"the gradients of slice {index + 2}", sent[f"{index + 2}"]) in link.order[:position]
            sent[f"{index}"] = number_of(link.sent[len(sent)])
    assert len(sent) == 5
    assert sum(kind == "run" for kind, _, _ in link.order) == 10


def test_gradients_have_arrived_when_backward_returns() -> None:
    model, link = make()
    model(torch.randn(2, _WIDTH)).sum().backward()
    assert len(link.sent) == 5
    assert set(link.sent) <= set(link.settled)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_an_optimizer_waits_for_gradients(tied: bool, backwards: int, clip: float | None) -> None:
    """Nobody else does: they do not go to the parameters."""
    layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(5)]
    if tied:  # nothing else is trained, or the last slice's gradients would be waited for on its own behalf
        layers[4].weight = layers[0].weight
        for layer in layers[1:4]:
            layer.requires_grad_(False)
    link = Behind()
    chain = nn.Sequential(*layers)
    model = OffloadModel(chain, torch.device("cpu"), num_slices=5, links=(link, Behind()))
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, max_grad_norm=clip)
    for _ in range(backwards):
        model(torch.randn(2, _WIDTH)).sum().backward()
    optimizer.step()
    model.synchronize()
    assert len(link.sent) == (2 if tied else 5) * backwards
    assert set(link.sent) <= set(link.settled)


@pytest.mark.parametrize("training", [False, True])
def test_weights_may_be_changed_when_forward_returns(training: bool) -> None:
    model, link = make()
    with torch.set_grad_enabled(training):
        model(torch.randn(2, _WIDTH))
    assert len(link.fetched) == 5
    assert link.settled[-1] is link.fetched[-1]


def test_weights_may_be_changed_when_backward_returns() -> None:
    """Frozen slices send no gradient whose arrival would say that their weights were read."""
    model, link = make()
    for parameter in list(model.parameters())[:6]:
        parameter.requires_grad_(False)
    model(torch.randn(2, _WIDTH, requires_grad=True)).sum().backward()
    assert len(link.fetched) > 5
    assert link.fetched[-1] in link.settled


def test_gradients_that_leave_are_not_written_over_when_others_are_trained() -> None:
    model, link = make()
    model(torch.randn(2, _WIDTH)).sum().backward()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.split(".")[1] in "024")  # one of the two buffers is needed no more
    link.held_back.clear()
    model(torch.randn(2, _WIDTH)).sum().backward()
    assert set(link.held_back) & set(link.sent[:5])


def test_what_comes_back_unwanted_is_not_written_over() -> None:
    link = Behind()
    offloader = TensorOffloader(torch.device("cpu"), Transfers(link, Traffic()), Arena())
    offloaded = OffloadedTensor(torch.randn(2, _WIDTH), requires_grad=False)
    offloader.send(offloaded, keep=False)
    offloader.fetch(offloaded)
    offloader.release(offloaded)
    assert offloaded.h2d_event in link.settled


def test_what_the_next_microbatch_needs_comes_while_one_computes() -> None:
    order: list[str] = []

    class Borders(Behind):
        def fetch(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
            order.append("fetch")
            return super().fetch(copies, after, what)

    class Noted(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            order.append("run")
            return super().forward(value)

    layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), Noted(_WIDTH, _WIDTH))
    model = OffloadModel(layers, torch.device("cpu"), torch.device("cpu"), 2, True, 4, links=(Behind(), Borders()))
    output = model(torch.randn(8, _WIDTH))
    # While the last microbatch computes, what backward needs first comes.
    assert order == ["fetch", "fetch", "run", "fetch", "run", "fetch", "run", "fetch", "run"]
    order.clear()
    output.sum().backward()
    # Behind them come gradients, for the first slice: the first one while the last microbatch computes.
    assert order[:8] == ["fetch", "run", "fetch", "run", "fetch", "run", "fetch", "run"]


def test_the_weights_of_the_next_slice_come_while_one_computes() -> None:
    order: list[str] = []

    class Weights(Behind):
        def fetch(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
            order.append(f"fetch {what}")
            return super().fetch(copies, after, what)

    class Noted(nn.Linear):
        number = 0

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            order.append(f"run slice {self.number}")
            return super().forward(value)

    layers = [Noted(_WIDTH, _WIDTH) for _ in range(4)]
    for number, layer in enumerate(layers):
        layer.number = number
    sequence = nn.Sequential(*layers)
    model = OffloadModel(sequence, torch.device("cpu"), torch.device("cpu"), 4, True, 1, links=(Weights(), Behind()))
    output = model(torch.randn(2, _WIDTH))
    assert [each.replace(" slice", "") for each in order] == [
        *("fetch 0", "fetch 1", "run 0", "fetch 2", "run 1", "fetch 3", "run 2", "run 3")
    ]
    order.clear()
    output.sum().backward()
    assert [each.replace(" slice", "") for each in order] == [
        *("run 3", "fetch 1", "run 2", "fetch 0", "run 1", "run 0")  # the last two are there since the forward
    ]


# --- what the host need not wait for ----------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_a_forward_ends_without_a_wait_where_an_optimizer_of_ours_writes_the_weights(training: bool) -> None:
    """The device would have nothing to do until the host has launched what comes behind the model."""
    model, link = make()
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    link.settled.clear()
    with torch.set_grad_enabled(training):
        model(torch.randn(2, _WIDTH))
    assert len(link.fetched) == 5
    assert not set(link.settled) & set(link.fetched)
    del optimizer


def test_an_update_waits_for_the_loads_of_a_forward_without_backward() -> None:
    model, link = make()
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.randn(2, _WIDTH)).sum().backward()
    with torch.no_grad():
        model(torch.randn(2, _WIDTH))
    link.settled.clear()
    optimizer.step()
    for index in range(5):
        optimizer.wait_for_update(index)
    assert set(link.fetched[-5:]) <= set(link.settled)


@pytest.mark.parametrize("way", ["synchronize", "parameters", "state_dict", "inner"])
def test_whoever_asks_the_model_for_its_weights_may_write_to_them(way: str) -> None:
    model, link = make()
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.randn(2, _WIDTH))
    latest = link.fetched[-1]
    assert latest not in link.settled
    if way == "inner":
        model.model_slices[0].state_dict()
    else:
        list(getattr(model, way)() or ())
    assert latest in link.settled
    del optimizer


def test_weights_that_were_moved_come_back_behind_the_loads() -> None:
    """`parameter.data = ...` takes a weight out of the buffer that a copy may still be reading."""
    model, link = make()
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    held = next(iter(model.parameters()))
    with torch.no_grad():
        model(torch.randn(2, _WIDTH))
        first = link.fetched[-5]
        held.data = torch.zeros_like(held)
        link.settled.clear()
        model(torch.randn(2, _WIDTH))
    assert first in link.settled
    del optimizer


def test_all_norms_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = list[torch.Tensor]()

    class Far:
        """A number on a device."""

        device = torch.device("cuda")

        def __init__(self, value: float) -> None:
            self.value = value

    class Stacked:
        def __init__(self, values: Sequence[Far]) -> None:
            self.values = values

        def cpu(self) -> torch.Tensor:
            reads.append(torch.tensor([each.value for each in self.values]))
            return reads[-1]

    monkeypatch.setattr(torch, "stack", Stacked)
    norms: list[Any] = [Far(1.0), torch.tensor(2.0), Far(3.0), Far(4.0)]
    assert [float(each) for each in optimizers._on_host(norms)] == [1.0, 2.0, 3.0, 4.0]
    assert len(reads) == 1


# --- threads, chunks, inputs ------------------------------------------------------------------------------------------


def test_threads_that_ask_for_events_have_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they make a context on the first GPU, half a GiB for each other rank of the host."""
    began = dict[str, torch.device]()

    def note(device: torch.device) -> None:
        began[threading.current_thread().name.rsplit("_", 1)[0]] = device

    monkeypatch.setattr(residence, "make_current", note)
    monkeypatch.setattr(workers, "make_current", note)
    model, _ = make()
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.randn(2, _WIDTH)).sum().backward()
    optimizer.step()
    model.synchronize()
    assert began == {"smpkit-weights": model.device, "smpkit-update": model.device}


def test_what_is_large_is_copied_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy engine ends what it has begun: borders would wait behind a whole slice."""
    monkeypatch.setattr(transfers, "_CHUNK_BYTES", 1000)
    made = list[list[int]]()

    class Noted(StreamLink):
        def send(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
            made.append([source.nbytes for source, _ in copies])
            return super().send(copies, after, what)

        fetch = send

    moves = Transfers(Noted(), Traffic())
    source = torch.randint(0, 256, (2500,), dtype=torch.uint8)
    there, back = torch.zeros_like(source), torch.zeros_like(source)
    moves.send("gradients_out", source, there, (), "a slice")
    moves.fetch("weights_in", there, back, (), "a slice")
    assert torch.equal(source, back)
    assert made == [[1000, 1000, 500]] * 2


def test_the_memory_of_a_model_that_is_gone_waits_for_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()

    class Gpu(StreamLink):
        device = torch.device("cuda")

        def close(self) -> None:
            order.append("settled")

    def pinned(device: torch.device, num_bytes: int) -> tuple[torch.Tensor, Any]:
        return torch.zeros(num_bytes, dtype=torch.uint8), lambda: order.append("unpinned")

    monkeypatch.setattr("smpkit.torch.offload.accelerator.pinned_memory", pinned)
    memory = HostBuffers(Gpu())
    memory.zeros(10), memory.zeros(20)
    del memory
    assert order == ["settled", "unpinned", "unpinned"]


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_an_input_on_the_host_is_the_models_own_before_the_call_returns(num_microbatches: int) -> None:
    """The user may fill its memory anew: the copy, and the backward that reads it again, come later."""
    sources = list[torch.Tensor]()

    class Noted(Behind):
        def fetch(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
            sources.extend(copies.sources)
            return super().fetch(copies, after, what)

    arena = Arena()
    offloader = TensorOffloader(torch.device("meta"), Transfers(Noted(), Traffic()), arena)
    x = torch.arange(12.0).view(3, 4).t()
    offloaded = [OffloadedTensor(x, requires_grad=False, is_input=True) for _ in range(num_microbatches)]
    offloader.copy_input(offloaded)
    x.numpy()[:] = -1  # no version counts this
    taken = [offloader.take(each) for each in offloaded for _ in range(2)]
    assert {(each.device.type, each.shape, each.stride()) for each in taken} == {("meta", x.shape, x.stride())}
    assert len(sources) == 2 * num_microbatches  # brought by the link, behind what it needs; nothing else was read
    assert all(source.view(torch.float32).tolist() == list(range(12)) for source in sources)
    for each in offloaded:
        assert arena.num_blocks == 1
        offloader.release(each)
    assert arena.num_blocks == 0


def test_an_input_that_finds_no_room_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[bool]()
    to: Any = torch.Tensor.to

    def noted(tensor: torch.Tensor, *args: Any, non_blocking: bool = False, **options: Any) -> Any:
        asked.append(non_blocking)
        return to(tensor, *args, non_blocking=non_blocking, **options)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    offloader = TensorOffloader(torch.device("meta"), Transfers(Behind(), Traffic()), Arena(budget_bytes=256))
    offloaded = OffloadedTensor(torch.ones(1000), requires_grad=False, is_input=True)
    offloader.copy_input([offloaded])
    assert offloader.take(offloaded).device.type == "meta"
    assert asked == [False]


@pytest.mark.parametrize("ours", [False, True])
def test_memory_for_gradients_is_there_before_the_first_one(ours: bool) -> None:
    model, _ = make()
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1) if ours else None
    gradients: Any = model._engine.gradients
    assert len(gradients._host_buffers) == (5 if ours else 0)
    output = model(torch.randn(2, _WIDTH)).sum()
    output.backward()
    assert len(gradients._host_buffers) == 5
    before = {each.data_ptr() for each in gradients._host_buffers}
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(2, _WIDTH)).sum().backward()
    assert {each.data_ptr() for each in gradients._host_buffers} == before
    del optimizer


def test_another_default_device_is_none_of_the_hosts_business() -> None:
    """What the model keeps on the host, and the optimizer's numbers, are on the CPU under any default device."""
    model, _ = make()
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.1, max_grad_norm=1.0)
    x = torch.randn(2, _WIDTH)
    with torch.device("meta"):
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
        model.synchronize()
    assert all(bool(each.isfinite().all()) for each in model.parameters())
