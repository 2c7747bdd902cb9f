"""What a unit costs: measured times (`trace_execution_times`), and what the cost pass says of checkpointed layers."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import smpkit.torch as smp
from smpkit.plan.partition.assignment import UnitCost
from smpkit.torch.describe import describe
from smpkit.torch.pipeline.pipeline import measure_times
from smpkit.torch.placement.trace import TrialStep, measure_units, restoring_model
from smpkit.torch.placement.units import units_of
from smpkit.torch.recompute import region
from tests.models import Does
from tests.torch.steps import announced, assignment, on_ranks, train_step

WIDTH = 16
CPU = torch.device("cpu")


def slow(seconds: float) -> nn.Module:
    """Return a layer that takes time which no counter of operations sees."""

    def act(own: Any, x: Tensor) -> Tensor:
        time.sleep(seconds)
        return own.linear(x)

    return Does(act, linear=nn.Linear(WIDTH, WIDTH))


def slow_first() -> nn.Module:
    return nn.Sequential(*[slow(seconds) for seconds in (0.2, 0.0, 0.0, 0.0)])


def measured(module: nn.Module) -> dict[str, Any]:
    costs = measure_units(module, units_of(module), None)
    step = TrialStep(lambda x: module(x).sum(), (torch.ones(4, WIDTH),))
    return {cost.name: cost for cost in measure_times(module, costs, step, CPU)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let time pass only where somebody sleeps."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))


@pytest.mark.usefixtures("clock")
def test_times_are_measured_by_unit_over_all_of_its_calls() -> None:
    calls_one_twice = Does(
        lambda own, x: own.layers[1](own.layers[0](own.layers[0](x))), layers=nn.Sequential(slow(0.25), slow(0.25))
    )
    costs = measured(calls_one_twice)
    assert {name: cost.flops for name, cost in costs.items()} == pytest.approx({"layers.0": 0.5, "layers.1": 0.25})
    assert all(cost.activation_bytes == 0 for cost in costs.values())


class Counting(nn.Module):
    """Changes its buffer, an attribute, a list and every generator when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls, self.seen = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        random.random(), np.random.random(), torch.rand(1)
        return self.norm(x)


def test_measuring_leaves_no_trace() -> None:
    def chances() -> tuple[Any, ...]:
        return random.random(), np.random.random(), torch.rand(1).item()

    counting = Counting()
    module = nn.Sequential(counting, nn.Linear(WIDTH, WIDTH))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    seeds = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = chances()
    random.setstate(seeds[0])
    np.random.set_state(seeds[1])
    torch.set_rng_state(seeds[2])
    measured(module)
    assert chances() == expected
    assert (counting.calls, counting.seen) == (0, [])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not module[1]._forward_hooks


def test_a_trial_that_fails_leaves_no_trace_either() -> None:
    module: Any = nn.BatchNorm1d(WIDTH)
    with pytest.raises(ValueError, match="expected 2D"), restoring_model(module, lambda tensor: tensor.clone()):
        module(torch.ones(3, 2, 2, 2))
    assert not module.running_mean.any()


# --- over a pipeline --------------------------------------------------------------------------------------------------


def partition(options: dict[str, Any], **wishes: Any) -> tuple[list[int], list[str]]:
    """Return how many units each rank got, and what this one announced."""
    with announced() as lines:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, **options})
        torch.manual_seed(3)
        # Every replica is given batches of another size.
        x = torch.ones(4 * (1 + smp.dp_rank()), WIDTH)
        model = smp.DistributedModel(slow_first(), **wishes)
        train_step(model, x)
    return [list(assignment().values()).count(rank) for rank in (0, 1)], lines


@on_ranks(4)
def test_a_slow_unit_gets_a_rank_for_itself_on_all_replicas_if_times_are_measured() -> None:
    sizes, lines = partition({"memory_weight": 0.2}, trace_execution_times=True)
    assert sizes == [1, 3]
    first = ["Partitioned by execution times of one microbatch, measured on rank 0 (cpu)."]
    assert lines[:1] == (first if smp.rank() == 0 else [])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"skip_tracing": True}, "skip_tracing is on: partitioned by parameter sizes"),
        ({"auto_partition": False, "default_partition": 0}, "auto_partition is off: modules are placed by hand"),
    ],
    ids=["skip_tracing", "auto_partition"],
)
@on_ranks(2)
def test_a_wish_that_the_configuration_overrules_is_told(options: dict[str, Any], line: str) -> None:
    _, lines = partition(options, trace_execution_times=True)
    assert lines[:1] == ([f"{line}, not by measured execution times."] if smp.rank() == 0 else [])


@on_ranks(2, fails="UsageError: execution times cannot be measured")
def test_a_model_without_weights_cannot_be_measured() -> None:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    with smp.delay_param_initialization():
        module = slow_first()
    model = smp.DistributedModel(module, trace_execution_times=True)
    train_step(model, torch.ones(4, WIDTH))


