"""Train a model with smpkit and in plain PyTorch, and compare: every test of the same numbers is a row of this.

    same(MODELS["tied modules"], Way(pipeline=2, microbatches=4))

A `Way` says how smpkit trains. `train_plainly` does in one process what it should come to: replica after replica and
microbatch after microbatch. Both return a `Trace`: what each call of the step returned, and the last gradients, weights
and buffers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import smpkit.torch as smp
from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.core.tree import children
from smpkit.torch.pipeline.transport import Transport
from smpkit.torch.placement.units import units_of
from smpkit.torch.step import StepOutput, collate
from smpkit.torch.tensor_parallel.state_dict import join_state, with_original_names
from tests.chosen_device import chosen_device
from tests.models import CASES, DROPOUT, Case
from tests.ranks import run_ranks

TOLERANCE: Final = 1e-11
"""In float64. What differs is the order in which microbatches, users and ranks are added up; AdamW magnifies that."""


def in_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Decay matrices only, and train the rest slower, as scripts do."""
    known = list(parameters)
    groups = [
        {"params": [each for each in known if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in known if each.ndim <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.05, eps=1e-4)


OPTIMIZERS: Final[Mapping[str, Callable[[Any], torch.optim.Optimizer]]] = {
    # Adam turns rounding errors of gradients that are 0 in theory into steps of full size, so SGD is the usual one.
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, eps=1e-4),
    "AdamW in groups": in_groups,
    "LAMB": lambda parameters: smp.optimizers.FusedLAMB(parameters, lr=0.05, max_grad_norm=0.1),
    "NovoGrad": lambda parameters: smp.optimizers.FusedNovoGrad(parameters, lr=0.05),
    # Its states are there from the beginning.
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1),
}


@dataclass(frozen=True)
class Way:
    """How smpkit trains.

    Args:
        pipeline: pipeline ranks.
        replicas: how many batches a step averages over; with tensor parallelism each of its ranks feeds one, unless
            `prescaled_batch` says that they share it.
        tensor: tensor-parallel ranks, which are replicas at the same time.
        microbatches: per call of the step.
        batches: the size of the batch of each call, in each replica.
        accumulation: calls of the step before each step of the optimizer.
        placement: None lets smpkit decide which rank has which layer, -1 deals them out evenly, others seed dice.
        traced: whether smpkit measures the model before it decides; it takes as long as all of a small training.
        optimizer: of `OPTIMIZERS`.
        early: whether the script makes its optimizer before it wraps the model.
        clip: the norm of all gradients that steps of the optimizer go by at most; 0 clips none.
        stepwise: whether the script uses `@smp.step`, or `loss.backward()` as is allowed without a pipeline.
        config: more for `smp.init`.
        model: more for `smp.DistributedModel`.
        scaling: more for `smp.DistributedOptimizer`.
        prepare: what the script does to its module before it wraps it: marks layers, checkpoints them. In plain
            PyTorch, which has nothing to wrap, before it trains.
    """

    pipeline: int = 1
    replicas: int = 1
    tensor: int = 1
    microbatches: int = 4
    batches: tuple[int, ...] = (8, 8, 8)
    accumulation: int = 1
    placement: int | None = None
    traced: bool = False
    optimizer: str = "SGD"
    early: bool = False
    clip: float = 0.0
    stepwise: bool = True
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    model: Mapping[str, Any] = field(default_factory=dict, hash=False)
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    prepare: Callable[[nn.Module], object] | None = None

    @property
    def ranks(self) -> int:
        """How many processes train."""
        return self.pipeline * self.replicas * (self.tensor if self.config.get("prescaled_batch") else 1)

    @property
    def init(self) -> dict[str, Any]:
        """What `smp.init` gets."""
        placement = {} if self.placement is None else {"auto_partition": False, "default_partition": 0}
        degrees = {"pipeline_parallel_degree": self.pipeline, "tensor_parallel_degree": self.tensor}
        settings = {"microbatches": self.microbatches, "ddp": True, "skip_tracing": not self.traced}
        # Sharded data parallelism clips by itself, and to 1 unless told.
        clipping = {"sdp_gradient_clipping": self.clip} if "sharded_data_parallel_degree" in self.config else {}
        return {**degrees, **settings, **placement, **clipping, **self.config}

    @property
    def plain(self) -> Way:
        """What of this changes the numbers, for a training in one process."""
        fields = ("replicas", "microbatches", "batches", "accumulation", "optimizer", "clip")
        return Way(**{name: getattr(self, name) for name in fields})

    def __str__(self) -> str:
        """Name the row of a test: what differs from the usual way."""
        words = [f"{short}{getattr(self, name)}" for name, short in _SHORT.items() if getattr(self, name) != 1]
        words += ["traced"] * self.traced + ["whole batches"] * (self.microbatches == 1)
        words += [self.optimizer] * (self.optimizer != "SGD") + ["made early"] * self.early
        words += [f"clipped {self.clip}"] * (self.clip > 0) + ["no step"] * (not self.stepwise)
        words += [] if self.placement is None else [f"placed {self.placement}"]
        words += [f"{name}={value}" for name, value in {**self.config, **self.model}.items()]
        return " ".join(words) or "one rank"


