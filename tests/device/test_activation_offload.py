"""What checkpointed layers keep leaves a GPU and comes back: the same gradients, on any stream, and less memory."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import smpkit
from benchmarks.activation_offload.simulated import run_stage
from smpkit.plan.schedule.templates import one_f_one_b
from smpkit.torch.core import devices
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.engine import make_engine
from smpkit.torch.offload.order import Lead
from tests.device.device import gpu, in_device_time, scaled
from tests.device.models import Checkpointed, layers

_WIDTH, _TOKENS, _LAYERS = scaled(1024), scaled(2048), 8
_BOUNDARY = 4 * _WIDTH * _TOKENS


def checkpointed() -> Checkpointed:
    return Checkpointed(*layers(_WIDTH, _LAYERS)).to(gpu())


def batch() -> Tensor:
    return torch.randn(_TOKENS, _WIDTH, device=gpu(), generator=torch.Generator(gpu()).manual_seed(1))


def gradients(model: nn.Module, loss: Tensor | None = None) -> list[Tensor]:
    """Return the gradients of a step, or of the loss of one whose forward has run."""
    model.zero_grad()
    loss = model(batch()).square().sum() if loss is None else loss
    loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [(each.to_local() if isinstance(each, DTensor) else each).clone() for each in found]


@pytest.mark.parametrize("lead", [1, "auto"])
def test_steps_on_another_stream_have_the_same_bits(lead: Lead) -> None:
    model, main, side = checkpointed(), torch.accelerator.current_stream(), torch.Stream(gpu())
    expected = gradients(model)
    with smpkit.offload_activations(model, lead=lead) as offload:
        for number in range(4):
            side.wait_stream(main)
            with side if number % 2 else contextlib.nullcontext():
                found = gradients(model)
            main.wait_stream(side)
            assert all(map(torch.equal, found, expected))
        assert offload.report().steps[-1].bytes_out == _LAYERS * _BOUNDARY


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Be a world of one rank."""
    torch.accelerator.set_device_index(0)
    backend = dist.Backend.default_device_backend_map[gpu().type]
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def divided(model: Checkpointed) -> nn.Module:
    mesh = init_device_mesh(gpu().type, (1,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return model


replicated = partial(DistributedDataParallel, device_ids=[0], bucket_cap_mb=1)


@pytest.mark.also_on("sim:lazy:0", wrap=divided)
@pytest.mark.parametrize("wrap", [divided, replicated], ids=["divided", "replicated"])
@alone()
def test_wrappers_with_streams_of_their_own(wrap: Callable[[Checkpointed], nn.Module]) -> None:
    expected = gradients(wrap(checkpointed()))
    model = wrap(checkpointed())
    with smpkit.offload_activations(model, lead=2, min_bytes=0) as offload:
        for _ in range(4):
            assert all(map(torch.equal, gradients(model), expected))
        assert offload.report().bytes_back > 0


@pytest.mark.real_gpu("captures a graph")
def test_what_is_on_its_way_does_not_spoil_a_capture() -> None:
    """Nothing leaves while a graph is captured, and no event may be asked for: with a graph alive there are some."""
    model, x = checkpointed(), batch()
    expected = gradients(model)
    with smpkit.offload_activations(model) as offload:
        loss = model(x).square().sum()  # its copies run while the capture begins
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        graph.replay()
        assert torch.equal(y, model(x))
        assert all(map(torch.equal, gradients(model, loss), expected))
        assert [each.bytes_out > 0 for each in offload.report().steps] == [True, False, True]
        assert all(map(torch.equal, gradients(model), expected))


@pytest.mark.parametrize("horizon", [1, None])
@in_device_time()
def test_a_stage_of_a_pipeline_needs_less_memory(horizon: int | None) -> None:
    model = checkpointed()
    actions = one_f_one_b(4, 8).actions[0]
    engine = make_engine(gpu(), horizon=horizon)

    def step(*, offloads: bool) -> tuple[int, list[Tensor]]:
        model.zero_grad()
        torch.accelerator.reset_peak_memory_stats()
        run_stage(actions, list(model), lambda: batch().requires_grad_(), engine if offloads else None)
        torch.accelerator.synchronize()
        # Copies on the host: on the device they would count in the next step's peak.
        found = [each.grad.cpu() for each in model.parameters() if each.grad is not None]
        return torch.accelerator.max_memory_allocated(), found

    plain_peak, expected = step(offloads=False)
    for _ in range(3):
        peak, found = step(offloads=True)
        assert all(map(torch.equal, found, expected))
    assert plain_peak - peak >= _LAYERS * _BOUNDARY
    engine.close()


def test_memory_that_cannot_be_pinned_is_a_spent_budget_and_no_error_of_the_next_kernel() -> None:
    """CUDA keeps a failed call as the thread's last error, which torch would take for that of its next kernel."""
    model = checkpointed()
    expected = gradients(model)
    registration = devices.host_registration(gpu())
    assert registration is not None
    register, unregister = registration
    mapping = torch.frombuffer(mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    pin = partial(register, mapping.data_ptr(), mapping.nbytes)
    pin()
    with pytest.raises(OSError, match=r"cudaHostRegister|is registered already"):  # nothing is pinned twice
        pin()

    def refused(_: int) -> Tensor:
        pin()
        return mapping

    with smpkit.offload_activations(model) as offload:
        offload._engine.arena = Arena(None, refused)
        assert all(map(torch.equal, gradients(model), expected))
        (step,) = offload.report().steps
        assert (step.bytes_out, step.kept_bytes) == (0, _LAYERS * _BOUNDARY)
    torch.accelerator.synchronize()
    unregister(mapping.data_ptr())
