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
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from smpkit.plan.tune.calibration import (
    Attention,
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

__all__ = ["main"]

_MIB: Final = 2**20
_HEADS, _HEAD_SIZE = 8, 64
_FEWEST_RUNS: Final = 3
_STEPS: Final = 20
_TINY: Final = 8


def main(arguments: Sequence[str]) -> None:
    """Measure; rank 0 writes the file."""
    path, seconds = Path(arguments[0]), float(arguments[1])
    init({"ddp": True, "timeout_seconds": 120})
    torch.set_num_threads(own_cores())
    found = _Measurement(seconds).calibration()
    if state.rank == 0:
        path.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")


class _Measurement:
    """One calibration; every rank calls the same methods in the same order."""

    def __init__(self, seconds: float) -> None:
        self._device, self._world = state.device, dist.group.WORLD
        self._began = time.perf_counter()
        fast = devices.is_asynchronous(self._device)
        self._dtypes = [torch.float32, torch.bfloat16, *([torch.float16] if fast else [])]
        self._sizes = (1024, 4096, 8192) if fast else (128, 512, 1024)
        self._tokens = (1024, 4096) if fast else (256, 1024)
        self._groups = sorted({size for size in (2, 4, 8, 16, state.size) if 2 <= size <= state.size})
        self._message_bytes = (4096, _MIB, 16 * _MIB)
        num_matmuls = 2 * len(self._dtypes) * len(self._sizes)
        num_others = len(self._dtypes) * len(self._tokens) + 5 + (4 if fast else 0)
        num_messages = len(self._message_bytes) * (1 + 3 * len(self._groups)) if state.size > 1 else 0
        # Processes start and warm up in the rest.
        self._slot = 0.7 * seconds / (num_matmuls + num_others + num_messages)

    def calibration(self) -> Calibration:
        """Measure everything."""
        matmul, attention = list(self._matmuls()), list(self._attentions())
        memory = self._memory()
        link = self._link() if devices.is_asynchronous(self._device) else None
        messages, collectives = list(self._messages()), list(self._collectives())
        updates = self._updates()
        elementwise, (operation, split) = self._elementwise(), self._operation()
        action = self._action()
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
            cores_per_rank=machine.cores / state.size,
            seconds=time.perf_counter() - self._began,
            matmul=matmul,
            attention=attention,
            memory_bytes_per_second=memory,
            link=link,
            messages=messages,
            collectives=collectives,
            updates_per_second=updates,
            action_seconds=action,
            operation_seconds=operation,
            split_seconds=split,
            elementwise_bytes_per_second=elementwise,
        )

    # --- how ----------------------------------------------------------------------------------------------------------

    def _barrier(self) -> None:
        dist.barrier()

    def _run(self, work: Callable[[], object]) -> float:
        """Return the median seconds of a run on this rank, within one slot of the time."""
        work()  # what is left of it when the first run begins does not change the median
        taken: list[float] = []
        end = time.perf_counter() + self._slot
        while len(taken) < _FEWEST_RUNS or time.perf_counter() < end:
            start = time.perf_counter()
            work()
            devices.wait_for_stream(self._device)
            taken.append(time.perf_counter() - start)
        return median(taken)

    def _alone(self, work: Callable[[], object]) -> float:
        """Return the seconds of a run on rank 0 while the others wait; all ranks get it."""
        self._barrier()
        return self._from_rank_0(self._run(work) if state.rank == 0 else 0.0)

    def _from_rank_0(self, seconds: float) -> float:
        shared = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.broadcast(shared, 0)
        return float(shared)

    def _together(self, work: Callable[[], object]) -> float:
        """Return the mean over ranks of the seconds of a run while all do it."""
        self._barrier()
        shared = torch.tensor([self._run(work)], dtype=torch.float64, device=self._device)
        dist.all_reduce(shared)
        return float(shared) / state.size

    def _in_step(self, work: Callable[[], object], group: Any) -> float:
        """Return the seconds of a run that waits for other ranks; each rank makes as many runs as rank 0 decides."""
        work()
        start = time.perf_counter()
        work()
        devices.wait_for_stream(self._device)
        each = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=self._device)
        dist.broadcast(each, 0, group=group)
        runs = max(_FEWEST_RUNS, min(200, int(self._slot / max(float(each), 1e-6))))
        taken: list[float] = []
        for _ in range(runs):
            start = time.perf_counter()
            work()
            devices.wait_for_stream(self._device)
            taken.append(time.perf_counter() - start)
        return median(taken)

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=self._device).to(dtype)

    # --- what ---------------------------------------------------------------------------------------------------------

    def _matmuls(self) -> Iterator[Matmul]:
        for dtype in self._dtypes:
            for size in self._sizes:
                one, other = self._random(size, size, dtype=dtype), self._random(size, size, dtype=dtype)
                target = torch.empty_like(one)

                def multiply(one: torch.Tensor = one, other: torch.Tensor = other, out: torch.Tensor = target) -> None:
                    torch.mm(one, other, out=out)

                flops = 2.0 * size**3
                alone, together = self._alone(multiply), self._together(multiply)
                yield Matmul(
                    dtype=dtype_name(dtype),
                    size=size,
                    flops_per_second=flops / alone,
                    shared_flops_per_second=flops / together,
                )

    def _attentions(self) -> Iterator[Attention]:
        for dtype in self._dtypes:
            for tokens in self._tokens:
                query, key, value = (self._random(1, _HEADS, tokens, _HEAD_SIZE, dtype=dtype) for _ in range(3))

                def attend(
                    query: torch.Tensor = query, key: torch.Tensor = key, value: torch.Tensor = value
                ) -> torch.Tensor:
                    return scaled_dot_product_attention(query, key, value, is_causal=True)

                # Half of the products are masked, and what is counted elsewhere counts all of them.
                flops = 4.0 * _HEADS * tokens**2 * _HEAD_SIZE
                yield Attention(dtype=dtype_name(dtype), tokens=tokens, flops_per_second=flops / self._alone(attend))

    def _memory(self) -> float:
        source = self._random(16 * _MIB)
        target = torch.empty_like(source)
        return 2 * 64 * _MIB / self._alone(lambda: target.copy_(source))

    def _link(self) -> HostLink:
        num_bytes = 64 * _MIB
        host = [devices.host_memory(num_bytes, self._device) for _ in range(2)]
        there = [torch.empty_like(each, device=self._device, pin_memory=False) for each in host]
        streams = [devices.new_stream(self._device) for _ in range(2)]
        tiny = there[0][:4], host[0][:4]

        def out() -> None:
            host[0].copy_(there[0], non_blocking=True)

        def back() -> None:
            there[1].copy_(host[1], non_blocking=True)

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
            latency_seconds=self._alone(lambda: tiny[1].copy_(tiny[0], non_blocking=True)),
        )

    def _messages(self) -> Iterator[Message]:
        """Send from the first rank to the next one and back."""
        if state.size == 1:
            return
        group = extra_group((0, 1)) if state.rank < 2 else None
        for num_bytes in self._message_bytes:
            self._barrier()
            seconds = 0.0
            if group is not None:
                value = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                seconds = self._in_step(partial(_ping, value, group), group) / 2
            yield Message(num_bytes=num_bytes, seconds=self._from_rank_0(seconds))

    def _collectives(self) -> Iterator[Collective]:
        for size in self._groups:
            group = extra_group(tuple(range(size))) if state.rank < size else None
            for name, operation in _OPERATIONS.items():
                for num_bytes in self._message_bytes:
                    self._barrier()
                    count, seconds = num_bytes // 4 // size * size, 0.0
                    if group is not None:
                        whole = torch.zeros(count, dtype=torch.float32, device=self._device)
                        part = torch.zeros(count // size, dtype=torch.float32, device=self._device)
                        seconds = self._in_step(partial(operation, whole, part, group), group)
                    seconds = self._from_rank_0(seconds)
                    yield Collective.model_validate(
                        {"operation": name, "ranks": size, "num_bytes": 4 * count, "seconds": seconds}
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

    def _operation(self) -> tuple[float, float]:
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

        plain = self._alone(lambda: model(value).sum().backward())
        return plain / (3 * num_operators), max(0.0, self._alone(split) - plain) / _TINY

    def _action(self) -> float:
        """Return what the runtime itself spends on an action, with its message.

        One microbatch goes through stages that compute next to nothing: one rank after the other works, and none of
        them waits for a core.
        """
        stages = max(each for each in (1, 2, 4, 8) if state.size % each == 0)
        init({"ddp": True, "timeout_seconds": 120, "pipeline_parallel_degree": stages, "skip_tracing": True})
        model = DistributedModel(nn.Sequential(*(nn.Linear(_TINY, _TINY) for _ in range(stages))))
        inputs = torch.zeros(1, _TINY, device=self._device)
        seconds = [self._run_step(model, inputs) for _ in range(3 + _STEPS)]
        return median(seconds[3:]) / (2 * stages)

    def _run_step(self, model: DistributedModel, inputs: torch.Tensor) -> float:
        self._barrier()
        start = time.perf_counter()
        _step(model, inputs)
        devices.wait_for_stream(self._device)
        self._barrier()
        return time.perf_counter() - start


@step
def _step(model: DistributedModel, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).sum()
    model.backward(loss)
    return loss


def _ping(value: torch.Tensor, group: Any) -> None:
    if state.rank == 0:
        dist.send(value, 1, group=group)
        dist.recv(value, 1, group=group)
    else:
        dist.recv(value, 0, group=group)
        dist.send(value, 0, group=group)


def _all_reduce(whole: torch.Tensor, _: torch.Tensor, group: Any) -> None:
    dist.all_reduce(whole, group=group)


def _all_gather(whole: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    # Torch 2.13 deprecates the older name, which is the only one before.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)


def _reduce_scatter(whole: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, whole, group=group)


_OPERATIONS: Final = {"all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter}


if __name__ == "__main__":
    main(sys.argv[1:])