def divide_layers(module: Any) -> None:
    """Mark the `layers` of a model for tensor parallelism."""
    for each in module.layers:
        smp.set_tensor_parallelism(each)


def checkpoint_layers(module: nn.Module) -> None:
    """Recompute the layers of a model: what its lists of modules hold."""
    for layers in module.modules():
        for each in layers if isinstance(layers, nn.ModuleList) else ():
            smp.set_activation_checkpointing(each)


KINDS: Final[Mapping[str, tuple[Case, Way]]] = {
    "plain": (DROPOUT, Way(microbatches=2)),
    "fp16": (DROPOUT, Way(microbatches=2, config={"fp16": True})),
    "pipeline": (DROPOUT, Way(pipeline=2)),
    "interleaved": (DROPOUT, Way(pipeline=2, config={"virtual_pipeline_degree": 2})),
    "data": (DROPOUT, Way(replicas=2, microbatches=2)),
    "data, one parameter unused": (CASES["frozen and unused parameters"], Way(replicas=2, microbatches=2)),
    "data, sharded state": (DROPOUT, Way(replicas=2, microbatches=2, config={"shard_optimizer_state": True})),
    "tensor": (DROPOUT, Way(replicas=2, tensor=2, microbatches=2, prepare=divide_layers)),
    "activations offloaded": (
        DROPOUT,
        Way(microbatches=2, config={"offload_activations": True}, prepare=checkpoint_layers),
    ),
}
"""A small training of each kind, for what holds in all of them."""

_SHORT: Final = {"pipeline": "pp", "tensor": "tp", "replicas": "dp", "accumulation": "accumulated "}


@dataclass
class Trace:
    """What training did in a replica, or what one rank of it holds of that."""

    replica: int
    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    values: dict[str, Tensor]
    """Weights and buffers."""


def build(case: Case) -> nn.Module:
    torch.manual_seed(7)
    with torch.device("cpu"):  # whatever the default device is
        return case.build().to(case.dtype)


def differ(module: nn.Module) -> None:
    """For `prepare`: start different on each replica, so that a missing broadcast shows."""
    with torch.no_grad():
        for each in [*module.parameters(), *module.buffers()]:
            each.add_(smp.dp_rank())


def batch(case: Case, number: int, size: int, replica: int = 0) -> tuple[Any, ...]:
    return case.batch(size, torch.Generator().manual_seed(100 + number + 1000 * replica))


# --- the comparison ---------------------------------------------------------------------------------------------------