_INPUT = 16 * 64 * 4
_HIDDEN = 16 * 256 * 4
_FLOPS = 2 * 2 * 16 * 64 * 256


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def _costs(*layers: nn.Module, checkpointed: bool = True) -> list[UnitCost]:
    def factory() -> tuple[nn.Module, torch.Tensor]:
        model = nn.Sequential(*layers)
        if checkpointed:
            smp.set_activation_checkpointing(model)
        return model, torch.zeros(16, 64)

    return describe(factory).costs


def test_a_checkpointed_unit_keeps_its_boundary_and_makes_the_rest_again() -> None:
    for cost in _costs(_Block(), _Block()):
        assert cost.activation_bytes == cost.boundary_bytes == _INPUT
        assert cost.recomputed_flops == cost.flops == _FLOPS
        # Two hidden tensors: the second layer has saved everything before it computes.
        assert cost.recomputed_bytes == cost.working_bytes == 2 * _HIDDEN


def test_what_checkpointing_spares_is_what_would_be_kept_without_it() -> None:
    for checkpointed, plain in zip(_costs(_Block()), _costs(_Block(), checkpointed=False), strict=True):
        assert checkpointed.spared_bytes == plain.activation_bytes == _INPUT + 2 * _HIDDEN
        assert (plain.spared_bytes, plain.boundary_bytes, plain.recomputed_bytes, plain.recomputed_flops) == (0,) * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_own_checkpoint_is_planned_as_smpkits(reentrant: bool) -> None:
    def costs(run: Callable[..., torch.Tensor]) -> list[UnitCost]:
        def in_checkpoints(own: Any, x: torch.Tensor) -> torch.Tensor:
            return run(own.blocks[1], run(own.blocks[0], own.first(x)))

        parts = {"first": nn.Linear(64, 64), "blocks": nn.ModuleList([_Block(), _Block()])}
        return describe(lambda: (Does(in_checkpoints, **parts), torch.zeros(16, 64))).costs

    assert costs(partial(checkpoint, use_reentrant=reentrant)) == costs(smp.checkpoint)


def test_a_checkpointed_layer_of_several_units_is_counted_with_the_first() -> None:
    up, down = _costs(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
    assert (up.activation_bytes, up.boundary_bytes, up.recomputed_flops) == (_INPUT, _INPUT, _FLOPS)
    assert (down.activation_bytes, down.boundary_bytes, down.recomputed_flops) == (0, 0, 0)
    assert up.flops + down.flops == _FLOPS


# --- beside bytes that are counted ------------------------------------------------------------------------------------


class _Attention(nn.Module):
    """A block that makes much that it does not save: scores before their softmax, a sum that is kept for its size."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(64), _Block()
        self.project, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(self.norm(x)).chunk(3, -1)
        scores = query @ key.T
        wide = torch.cat([scores] * 40, -1) * 2
        weights = torch.softmax(scores + wide.mean(), -1)
        return self.block(x + self.out(weights @ value))


class _Counted(TorchDispatchMode):
    """Counts the bytes of what forwards and recomputations have made and what is alive of it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        """`most`: in a recomputation."""
        self.recomputes = False
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.recomputes or torch._C._current_graph_task_id() == -1:
            for value, declared in zip(
                output if isinstance(output, tuple | list) else [output], func._schema.returns, strict=False
            ):
                if isinstance(value, torch.Tensor) and declared.alias_info is None:
                    self._add(value.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        assert key not in self._alive

        def gone(_: object) -> None:
            del self._alive[key]
            self.now -= num_bytes

        self._alive[key] = weakref.ref(storage, gone)
        self.now += num_bytes
        if self.recomputes:
            self.most = max(self.most, self.now)

    def begin_call(self, *_: Any) -> None:
        self.recomputes = torch._C._current_graph_task_id() != -1

    def end_recomputation(self) -> None:
        self.recomputes = False


@pytest.mark.parametrize("kind", [_Block, _Attention])
@pytest.mark.parametrize("count", [1, 3])
def test_the_peak_of_a_recomputation_is_the_one_that_is_counted(kind: type[nn.Module], count: int) -> None:
    costs = _costs(*(kind() for _ in range(count)))
    model = nn.Sequential(*(kind() for _ in range(count)))
    smp.set_activation_checkpointing(model)
    for _ in range(4):  # the first calls copy what they might change
        model(torch.zeros(16, 64)).sum().backward()
    found = _Counted()
    for each in model.modules():
        each.register_forward_pre_hook(found.begin_call)
    with mock.patch.object(region, "note_memory", found.end_recomputation), found:
        model(torch.zeros(16, 64)).sum().backward()
    loss_and_its_gradient = 8
    kept = sum(cost.activation_bytes for cost in costs)
    assert found.most - loss_and_its_gradient == kept + max(cost.recomputed_bytes for cost in costs)


def test_a_layer_that_is_not_checkpointed_says_what_recomputing_it_would_hold() -> None:
    [plain], [checkpointed] = _costs(_Attention(), checkpointed=False), _costs(_Attention())
    assert plain.working_bytes == checkpointed.recomputed_bytes > plain.activation_bytes
