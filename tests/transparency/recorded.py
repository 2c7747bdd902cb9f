"""Record a microbatch of a model's step on tensors without data, as `smpkit plan` does, under any placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from smpkit.plan.partition.assignment import Assignment
from smpkit.plan.schedule.recorded_graph import RecordedGraph
from smpkit.torch.core.tensor_spec import map_tensors
from smpkit.torch.pipeline.fake_recording import LayerOutputs, record_on_fakes
from smpkit.torch.pipeline.stage_tensor import Current
from tests.models import Case
from tests.train import Plain, batch, build

NO_ANSWER = (DataDependentOutputException, DynamicOutputShapeException)
"""What is raised where a step asks for a value, which a tensor without data does not have."""


class WithBackward(Plain):
    """What a step function sees of a model that is recorded."""

    def backward(self, tensors: Any, gradients: Any = None) -> None:
        if Current.microbatch is None:  # the pass that finds out what layers cost
            return
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        Current.microbatch.backward(roots, [None] * len(roots) if gradients is None else gradients)


def placed(names: Sequence[str], ranks: Sequence[int]) -> Assignment:
    return Assignment(max(ranks) + 1, tuple(zip(names, ranks, strict=True)), (), ())


def record(case: Case, assignment: Assignment, *, costs_first: bool = False) -> RecordedGraph:
    """Record a microbatch.

    Args:
        costs_first: whether what layers return is noted before, as by the pass that finds out what they cost.
    """
    module, mode = build(case), FakeTensorMode(allow_non_fake_inputs=True)
    arguments = batch(case, 0, 2)

    def call() -> None:
        fakes = map_tensors(mode.from_tensor, arguments)
        with mode:
            case.step(WithBackward(module, 1), *fakes)

    outputs = None
    if costs_first:
        outputs = LayerOutputs(module, [unit for unit, _ in assignment.units])
        outputs.noted(call)
    return record_on_fakes(module, assignment, [call], torch.device("cpu"), outputs)[0]