def same(
    case: Case,
    way: Way,
    *,
    like: Way | None = None,
    tolerance: float = TOLERANCE,
    by: Callable[[Case, Way], Trace] | None = None,
) -> None:
    """Train with smpkit on ranks of their own, and see that all comes out as in plain PyTorch.

    Args:
        like: what to compare with instead: another way to train with smpkit.
        tolerance: relative and absolute; 0 compares bits.
        by: what trains on each rank instead of `train`.
    """
    train_here = by or train
    expected = reference(case, way) if like is None else _other(train_here, case, like)
    traces = run_ranks(train_here, way.ranks, case, way)
    for trace in traces:
        check_same(trace, expected[trace.replica], tolerance)
    held = {name for trace in traces for name in trace.values}
    assert held >= set(expected[0].gradients), "not every parameter is on a rank"
    trained = {name for name, each in expected[0].gradients.items() if each is not None}
    assert trained <= {name for trace in traces for name in trace.gradients}, "not every gradient is on a rank"


def run(case: Case, way: Way) -> list[Trace]:
    """Train on ranks of their own, and return what each of them holds."""
    return run_ranks(train, way.ranks, case, way)


def reference(case: Case, way: Way) -> list[Trace]:
    """Return what `train_plainly` returns, from a rank of its own, once for all ways that come to the same."""
    return _reference(case, way.plain)


@functools.lru_cache(32)
def _reference(case: Case, way: Way) -> list[Trace]:
    # In a process that has torch and the models' libraries already.
    [traces] = run_ranks(train_plainly, 1, case, way)
    return traces


@functools.lru_cache(4)
def _other(by: Callable[[Case, Way], Trace], case: Case, way: Way) -> list[Trace]:
    return whole(run_ranks(by, way.ranks, case, way))


def whole(traces: Iterable[Trace]) -> list[Trace]:
    """Put together what the ranks of each replica hold."""
    replicas: dict[int, Trace] = {}
    for trace in traces:
        known = replicas.setdefault(trace.replica, replace(trace, gradients={}, values={}))
        known.gradients.update(trace.gradients)
        known.values.update(trace.values)
    return [replicas[number] for number in sorted(replicas)]


def check_same(ours: Trace, plain: Trace, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError where this rank's part differs from the whole."""
    for number, (mine, theirs) in enumerate(zip(ours.outputs, plain.outputs, strict=True)):
        assert len(mine) == len(theirs), f"call {number} returned {mine}, not {theirs}"
        for left, right in zip(mine, theirs, strict=True):
            _check_close(f"a result of call {number}", left, right, tolerance)
    for name, gradient in ours.gradients.items():
        _check_close(f"the gradient of {name}", gradient, plain.gradients[name], tolerance)
    for name, value in ours.values.items():
        _check_close(name, value, plain.values[name], tolerance)


def _check_close(what: str, ours: Any, plain: Any, tolerance: float) -> None:
    if not (isinstance(plain, Tensor | float) and isinstance(ours, Tensor | float)):
        assert ours == plain, f"{what}: {ours} instead of {plain}"
        return
    assert type(ours) is type(plain), f"{what} is {type(ours)}"
    if isinstance(ours, Tensor) and isinstance(plain, Tensor):
        on_a_gpu = chosen_device() == "cuda"
        if ours.device != plain.device or on_a_gpu:
            # A GPU adds up in another order than the CPU, on which plain training stays; autocast rounds elsewhere.
            least = 2e-3 if on_a_gpu and plain.dtype is not torch.float64 else 1e-8
            ours, tolerance = ours.to(plain.device), max(tolerance, least)
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


# --- in plain PyTorch -------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """What a step function sees of a model, in one process; gradients are averaged over `parts` backwards."""

    def __init__(self, module: nn.Module, parts: int) -> None:
        super().__init__()
        self.module = module
        self.parts = parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, tensors: Any, gradients: Any = None) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        weights = [torch.ones_like(root) for root in roots] if gradients is None else gradients
        torch.autograd.backward(roots, [each / self.parts for each in weights])


