"""What ranks run and send of every public model we know, by hash: a rebuild of the pipeline changes none of it.

Each model's step is recorded on tensors without data, as `smpkit plan` does, with its units dealt evenly to four ranks
and with each unit on a rank of its own. What is hashed is what a schedule is made of: the units that each segment of
each rank calls, and the values that go from segment to segment, with shape, dtype and whether a gradient comes back.

    python -m tests.transparency.test_pipeline_gate NAME ...          prints that, to compare with another commit's
    python -m tests.transparency.test_pipeline_gate --write [NAME ...]    records it anew
"""

from __future__ import annotations

import argparse
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from smpkit.plan.partition.assignment import Assignment
from smpkit.plan.schedule.recorded_graph import RecordedGraph
from smpkit.torch.core.tensor_spec import map_tensors
from smpkit.torch.pipeline.fake_recording import LayerOutputs, record_on_fakes
from smpkit.torch.pipeline.stage_tensor import Current
from smpkit.torch.placement.units import units_of
from tests.models import CASES, HUGGING_FACE, Case
from tests.models_of_others import MISSING, TIMM, TORCHVISION, TRANSFORMERS, import_torchvision
from tests.train import Plain, batch, build

FILE = Path(__file__).with_name("pipeline_gate.yaml")
LIBRARIES: dict[str | None, dict[str, Case]] = {
    None: CASES,
    "transformers": {**HUGGING_FACE, **TRANSFORMERS},
    "torchvision": TORCHVISION,
    "timm": TIMM,
}
LIBRARY_OF = {name: library for library, cases in LIBRARIES.items() for name in cases}
CASE_OF = {name: case for cases in LIBRARIES.values() for name, case in cases.items()}
NO_ANSWER = (DataDependentOutputException, DynamicOutputShapeException)


def dealt(index: int, count: int) -> int:
    return index * 4 // count


def apart(index: int, _: int) -> int:
    return index


PLACEMENTS: dict[str, Callable[[int, int], int]] = {"four ranks": dealt, "units apart": apart}


class WithBackward(Plain):
    """What a step function sees of a model that is recorded."""

    def backward(self, tensors: Any, gradients: Any = None) -> None:
        if Current.microbatch is None:  # the pass that finds out what layers cost
            return
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        Current.microbatch.backward(roots, [None] * len(roots) if gradients is None else gradients)


def placed(names: Sequence[str], ranks: Sequence[int]) -> Assignment:
    return Assignment(max(ranks) + 1, tuple(zip(names, ranks, strict=True)), ())


def placed_by(case: Case, placement: Callable[[int, int], int]) -> Assignment:
    if "torchvision" not in MISSING:
        import_torchvision()  # before transformers does
    names = [unit.name for unit in units_of(build(case)).units]
    return placed(names, [placement(index, len(names)) for index in range(len(names))])


def record(case: Case, assignment: Assignment, *, costs_first: bool = False) -> RecordedGraph:
    """Record a microbatch of the step on tensors without data.

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


def lines_of(graph: RecordedGraph) -> Iterator[str]:
    """Write down what ranks run and send, in order, without names that a rebuild may change."""
    for segment, units in graph.segments:
        yield f"{segment} calls {' '.join(units) or 'nothing'}"
    for value in graph.values:
        gradient = "a gradient comes back" if value.differentiable else "no gradient"
        yield f"{value.source} -> {value.target}: {value.dtype} {list(value.shape)}, {gradient}"


def recorded(name: str, cell: str) -> tuple[str, list[str]]:
    """Return the summary and hash of what ranks run and send, and the lines that are hashed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        try:
            graph = record(CASE_OF[name], placed_by(CASE_OF[name], PLACEMENTS[cell]))
        except NO_ANSWER:
            return "needs values", []
    lines = list(lines_of(graph))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
    return f"{len(graph.segments)} segments {len(graph.values)} values {digest}", lines


def known() -> dict[str, dict[str, str]]:
    """Return what was recorded, by model and placement, and under `versions` those of the libraries."""
    return yaml.safe_load(FILE.read_text()) if FILE.exists() else {}


def installed(library: str) -> str:
    return version(library).partition("+")[0]


KNOWN = known()


@pytest.mark.slow
@pytest.mark.parametrize("cell", PLACEMENTS)
@pytest.mark.parametrize("name", CASE_OF)
def test_ranks_run_and_send_what_they_did(name: str, cell: str) -> None:
    library = LIBRARY_OF[name]
    if library is not None:
        pinned = KNOWN["versions"][library]
        try:
            found = installed(library)
        except PackageNotFoundError:
            pytest.skip(f"{library} is not installed: `pip install --no-deps {library}=={pinned}`")
        assert found == pinned, f"recorded with {library} {pinned}, this is {found}: its models may be other ones"
    summary, lines = recorded(name, cell)
    command = f'python -m {__name__} --write "{name}"'
    assert summary == KNOWN[name][cell], "\n".join(["other than recorded; if that is meant, run", command, *lines])


def test_every_model_is_recorded() -> None:
    assert KNOWN.keys() == {"versions", *CASE_OF}


def write(names: list[str]) -> None:
    """Record models anew, the versions of their libraries with them."""
    found = known()
    libraries = [library for library in {LIBRARY_OF[name] for name in names} if library is not None]
    found["versions"] = dict(
        sorted({**found.get("versions", {}), **{each: installed(each) for each in libraries}}.items())
    )
    found |= {name: {cell: recorded(name, cell)[0] for cell in PLACEMENTS} for name in names}
    text = "# Written by `python -m tests.transparency.test_pipeline_gate --write`.\n"
    for name in ("versions", *CASE_OF):
        text += f"{json.dumps(name)}: {json.dumps(found[name])}\n"
    FILE.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print what ranks run and send of models, or record it.")
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(CASE_OF))
    parser.add_argument("--write", action="store_true", help="record it anew")
    options = parser.parse_args()
    if options.write:
        write(options.names)
    else:
        for name in options.names:
            for cell in PLACEMENTS:
                summary, lines = recorded(name, cell)
                print(f"{name}, {cell}: {summary}", *lines, sep="\n  ")  # noqa: T201 - a command
