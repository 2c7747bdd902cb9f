"""What a steady step costs on each rank, counted: messages, bytes, Python calls in smpkit, and frames around a layer.

Counts do not depend on how busy the machine is, as times do. They may fall, and must not rise.

Messages are counted where torch hands them to its process groups. Python calls are those of functions whose file is
below the folder of smpkit, on all threads; comprehensions, which newer Pythons inline, are not counted. Of several
steady steps the fewest count: what a step does while it waits hangs on the others.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import smpkit
import smpkit.torch as smp
from smpkit import OffloadModel
from smpkit.torch.distributed import recorder
from tests.goldens.items import DETAIL, Items
from tests.ranks import run_ranks

__all__ = ["collect", "machine"]

MICROBATCHES, UNITS, WIDTH, BATCH = 4, 4, 8, 8
WARM_UPS, STEPS = 8, 6
_RUNTIME = tuple(f"{Path(smpkit.__file__).parent}/{room}/" for room in ("torch", "plan", "config", "observe"))
_INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>"}
_COLLECTIVES = (
    "all_gather_single",
    "all_to_all_single",
    "allgather",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)


def machine() -> dict[str, str]:
    """Return what decides how often Python calls functions."""
    return {"python": "{}.{}".format(*sys.version_info), "torch": torch.__version__.split("+", maxsplit=1)[0]}


def collect() -> Items:
    items: Items = {}
    for size in (1, 2):
        ranks = run_ranks(_run, size, size, timeout=600)
        for name in ranks[0]:
            items[name] = {f"rank {rank}": each[name] for rank, each in enumerate(ranks)}
            items[name][DETAIL] = {f"rank {rank}": each[name].pop(DETAIL) for rank, each in enumerate(ranks)}
    return items


# --- the model and its steps ------------------------------------------------------------------------------------------


class Frames:
    """How many frames of smpkit there are between layers and the step function, while that is asked for."""

    noted: list[int] | None = None

    @classmethod
    def note(cls, frame: FrameType) -> None:
        if cls.noted is not None:
            cls.noted.append(_frames_above(frame))


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        Frames.note(sys._getframe(1))
        return super().forward(x)


class Activation(nn.ReLU):
    """Notes frames where the linear layers are torch's own, as tensor parallelism wants them."""

    def forward(self, x: Tensor) -> Tensor:
        Frames.note(sys._getframe(1))
        return super().forward(x)


def _frames_above(frame: FrameType | None) -> int:
    count = 0
    while frame is not None and frame.f_code not in _STEP_CODES:
        count += _is_ours(frame.f_code)
        frame = frame.f_back
    return count


class Units(nn.Module):
    """Units of a Linear and a ReLU, and if asked for operations between them."""

    def __init__(self, *, between: bool = False, marked: bool = False) -> None:
        super().__init__()
        first, second = (nn.Linear, Activation) if marked else (Layer, nn.ReLU)
        self.units = nn.ModuleList(nn.Sequential(first(WIDTH, WIDTH), second()) for _ in range(UNITS))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
            if self.between:
                x = x * 2 + 1
        return x


def _train(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).mean()
    model.backward(loss)
    return loss


def _forward(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).mean()
    return loss


_STEP_CODES = {_train.__code__, _forward.__code__}


