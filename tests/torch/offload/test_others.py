"""What is somebody else's: memory of other streams, graphs that are captured, other default devices."""

from __future__ import annotations

import gc
from collections.abc import Hashable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from smpkit.errors import UsageError
from smpkit.torch.offload import accelerator
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.hooks import HookContext
from tests.torch.offload.chains import BATCH, BOUNDARY_BYTES, WIDTH, chain, engine_on, forward, gradients, inputs
from tests.torch.offload.streams import StreamLink

if TYPE_CHECKING:
    from typing_extensions import Self


class Telling(StreamLink):
    """Records the calls of `record_stream`: address and stream."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[tuple[int, Hashable]] = []

    def record_stream(self, data: Tensor, stream: Hashable) -> None:
        self.recorded.append((data.data_ptr(), stream))


def test_memory_is_let_go_of_early_only_after_its_allocator_knows_who_used_it() -> None:
    """A user's stream may count on the graph, which would have held its memory until backward."""
    link = Telling()
    engine = ActivationEngine(link, Arena(), lead=1, min_bytes=0)
    x, saved = inputs(), list[int]()
    with link.on("side"):
        for number in range(5):
            x = x * 1
            saved.append(x.data_ptr())
            with engine.offload_inputs(f"layers.{number}"):
                x = x.square()
        assert link.recorded == [(address, "side") for address in saved[: len(link.recorded)]]
        assert len(link.recorded) >= 2
        x.sum().backward()
    del x
    gc.collect()
    assert engine.end_step().bytes_back > 0
    assert len(link.recorded) == 5  # each once; what was loaded is memory of our own
    engine.close()


class Captured(HookContext):
    """A scope on a GPU whose stream is captured."""

    def __enter__(self) -> Self:
        self._index, self._is_capturing = 0, lambda: True
        return self


def test_20_a_storage_that_is_saved_again_during_a_capture_begins_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new group stamps the time and issues loads, which would become a part of the graph."""
    engine, x, square = engine_on(), torch.randn(BATCH, WIDTH), torch.randn(64, 64)
    with engine.offload_saved_tensors("before") as before:
        alive = [before._pack(x), before._pack(square[:, :2])]
    monkeypatch.setattr(engine, "new_group", lambda _: pytest.fail("a group during a capture"))
    with Captured(engine, "captured", 1 << 20) as during:
        record = engine.storages[x.untyped_storage()._cdata]
        tensor, *_ = during._pack_again(x, x.untyped_storage(), record)
        assert torch.equal(tensor, x)
        tensor, *_ = during._pack_sparse_view(square[:, :2], square.untyped_storage())
        assert torch.equal(tensor, square[:, :2])
    del alive


def test_20_a_wait_of_the_host_during_a_capture_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def done(self) -> bool:
            return False

    link = object.__new__(accelerator.AcceleratorLink)
    link._deadline_seconds = 600.0
    link.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UsageError, match="`layer` would have to wait for a copy, while a CUDA graph is captured"):
        link.synchronize(Never(), "`layer`")


def test_the_speed_of_a_link_is_measured_once_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[int]()

    def measure(link: accelerator.AcceleratorLink) -> tuple[float, float]:
        measured.append(1)
        return 1.0, 2.0

    monkeypatch.setattr(accelerator, "_speeds", {})
    monkeypatch.setattr(accelerator.AcceleratorLink, "_measure", measure)
    link = object.__new__(accelerator.AcceleratorLink)
    link.device = torch.device("cuda", 3)
    assert [link._bandwidths(), link._bandwidths()] == [(1.0, 2.0)] * 2
    assert len(measured) == 1


@pytest.mark.parametrize("num_inputs", [1, 3])
def test_the_footprint_of_a_microbatch_is_what_the_next_one_takes(num_inputs: int) -> None:
    """Tensors that leave together share a block, the first time as later."""
    engine, shared = engine_on(), torch.randn(BATCH, WIDTH, requires_grad=True) * 1

    def run() -> Tensor:
        x = inputs() * 1
        for number in range(4):
            own = [torch.randn(BATCH, WIDTH, requires_grad=True) * 1 for _ in range(num_inputs - 1)]
            with engine.offload_inputs(f"layers.{number}"):
                x = x.square() + sum((each.square() for each in own), shared * shared)
        return x

    first = run()
    sizes = engine.footprint()
    assert engine.arena.num_blocks == 4
    assert sum(sizes) == (4 * num_inputs + 1) * BOUNDARY_BYTES  # what they share is there once
    assert len(sizes) == 4
    engine.reserve(sizes * 3)
    segments = engine.arena.num_slabs
    others = [run(), run()]
    assert engine.arena.num_slabs == segments
    for each in (first, *others):
        each.sum().backward(retain_graph=True)
    del first, others, each
    gc.collect()
    engine.end_step()
    engine.close()


def test_another_default_device_is_none_of_the_hosts_business() -> None:
    layers, x = chain(4), inputs()
    engine = engine_on()
    plain = gradients(layers, x, lambda: forward(layers, x))

    def run() -> Tensor:
        with torch.device("meta"):
            return forward(layers, x, engine)

    for _ in range(2):
        ours = gradients(layers, x, run)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True) if a is not None and b is not None)
        gc.collect()
        with torch.device("meta"):
            engine.end_step()
    engine.close()
