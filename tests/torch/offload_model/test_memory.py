"""What crosses the link and when, borders of slices on the host, and memory that goes with what held it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.offload.link import Copies, Event, Link
from smpkit.torch.offload_model import engine, model, optimizer
from smpkit.torch.offload_model import model as module
from tests.deadlines import until

CPU = torch.device("cpu")
everywhere = pytest.mark.usefixtures("place")


def _layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def test_where_the_device_is_the_host_nothing_is_copied(checkpoint: bool) -> None:
    model: Any = OffloadModel(_layers(), CPU, CPU, 3, checkpoint, 4)
    for _ in range(2):
        model(torch.randn(8, 4)).square().mean().backward()
    for parameter in model.parameters():  # autograd's own, not parts of something larger
        assert parameter.grad.untyped_storage().nbytes() == parameter.grad.nbytes
    assert [slot.weights for slot in model._engine._slots] == [None] * 3


def test_borders_that_do_not_fit_the_budget_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_the_host", lambda _: False)
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    model = OffloadModel(layers, CPU, num_slices=4, checkpoint_activation=True, host_budget_bytes=4096)
    model(torch.randn(16, 64)).square().sum().backward()  # 4 KiB: one border fits, four are kept
    keeper: Any = model._keeper
    assert keeper.stats.bytes_out == 4096
    assert all(parameter.grad is not None for parameter in model.parameters())


class Marker:
    latest: weakref.ref[Any]


class Marked(torch.autograd.Function):
    """Saves something that tells when its graph is gone."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.marker = marker = Marker()
        Marker.latest = weakref.ref(marker)
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@everywhere
@pytest.mark.usefixtures("no_search_for_cycles")
@pytest.mark.parametrize("backward", [False, True])
def test_what_a_forward_kept_goes_with_its_output(checkpoint: bool, backward: bool) -> None:
    """Not when Python looks for cycles: an output such as a language model's scores is large."""

    class Marks(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return Marked.apply(super().forward(value))

    model = OffloadModel(nn.Sequential(*[Marks(4, 4) for _ in range(3)]), CPU, checkpoint_activation=checkpoint)
    output = model(torch.randn(3, 4))
    kept = Marker.latest
    assert kept() is not None
    if backward:
        output.sum().backward()
    del output
    assert kept() is None


@everywhere
@pytest.mark.usefixtures("no_search_for_cycles")
def test_a_deleted_model_leaves_no_memory_and_no_threads() -> None:
    def threads() -> int:
        return sum(thread.name.startswith("smpkit") for thread in threading.enumerate())

    def train() -> list[weakref.ref[Any]]:
        model = OffloadModel(_layers(), CPU, checkpoint_activation=True, dtype=torch.bfloat16)
        optimizer = OffloadOptimizer(model, max_grad_norm=1.0, num_threads=2)
        for _ in range(2):
            model(torch.randn(3, 4, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
        model.synchronize()
        assert threads() > 0
        return [weakref.ref(each) for each in (model, optimizer, model._engine, model._engine.slices[0].masters[0])]

    train()  # torch's first optimizer imports its compiler
    gc.collect()
    before = threads()
    assert [each() for each in train()] == [None] * 4
    until(lambda: threads() <= before, "the end of the threads, when they next look,")


class NotedLink(Link):
    """A link that notes what comes from the host, and how many bytes go there."""

    def __init__(self, order: list[str]) -> None:
        self._order = order
        self._numbers: dict[int, int] = {}
        """Of what has come, by its address on the host."""
        self.fetched = self.sent = 0

    def fetch(self, copies: Copies, after: Iterable[Event]) -> Event:
        number = self._numbers.setdefault(copies[0][0].data_ptr(), len(self._numbers))
        self._order.append(f"fetch {number}")
        self.fetched += sum(source.nbytes for source, _ in copies)
        return super().fetch(copies, after)

    def send(self, copies: Copies, after: Iterable[Event]) -> Event:
        self.sent += sum(target.nbytes for _, target in copies)
        return super().send(copies, after)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the CPU play a device; return the order of loads and runs."""
    noted: list[str] = []
    monkeypatch.setattr(model, "is_the_host", lambda _: False)
    monkeypatch.setattr(engine, "link_for", lambda *_: NotedLink(noted))
    return noted


def noted(order: list[str], number: int) -> nn.Linear:
    """Return a layer that notes when it runs, and when it runs again in backward."""

    class Noted(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            order.append(f"run {number}")
            return super().forward(value)

    return Noted(4, 4)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_the_weights_of_the_next_slice_come_while_one_computes(order: list[str], num_microbatches: int) -> None:
    layers = nn.Sequential(*[noted(order, number) for number in range(4)])
    offloaded = OffloadModel(layers, CPU, CPU, 4, True, num_microbatches)
    output = offloaded(torch.randn(2, 4))
    run = [f"run {number}" for number in range(4) for _ in range(num_microbatches)]
    assert [each for each in order if each.startswith("run")] == run
    loads = {each: position for position, each in enumerate(order)}
    assert all(loads[f"fetch {number}"] < order.index(f"run {number - 1}") for number in range(1, 4))
    order.clear()
    output.sum().backward()
    first = [each for position, each in enumerate(order) if each != order[position - 1] or position == 0]
    # The last two are there already, and all microbatches of a slice come before the slice before it.
    assert first == ["run 3", "fetch 1", "run 2", "fetch 0", "run 1", "run 0"]


@pytest.mark.parametrize("num_slices", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_traffic(order: list[str], num_slices: int, dtype: torch.dtype) -> None:
    """Weights in twice, but the last two slices once; gradients out once, in float32."""
    width, steps = 64, 3
    plain = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(8)])
    offloaded = OffloadModel(plain, CPU, num_slices=num_slices, checkpoint_activation=True, dtype=dtype)
    adamw = OffloadOptimizer(offloaded)
    for _ in range(steps):
        offloaded(torch.randn(8, width, dtype=dtype)).float().square().mean().backward()
        adamw.step()
    sizes = [sum(parameter.numel() for parameter in piece.parameters()) for piece in offloaded.model_slices]
    link: Any = offloaded._engine.link
    assert link.fetched == (2 * sum(sizes) - sum(sizes[-2:])) * dtype.itemsize * steps
    assert link.sent == sum(sizes) * 4 * steps


def test_the_thread_has_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it makes a context on the first GPU, half a GiB for each other rank of the host."""
    began: list[torch.device] = []
    monkeypatch.setattr(optimizer, "make_current", began.append)
    offloaded = OffloadModel(nn.Sequential(nn.Linear(4, 4)), CPU)
    sgd = OffloadOptimizer(offloaded, torch.optim.SGD, lr=0.1)
    offloaded(torch.randn(2, 4)).sum().backward()
    sgd.step()
    offloaded.synchronize()
    assert began == [CPU]


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "ours"])
def test_gradients_that_nobody_keeps_come_to_the_same_memory(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_the_host", lambda _: False)
    model = OffloadModel(_layers(), CPU, num_slices=4)
    sgd = OffloadOptimizer(model, torch.optim.SGD) if ours else torch.optim.SGD(model.parameters())
    if isinstance(sgd, OffloadOptimizer):
        submitted: list[Any] = []
        submit = sgd._pool.submit

        def keep_arguments(*arguments: Any) -> Any:
            submitted.append(arguments)  # as the thread does for a moment
            return submit(*arguments)

        monkeypatch.setattr(sgd._pool, "submit", keep_arguments)
    places = set()
    for _ in range(4):
        sgd.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        places.add(tuple(parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None))
        sgd.step()
    assert len(places) == 1


def test_the_end_of_the_process_waits_for_no_copy() -> None:
    """Of a GPU that hangs each wait would last ten minutes."""
    held = OffloadModel(_layers(), CPU)
    finalizers: Any = weakref.finalize._registry  # type: ignore[attr-defined]
    waits = [
        each
        for each in finalizers
        if each.peek()[0] is held._engine and each.peek()[1] == held._engine.link.before_free
    ]
    assert [each.atexit for each in waits] == [False]


@everywhere
@pytest.mark.usefixtures("no_search_for_cycles")  # else another model may fill the memory before
def test_a_model_goes_with_its_last_reference(checkpoint: bool) -> None:
    model = OffloadModel(_layers(), CPU, CPU, 2, checkpoint)
    model(torch.ones(2, 4)).sum().backward()
    layer = weakref.ref(model.get_submodule("_model.0.model_shard.0"))
    del model
    assert layer() is None