def _prepared(
    config: dict[str, Any],
    *,
    between: bool = False,
    training: bool = True,
    marked: bool = False,
    checkpointed: bool = False,
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a step and what comes after it."""
    smp.init({"ddp": True, "microbatches": MICROBATCHES, **config})
    torch.manual_seed(7)
    module = Units(between=between, marked=marked)
    if marked:
        smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    if checkpointed:
        for unit in module.units:
            smp.set_activation_checkpointing(unit)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    inputs = torch.randn(BATCH, WIDTH)
    run = smp.step(_train if training else _forward)

    def step() -> None:
        with torch.set_grad_enabled(training):
            run(model, inputs)

    def update() -> None:
        if training:
            optimizer.step()
        optimizer.zero_grad()

    return step, update


def _offload_model() -> tuple[Callable[[], object], Callable[[], object]]:
    cpu = torch.device("cpu")
    module = nn.Sequential(*Units().units)
    model = OffloadModel(module, cpu, cpu, UNITS, checkpoint_activation=True, num_microbatches=MICROBATCHES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(BATCH, WIDTH)

    def step() -> None:
        model(inputs).mean().backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step, update


def _settings(size: int) -> Iterator[tuple[str, Callable[[], tuple[Callable[[], object], Callable[[], object]]]]]:
    if size == 1:
        yield "1 rank", lambda: _prepared({})
        yield "1 rank, checkpointed", lambda: _prepared({}, checkpointed=True)
        yield "OffloadModel", _offload_model
        return
    yield "dp2", lambda: _prepared({})
    yield "dp2, fp16", lambda: _prepared({"fp16": True})
    yield "dp2, sharded state", lambda: _prepared({"shard_optimizer_state": True})
    yield "dp2, sharded parameters", lambda: _prepared({"sharded_data_parallel_degree": 2})
    yield "tp2", lambda: _prepared({"tensor_parallel_degree": 2}, marked=True)
    yield "tp2, for memory", lambda: _prepared({"tensor_parallel_degree": 2, "optimize": "memory"}, marked=True)
    # No more live microbatches than 1F1B has: else later steps are planned by what the second one took.
    pipeline = {"pipeline_parallel_degree": 2, "active_microbatches": 2}
    for name in ("simple", "interleaved", "zero_bubble"):
        yield f"pp2 {name}", partial(_prepared, {**pipeline, "pipeline": name})
    deep = {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2}
    yield "pp2, 2 virtual stages", lambda: _prepared(deep)
    yield "pp2, forward only", lambda: _prepared(pipeline, training=False)
    yield "pp2, operations between units", lambda: _prepared(pipeline, between=True)
    yield "pp2, checkpointed", lambda: _prepared(pipeline, checkpointed=True)
    offload = {"offload_activations": True, "activation_loading_horizon": 1}
    yield "pp2, activations offloaded", lambda: _prepared({**pipeline, **offload}, checkpointed=True)
    yield "pp2, fp16", lambda: _prepared({**pipeline, "fp16": True})


# --- counting ---------------------------------------------------------------------------------------------------------


def _run(size: int) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    os.environ[recorder.QUIET] = "0"  # recording makes calls of its own; a job records one step in fifty
    counted = Counted()
    counted.install()
    return {name: _measured(name, make, counted) for name, make in _settings(size)}


def _measured(name: str, make: Callable[[], Any], counted: Counted) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step, update = make()
            for _ in range(WARM_UPS):
                step()
                update()
            Frames.noted = []
            step()
            frames, Frames.noted = Frames.noted, None
            update()
            steps, updates = zip(*((counted.during(step), counted.during(update)) for _ in range(STEPS)), strict=True)
            if smp.is_initialized():
                smp.shutdown()
    except BaseException as error:
        raise AssertionError(f"`{name}` failed") from error
    found = {"step": _fewest(list(steps)), "optimizer": _fewest(list(updates))}
    detail = {part: figures.pop(DETAIL) for part, figures in found.items()}
    return {**found, "frames around a layer, at most": max(frames, default=0), DETAIL: detail}


def _fewest(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the least of each figure, and the calls by function of the step with the fewest."""
    quietest = min(steps, key=lambda each: each["calls"])
    figures = {key: min(each.get(key, 0) for each in steps) for key in quietest if key != DETAIL}
    return {**figures, DETAIL: quietest[DETAIL]}


class Counted:
    """Counts messages and calls of this process, on all of its threads that start after `install`."""

    def __init__(self) -> None:
        self._messages: Counter[str] = Counter()
        self._calls: Counter[CodeType] = Counter()
        self._active = False

    def install(self) -> None:
        group = dist.ProcessGroup
        for name in ("send", "recv", *_COLLECTIVES):
            if hasattr(group, name):
                setattr(group, name, self._counting(name, getattr(group, name)))
        threading.setprofile(self._profile)

    def during(self, function: Callable[[], object]) -> dict[str, Any]:
        """Return what `function` cost."""
        self._messages, self._calls = Counter(), Counter()
        before = sys.getprofile()
        self._active = True
        sys.setprofile(self._profile)
        try:
            function()
        finally:
            sys.setprofile(before)
            self._active = False
        by_name: Counter[str] = Counter()
        for code, count in self._calls.items():
            by_name[f"{Path(code.co_filename).stem}.{getattr(code, 'co_qualname', code.co_name)}"] += count
        return {"calls": sum(by_name.values()), **self._messages, DETAIL: dict(by_name)}

    def _profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and self._active and _is_ours(frame.f_code):
            self._calls[frame.f_code] += 1

    def _counting(self, name: str, original: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if self._active:
                self._messages[name] += 1
                self._messages[f"{name}, bytes"] += _bytes_of(args) + _bytes_of(tuple(kwargs.values()))
            return original(group, *args, **kwargs)

        return call


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(_bytes_of(each) for each in value) if isinstance(value, list | tuple) else 0


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_RUNTIME) and code.co_name not in _INLINED
