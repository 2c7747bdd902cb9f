"""`python -m smpkit.torch.describe module:factory`: what a model is made of, as JSON, for `smpkit plan`.

The model is made of tensors without data, so one that fits no machine can be described on a laptop. A factory that
fails on these because it needs values is called again, with real tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import ConfigError, SmpkitError, UsageError
from smpkit.plan.decide import assign_units
from smpkit.plan.memory import ModelFacts, in_dtype
from smpkit.plan.mesh import Mesh
from smpkit.plan.partition.assignment import assignment_of
from smpkit.torch.core.context import Launch
from smpkit.torch.core.runtime import state
from smpkit.torch.pipeline.fake_recording import LayerOutputs, record_on_fakes
from smpkit.torch.placement.delayed import make_delayed
from smpkit.torch.placement.facts import (
    model_facts,
    twice_the_samples,
    with_growth_of_units,
    with_growth_of_values,
)
from smpkit.torch.placement.manual import manual_placement, planning_partitions
from smpkit.torch.placement.trace import measure_units
from smpkit.torch.placement.units import units_of
from smpkit.torch.precision.cast import cast_inputs, cast_model, half_dtype
from smpkit.torch.recompute.torch_checkpoint import patch_torch_checkpoint
from smpkit.torch.tensor_parallel.replace import distribute_without_weights

_TARGET_FORM: Final = "write `module:factory`, such as `model:build`"


def describe(
    factory: Callable[[], Any],
    num_partitions: int = 1,
    *,
    by_hand: bool = False,
    cfg: ModelParallelConfig | None = None,
    world_size: int = 1,
    other_sizes: bool = False,
) -> ModelFacts:
    """Return what planning needs to know of the model that `factory()` returns.

    Args:
        factory: returns a module, or a pair of a module and the arguments for one microbatch (a tuple, a dict, or one
            tensor), with which compute and activations become known too.
        num_partitions: how many partitions (or virtual stages) it may name in `smp.partition`.
        by_hand: units are placed there, so modules whose parts are placed apart are no units.
        cfg: of the job. What the factory marks is divided over its tensor-parallel ranks, and the first is described,
            in the precision of the job.
        world_size: how many ranks the job has.
        other_sizes: microbatches of other sizes will be planned, so what does not grow with the samples must be known.
            The model is called once more for that, with twice the samples.
    """
    patch_torch_checkpoint()  # as a job does: unpatched calls do not tell what they keep
    with planning_partitions(num_partitions), _first_rank(cfg, world_size):
        return _describe(factory, cfg or ModelParallelConfig(), by_hand=by_hand, other_sizes=other_sizes)


@contextlib.contextmanager
def _first_rank(cfg: ModelParallelConfig | None, world_size: int) -> Iterator[None]:
    """Make this process the first rank of a job without its other ranks, if tensors are divided over them."""
    if cfg is None or cfg.tensor_parallel_degree == 1:
        yield
        return
    mesh = Mesh.of(cfg, world_size)
    alone: Any = None  # no process groups: weights are not compared, and nothing is sent
    state.begin(cfg, Launch(world_size=world_size), mesh, {}, alone)
    try:
        yield
    finally:
        state.end()


def _describe(factory: Callable[[], Any], cfg: ModelParallelConfig, *, by_hand: bool, other_sizes: bool) -> ModelFacts:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            result = factory()
    except Exception:  # user code on tensors without data may fail in any way
        # A new mode: fakes that the failed call has left somewhere belong to the old one.
        mode, result = FakeTensorMode(allow_non_fake_inputs=True), _call_with_data(factory)
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the factory returned an object of type `{type(model).__name__}`",
            hint="return a torch.nn.Module, or a pair of it and the arguments for one microbatch",
        )
    notes: list[str] = []
    if state.initialized:
        make_delayed(model)
        model, notes = distribute_without_weights(model)
    half = half_dtype(cfg)
    masters = []
    if half is not None:
        if cfg.sharded_data_parallel_degree > 1:  # it keeps parameters in float32, and casts what it gathers
            masters = [name for name, parameter in model.named_parameters() if parameter.is_floating_point()]
        cast_model(model, half)
        inputs = cast_inputs(inputs, half)
    samples, tokens = _size_of(inputs)
    calls = [] if inputs is None else [_forward_call(model, inputs, mode)]
    pins = manual_placement(model) if by_hand else None
    units = units_of(model) if pins is None else units_of(model, pins.split)
    outputs = LayerOutputs(model, [unit.name for unit in units])
    costs = measure_units(model, units, functools.partial(outputs.noted, calls[0]) if calls else None)
    places = {} if pins is None else pins.for_units([cost.name for cost in costs])
    facts = replace(model_facts(model, costs, places), notes=tuple(notes))
    if other_sizes and facts.traced and samples:
        with mode:
            doubled = twice_the_samples(inputs, samples)
        larger = _forward_call(model, doubled, mode)
        reasons: list[str] = []
        doubled_costs = measure_units(model, units, functools.partial(outputs.noted, larger), reasons.append)
        if reasons:
            note = "all that layers keep is assumed to grow with the samples: with twice as many the model failed"
            facts = replace(facts, notes=(*facts.notes, f"{note} ({reasons[0]})"))
        else:
            facts = with_growth_of_units(facts, doubled_costs)
            calls.append(larger)
    if calls:
        facts = _recorded(facts, model, calls, cfg, inputs, outputs)
    kept = {name: in_dtype(facts.tensors[name], "float32", 4) for name in masters}
    return replace(facts, tensors={**facts.tensors, **kept}, samples=samples, tokens=tokens)


def _recorded(
    facts: ModelFacts,
    model: nn.Module,
    calls: Sequence[Callable[[], object]],
    cfg: ModelParallelConfig,
    inputs: Any,
    outputs: LayerOutputs,
) -> ModelFacts:
    """Add what a microbatch sends between the ranks of the job, if the model tells without data.

    Without a pipeline it is what would travel if every unit had a rank of its own: `RecordedGraph.under` tells from
    that what would travel between any ranks.

    Args:
        calls: of the model, the second one with twice the samples.
        outputs: what layers have returned in these calls.
    """
    try:
        if cfg.pipeline_parallel_degree > 1:
            assignment = assign_units(cfg, facts.costs, facts.places)
        else:
            places = {index: index for index in range(len(facts.costs))}
            assignment = assignment_of(facts.costs, places, len(places))
    except ConfigError:  # `decide` will say so
        return facts
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    try:
        recorded, *doubled = record_on_fakes(model, assignment, calls, device, outputs)
        in_all = with_growth_of_values(recorded, doubled[0] if doubled else None, _size_of(inputs)[0])
        return replace(facts, recorded=in_all)
    except Exception as error:  # user code on tensors without data may fail in any way
        reason = next(iter(str(error).splitlines()), "no reason given")
        note = (
            "what travels between stages is assumed, every unit handing its output to the next: the model could not be"
            f" run on tensors without data ({type(error).__name__}: {reason})"
        )
        return replace(facts, notes=(*facts.notes, note))


def _size_of(inputs: Any) -> tuple[int, int]:
    """Return how many samples and tokens a microbatch has."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        return 0, 0
    samples = tensors[0].shape[0]
    texts = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() > 1]
    return samples, texts[0].numel() if texts else samples


