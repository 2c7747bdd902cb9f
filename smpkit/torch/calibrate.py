"""`python -m smpkit.torch.calibrate FILE SECONDS`, on every rank: measure this machine, for `smpkit calibrate`.

What all ranks do at once is measured on all of them, since they share cores, memory and links; everything else on rank
0 while the others wait at a barrier. A figure is the median of as many runs as its share of the time allows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, layer_norm
from torch.utils.benchmark import Timer

from smpkit.plan.tune.calibration import (
    Calibration,
    Collective,
    HostLink,
    Matmul,
    Message,
    this_machine,
)
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.cores import own_cores
from smpkit.torch.distributed.init import extra_group, init
from smpkit.torch.model import DistributedModel
from smpkit.torch.pipeline.split_backward import backward_inputs
from smpkit.torch.placement.facts import dtype_name
from smpkit.torch.step import step

_MIB: Final = 2**20
_FEWEST_RUNS: Final = 3
_STEPS: Final = 20
_TINY: Final = 8


def main(arguments: Sequence[str]) -> None:
    """Measure; rank 0 writes the file."""
    path, seconds = Path(arguments[0]), float(arguments[1])
    init({"ddp": True, "timeout_seconds": 120})
    torch.set_num_threads(own_cores())
    calibration = _Measurement(seconds).calibration()
    if state.rank == 0:
        path.write_text(calibration.model_dump_json(indent=1) + "\n", encoding="utf-8")


class _Measurement:
    """One calibration; every rank calls the same methods in the same order."""

    def __init__(self, seconds: float) -> None:
        self._device = state.device
        self._began = time.perf_counter()
        fast = devices.is_asynchronous(self._device)
        self._dtypes = [torch.float32, torch.bfloat16, *([torch.float16] if fast else [])]
        self._sizes = (1024, 4096, 8192) if fast else (128, 512, 1024)
        self._groups = [size for size in sorted({2, 4, 8, 16, state.size}) if 2 <= size <= state.size]
        self._message_bytes = (4096, _MIB, 16 * _MIB) if state.size > 1 else ()
        num_measured = len(self._dtypes) * 2 * len(self._sizes)
        num_measured += len(self._message_bytes) * (1 + 3 * len(self._groups)) + (9 if fast else 5)
        # Processes start and warm up in the rest.
        self._slot = 0.7 * seconds / num_measured

    def calibration(self) -> Calibration:
        """Measure everything, in this order."""
        machine = this_machine().model_copy(
            update={
                "device": devices.device_name(self._device),
                "torch": torch.__version__,
                "smpkit": version("smpkit"),
            }
        )
        return Calibration(
            format=1,
            machine=machine,
            ranks=state.size,
            matmul=list(self._matmuls()),
            memory_bytes_per_second=self._memory(),
            link=self._link() if devices.is_asynchronous(self._device) else None,
            messages=list(self._messages()),
            collectives=list(self._collectives()),
            updates_per_second=self._updates(),
            elementwise_bytes_per_second=self._elementwise(),
            **self._operation(),
            action_seconds=self._action(),
            seconds=time.perf_counter() - self._began,
        )

    # --- how ----------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        devices.wait_for_stream(self._device)
        return time.perf_counter()

    def _alone(self, work: Callable[[], object]) -> float:
        """Return the seconds of a run on rank 0 while the others wait; all ranks get it."""
        dist.barrier()
        return self._from_rank_0(self._run(work) if state.rank == 0 else 0.0)

    def _together(self, work: Callable[[], object]) -> float:
        """Return the mean over ranks of the seconds of a run while all do it."""
        dist.barrier()
        shared = torch.tensor([self._run(work)], dtype=torch.float64, device=self._device)
        dist.all_reduce(shared)
        return float(shared) / state.size

    def _run(self, work: Callable[[], object]) -> float:
        """Return the median seconds of a run on this rank, within one slot of the time."""
        timer = Timer("work()", timer=self._now, globals={"work": work}, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=self._slot).median)

    def _in_step(self, work: Callable[[], object], ranks: Sequence[int]) -> float:
        """Return the seconds of a run for which ranks wait for each other; it makes as many runs as rank 0 decides.

        Args:
            ranks: that call `work`, with their group; the others only learn the result.
        """
        dist.barrier()
        seconds = 0.0
        if state.rank in ranks:
            work()
            first = self._from_rank_0(self._once(work), extra_group(tuple(ranks)))
            num_runs = max(_FEWEST_RUNS, min(200, int(self._slot / max(first, 1e-6))))
            seconds = median(self._once(work) for _ in range(num_runs))
        return self._from_rank_0(seconds)

    def _once(self, work: Callable[[], object]) -> float:
        start = self._now()
        work()
        return self._now() - start

    def _from_rank_0(self, seconds: float, group: Any = None) -> float:
        shared = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.broadcast(shared, 0, group=group)
        return float(shared)

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=self._device).to(dtype)

    # --- what ---------------------------------------------------------------------------------------------------------

    def _matmuls(self) -> Iterator[Matmul]:
        for dtype in self._dtypes:
            for size in self._sizes:
                one, other = self._random(size, size, dtype=dtype), self._random(size, size, dtype=dtype)
                multiply = partial(torch.mm, one, other, out=torch.empty_like(one))
                flops, alone = 2.0 * size**3, self._alone(multiply)
                yield Matmul(
                    dtype=dtype_name(dtype),
                    size=size,
                    flops_per_second=flops / alone,
                    shared_flops_per_second=flops / self._together(multiply),
                )
                if alone > self._slot:
                    break  # of bfloat16, a CPU without instructions for it would take seconds for the next size

    def _memory(self) -> float:
        source = self._random(16 * _MIB)
        target = torch.empty_like(source)
        return 2 * 64 * _MIB / self._alone(lambda: target.copy_(source))

    def _link(self) -> HostLink:
        num_bytes = 64 * _MIB
        host = [devices.host_memory(num_bytes, self._device) for _ in range(2)]
        there = [torch.empty_like(buffer, device=self._device, pin_memory=False) for buffer in host]
        streams = [devices.new_stream(self._device) for _ in range(2)]
        tiny = there[0][:4], host[0][:4]

        def out() -> None:
            host[0].copy_(there[0], non_blocking=True)

        def back() -> None:
            there[1].copy_(host[1], non_blocking=True)

        def latent() -> None:
            tiny[1].copy_(tiny[0], non_blocking=True)
            devices.wait_for_stream(self._device)

        def both() -> None:
            for stream, copy in zip(streams, (out, back), strict=True):
                with devices.on_stream(stream):
                    copy()
                    event = devices.record_event(self._device)
                devices.order_after(event, devices.current_stream(self._device))

        return HostLink(
            out_bytes_per_second=num_bytes / self._together(out),
            back_bytes_per_second=num_bytes / self._together(back),
            both_bytes_per_second=2 * num_bytes / self._together(both),
            latency_seconds=self._alone(latent),
        )

    def _messages(self) -> Iterator[Message]:
        """Send from the first rank to the next one and back."""
        for num_bytes in self._message_bytes:
            value = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            yield Message(num_bytes=num_bytes, seconds=self._in_step(partial(_ping, value), (0, 1)) / 2)

    def _collectives(self) -> Iterator[Collective]:
        for size in self._groups:
            ranks = tuple(range(size))
            group = extra_group(ranks) if state.rank in ranks else None
            for name, operation in _OPERATIONS.items():
                for num_bytes in self._message_bytes:
                    whole = torch.zeros(num_bytes // 4 // size * size, dtype=torch.float32, device=self._device)
                    part = torch.zeros(len(whole) // size, dtype=torch.float32, device=self._device)
                    seconds = self._in_step(partial(operation, whole, part, group), ranks)
                    yield Collective.model_validate(
                        {"operation": name, "ranks": size, "num_bytes": whole.nbytes, "seconds": seconds}
                    )

    def _updates(self) -> float:
        """Return how fast a rank's cores update parameters of the host, while all ranks do it."""
        count = 8 * _MIB  # larger than caches
        parameter = torch.nn.Parameter(torch.zeros(count, device="cpu"))
        parameter.grad = torch.ones(count, device="cpu")
        optimizer = torch.optim.AdamW([parameter], fused=True)
        return count / self._together(optimizer.step)

    def _elementwise(self) -> float:
        """Return how many bytes per second operators move that compute no products, of a layer's activations."""
        value = self._random(*(4096, 4096) if devices.is_asynchronous(self._device) else (256, 256))
        other, scale = torch.empty_like(value), torch.ones_like(value[0])
        operators: list[Callable[[], object]] = [
            lambda: torch.add(value, value, out=other),
            lambda: gelu(value),
            lambda: layer_norm(value, value.shape[1:], scale, scale),
        ]
        moved = (3 + 2 + 2) * value.numel() * value.element_size()
        return moved / self._alone(lambda: [operator() for operator in operators])

    def _operation(self) -> dict[str, float]:
        """Return what an operator costs the host, and how much more a product with a weight does if backward is split.

        Modules of small operators run, forward and, for twice of it, backward.
        """
        layers = [(nn.LayerNorm(_TINY), nn.Linear(_TINY, _TINY), nn.GELU()) for _ in range(_TINY)]
        modules = [module for layer in layers for module in layer]
        model = nn.Sequential(*modules).to(self._device)
        value = self._random(1, _TINY).requires_grad_()
        num_operators = len(modules) + _TINY  # a linear layer also transposes its weight

        def split() -> None:
            loss = model(value).sum()
            weights = backward_inputs([loss], [torch.ones_like(loss)], [value])
            assert weights is not None
            weights.run()

        def in_turn() -> tuple[float, float]:  # their difference is less than what a busy host adds to either
            plain = self._once(lambda: model(value).sum().backward())
            return plain, self._once(split) - plain

        dist.barrier()
        plain = more = 0.0
        if state.rank == 0:
            num_runs = max(_FEWEST_RUNS, int(self._slot / sum(in_turn())))
            pairs = [in_turn() for _ in range(num_runs)]
            plain, more = map(median, zip(*pairs, strict=True))
        return {
            "operation_seconds": self._from_rank_0(plain) / (3 * num_operators),
            "split_seconds": max(0.0, self._from_rank_0(more)) / _TINY,
        }

    def _action(self) -> float:
        """Return what the runtime itself spends on an action, with its message.

        One microbatch goes through stages that compute next to nothing: one rank after the other works, and none of
        them waits for a core.
        """
        stages = max(count for count in (1, 2, 4, 8) if state.size % count == 0)
        init({"ddp": True, "timeout_seconds": 120, "pipeline_parallel_degree": stages, "skip_tracing": True})
        model = DistributedModel(nn.Sequential(*(nn.Linear(_TINY, _TINY) for _ in range(stages))))
        inputs = torch.zeros(1, _TINY, device=self._device)
        seconds = [self._run_step(model, inputs) for _ in range(3 + _STEPS)]
        return median(seconds[3:]) / (2 * stages)

    def _run_step(self, model: DistributedModel, inputs: torch.Tensor) -> float:
        dist.barrier()
        start = self._now()
        _step(model, inputs)
        self._now()
        dist.barrier()
        return self._now() - start


@step
def _step(model: DistributedModel, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).sum()
    model.backward(loss)
    return loss


def _ping(value: torch.Tensor) -> None:
    group, other = extra_group((0, 1)), 1 - state.rank
    for call in (dist.send, dist.recv) if state.rank == 0 else (dist.recv, dist.send):
        call(value, other, group=group)


# Torch 2.13 deprecates the older names, which are the only ones before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPERATIONS: Final[dict[str, Callable[[torch.Tensor, torch.Tensor, Any], object]]] = {
    "all_reduce": lambda whole, _, group: dist.all_reduce(whole, group=group),
    "all_gather": lambda whole, part, group: _all_gather(whole, part, group=group),
    "reduce_scatter": lambda whole, part, group: _reduce_scatter(part, whole, group=group),
}


if __name__ == "__main__":
    main(sys.argv[1:])