def train_plainly(case: Case, way: Way) -> list[Trace]:
    """Train in one process, and return what each replica sees."""
    module = build(case)
    if way.prepare is not None:
        way.prepare(module)
    model = Plain(module, way.microbatches * way.replicas * way.accumulation)
    optimizer = OPTIMIZERS[way.optimizer](_trained(model))
    outputs: list[list[Any]] = [[] for _ in range(way.replicas)]
    buffers = [_buffers(model)] * way.replicas
    for number, size in enumerate(way.batches):
        if number % way.accumulation == 0:
            optimizer.zero_grad()
        first = buffers[0]
        for replica in range(way.replicas):
            # Replicas begin a step with the buffers (running statistics) of the first, and change their own.
            _restore(model, first)
            arguments = batch(case, number, size, replica)
            outputs[replica].append(flat(in_turn(case.step, way.microbatches)(model, *arguments)))
            buffers[replica] = _buffers(model)
        if (number + 1) % way.accumulation == 0:
            if way.clip:
                nn.utils.clip_grad_norm_(model.parameters(), way.clip)
            optimizer.step()
    traces = []
    for replica in range(way.replicas):
        _restore(model, buffers[replica])
        traces.append(_trace(replica, outputs[replica], model.module, dict(model.module.named_parameters())))
    return traces