def _call_with_data(factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except SmpkitError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise UsageError(f"the factory failed: {type(error).__name__}: {error}", hint="`-v` shows where") from None


def _forward_call(model: nn.Module, inputs: Any, mode: FakeTensorMode) -> Callable[[], object]:
    """Return a call of the model that needs no data."""
    args: Sequence[Any] = () if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple | list) else (inputs,)
    kwargs: dict[str, Any] = inputs if isinstance(inputs, dict) else {}

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    def call() -> object:
        with mode:
            return model(*map(fake, args), **{name: fake(value) for name, value in kwargs.items()})

    return call


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Print the description of a model as one JSON object, or the error; what user code prints goes to stderr."""
    parser = argparse.ArgumentParser(prog="python -m smpkit.torch.describe", description=main.__doc__)
    parser.add_argument("--places", type=int, default=1, help="the number of partitions that the factory may name")
    parser.add_argument("--by-hand", type=int, help="the same, and its units are placed there")
    parser.add_argument("--other-sizes", action="store_true", help="microbatches of other sizes will be planned")
    parser.add_argument(
        "--job",
        action="append",
        metavar="RANKS:{...}",
        help="the number of ranks, and the parameters of the job; of several jobs each description is a line",
    )
    parser.add_argument("target", help=_TARGET_FORM)
    parser.add_argument("folders", nargs="*", help="where the module is found")
    options = parser.parse_args(arguments)
    sys.path[:0] = options.folders
    sys.argv[1:] = []  # a script that reads its arguments when it is imported gets its defaults, not ours
    with _redirect_stdout() as write:
        try:
            factory = _import_factory(options.target)
            lines = []
            for job in options.job or ["1:"]:
                ranks, _, parameters = job.partition(":")
                facts = describe(
                    factory,
                    options.by_hand or options.places,
                    by_hand=options.by_hand is not None,
                    cfg=ModelParallelConfig.model_validate_json(parameters) if parameters else None,
                    world_size=int(ranks),
                    other_sizes=options.other_sizes,
                )
                lines.append(facts.to_json())
            write("\n".join(lines))
        except SmpkitError as error:
            write(json.dumps({"error": error.message, "hint": error.hint, "exit_code": error.exit_code}))
            return error.exit_code
    return 0


@contextlib.contextmanager
def _redirect_stdout() -> Iterator[Callable[[str], object]]:
    """Point file descriptor 1 at stderr in this block, also for what C code prints; yield what writes to stdout."""
    sys.stdout.flush()
    with open(os.dup(1), "w", encoding="utf-8") as ours:  # noqa: PTH123 - a descriptor, not a path
        os.dup2(2, 1)
        yield ours.write
        sys.stdout.flush()


def _import_factory(target: str) -> Callable[[], Any]:
    module_name, colon, attributes = target.partition(":")
    if not (module_name and colon and attributes):
        raise UsageError(f"`{target}` names no factory", hint=_TARGET_FORM)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise UsageError(
            f"module `{module_name}` cannot be imported: {type(error).__name__}: {error}", hint=_TARGET_FORM
        ) from None
    try:
        factory: Callable[[], Any] = operator.attrgetter(attributes)(module)
    except AttributeError:
        raise UsageError(f"module `{module_name}` has no `{attributes}`", hint=_TARGET_FORM) from None
    if not callable(factory):
        raise UsageError(f"`{target}` is not callable", hint=_TARGET_FORM)
    return factory


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