def in_turn(step: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return what `smp.step` makes of a step, in one process: it takes one microbatch after the other."""

    def run_step(model: Any, *whole: Any) -> Any:
        return collate([step(model, *[part(each, index, count) for each in whole]) for index in range(count)])

    return run_step


def part(value: Any, index: int, count: int) -> Any:
    return value.chunk(count)[index] if isinstance(value, Tensor) else value


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _restore(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


# --- with smpkit ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def world(way: Way) -> Iterator[None]:
    """Initialise smpkit on this rank, and shut it down if all went well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one microbatch over two ranks trains right, if not fast
        smp.init(way.init)
    yield
    smp.shutdown()


def train(case: Case, way: Way) -> Trace:
    """Train on this rank, through nothing but the public calls, and return what it holds."""
    with training(case, way) as trained:
        return trace_of([trained.run(number) for number in range(len(way.batches))], trained.model)


@contextlib.contextmanager
def training(case: Case, way: Way) -> Iterator[Training]:
    """Wrap the model on this rank, and shut smpkit down at the end; for tests that look at training as it goes."""
    with world(way):
        yield Training(case, way)


class Training:
    """A script that trains on this rank batch by batch, and may do other things in between; lives in a `world`."""

    def __init__(self, case: Case, way: Way) -> None:
        self.case, self.way = case, way
        module = build(case)
        if way.placement is not None:
            place(module, way.placement, way.pipeline)
        if way.prepare is not None:
            way.prepare(module)
        inner = OPTIMIZERS[way.optimizer](_trained(module)) if way.early else None
        self.model = smp.DistributedModel(module, backward_passes_per_step=way.accumulation, **way.model)
        inner = inner or OPTIMIZERS[way.optimizer](_trained(self.model))
        self.optimizer = smp.DistributedOptimizer(inner, **way.scaling)
        self.parameters = self.model.local_named_parameters
        self._step = smp.step(case.step) if way.stepwise else case.step
        self._seen: Any = self.model if way.stepwise and way.accumulation == 1 else _Seen(self.model, way)
        self._calls = itertools.count()

    def run(self, number: int) -> list[Any]:
        """Train on a batch, and return what the step returned."""
        return flat(self.step(*batch(self.case, number, self.way.batches[number], _replica())))

    def step(self, *arguments: Any) -> Any:
        """Call the step, and the optimizer when it is due; return what the step does."""
        way, call = self.way, next(self._calls)
        if call % way.accumulation == 0:
            self.optimizer.zero_grad()
        if not way.stepwise:  # only a step moves them by itself
            arguments = tuple(each.to(smp.state.device) if torch.is_tensor(each) else each for each in arguments)
        returned = self._step(self._seen, *arguments)
        if (call + 1) % way.accumulation == 0:
            if way.clip and "sharded_data_parallel_degree" not in way.config:
                smp.clip_grad_norm_(self.model, way.clip)
            self.optimizer.step()
        return returned


class TrainingInSlices:
    """The same for an `nn.Sequential` as an OffloadModel, with its own optimizer."""

    def __init__(self, case: Case, device: str = "cpu", **options: Any) -> None:
        self.case = case
        self.model = OffloadModel(build(case), torch.device(device), **options)
        self.optimizer = OffloadOptimizer(self.model, torch.optim.AdamW, lr=0.01)
        self.parameters = self.model.named_parameters

    def step(self, *arguments: Any) -> Any:
        """Train on a batch, and return what the step returned."""
        self.optimizer.zero_grad()
        returned = self.case.step(Plain(self.model, 1), *arguments)
        self.optimizer.step()
        return returned


def train_with_sleeps(seed: int, case: Case, way: Way) -> Trace:
    """Train while sends, receives and layers sleep at random, each rank by dice of its own."""
    dice = random.Random(f"{seed} {os.environ['RANK']}")
    called: list[tuple[Any, str]] = [(nn.Linear, "forward"), (Transport, "send"), (Transport, "receive")]
    with contextlib.ExitStack() as patches:
        for owner, name in called:
            patches.enter_context(mock.patch.object(owner, name, _late(getattr(owner, name), dice)))
        return train(case, way)


def _late(function: Callable[..., Any], dice: random.Random) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if dice.random() < 0.3:
            time.sleep(dice.random() * 0.004)
        return function(*args, **kwargs)

    return called


class _Seen:
    """A model whose step divides by the number of calls it accumulates over, or calls autograd itself."""

    def __init__(self, model: smp.DistributedModel, way: Way) -> None:
        self.model = model
        self.way = way

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        loss = loss / self.way.accumulation
        if self.way.stepwise:
            self.model.backward(loss)
        else:
            loss.backward()


def place(module: nn.Module, seed: int, degree: int) -> None:
    """Put every unit somewhere, and something everywhere."""
    names = [unit.name for unit in units_of(module)]
    dice = random.Random(seed)
    owners = [index * degree // len(names) for index in range(len(names))]
    if seed >= 0:
        owners = [dice.randrange(degree) for _ in names]
        for owner, index in enumerate(dice.sample(range(len(names)), min(degree, len(names)))):
            owners[index] = owner
    for name, owner in zip(names, owners, strict=True):
        smp.set_partition(module.get_submodule(name), owner)


def trace_of(outputs: list[Any], model: smp.DistributedModel) -> Trace:
    """Return what this rank holds of `model`, beside what its steps returned; divided tensors whole, by plain names."""
    held = dict(model.local_named_parameters())
    trace = _trace(_replica(), outputs, model.module, held)
    if smp.tp_size() > 1:
        root = model.get_module()
        trained = {name: each for name, each in trace.gradients.items() if each is not None}
        trace.gradients = with_original_names(root, {**trace.gradients, **join_state(root, trained)})
        trace.values = with_original_names(root, join_state(root, trace.values))
    if smp.state.cfg.shard_optimizer_state:  # a gradient is where its optimizer state is
        trace.gradients = {name: each for name, each in trace.gradients.items() if each is not None}
    return trace


def _replica() -> int:
    return smp.rdp_rank() if smp.state.cfg.prescaled_batch else smp.dp_rank()


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def _trace(replica: int, outputs: list[Any], module: nn.Module, parameters: Mapping[str, Tensor]) -> Trace:
    buffers = {name: each.clone() for name, each in module.named_buffers() if each.device.type != "meta"}
    gradients = {name: None if each.grad is None else _full(each.grad).clone() for name, each in parameters.items()}
    values = {name: _full(each.detach()).clone() for name, each in parameters.items()}
    return Trace(replica, outputs, gradients, {**values, **buffers})


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def flat(value: Any) -> list[Any]:
    """Return the leaves of what a step returned, and the kinds of containers around them."""
    if isinstance(value, StepOutput):
        return [output.detach() for output in value.outputs]
    inside = children(value)
    if inside is None:
        return [value]
    return [type(value).__name__, *inside, *[leaf for each in inside.values() for leaf in flat(each)]]
