"""Training over two ranks on the GPU equals training in one process there: every schedule, and replicas.

Values go through gloo, or NCCL where it lets ranks share a GPU (`scripts/gpu --nccl`). Over gloo, whole files of
tests/transparency run on the GPU, too.
"""

from __future__ import annotations

import os

import pytest

from benchmarks.on_gpu.parts import NCCL
from smpkit.testing import RankFailed
from tests.device.device import IS_SIMULATED, gpu
from tests.device.models import on
from tests.device.on_sim import naming
from tests.device.ranks import run_on_gpu
from tests.models import CASES, MODELS, Case
from tests.train import Way, check_same, checkpoint_layers, reference, train, train_plainly
from tests.transparency.test_data_parallel import row
from tests.transparency.test_pipeline_schedules import SHAPES
from tests.transparency.test_sharded_data_parallel import way_of

_TOLERANCE = 1e-10  # float64; kernels of a GPU add up in an order of their own, which may change with the shape

SPLIT_VIRTUAL = Way(pipeline=2, microbatches=8, config={"pipeline": "zero_bubble", "virtual_pipeline_degree": 2})
WAYS = (
    Way(pipeline=2),
    Way(pipeline=2, config={"pipeline": "simple"}),
    Way(pipeline=2, config={"pipeline": "zero_bubble"}),
    Way(pipeline=2, microbatches=8, config={"virtual_pipeline_degree": 2}),
    SPLIT_VIRTUAL,
    Way(pipeline=2, microbatches=8, config={"active_microbatches": 2}),
)


def train_all(cases: dict[str, Case], ways: tuple[Way, ...]) -> int:
    """Train each case over this pipeline, built on the CPU, and compare it with one that has always been on the GPU."""
    for name, case in cases.items():
        for way in ways:
            with naming(f"`{name}` with {way}"):
                check_same(train(case, way), train_plainly(on(gpu(), case), way)[0], _TOLERANCE)
    return len(cases) * len(ways)


@pytest.mark.parametrize("name", SHAPES)
def test_schedules(name: str) -> None:
    assert run_on_gpu(train_all, {name: SHAPES[name]}, WAYS, timeout=150) == [len(WAYS)] * 2


def test_models_of_every_shape() -> None:
    # The one that is left out makes a mask on the CPU, wherever its input is: plain PyTorch refuses it on a GPU, too.
    cases = {name: case for name, case in CASES.items() if name != "encoder and decoder"}
    assert run_on_gpu(train_all, cases, WAYS[:1], timeout=150) == [len(cases)] * 2


REPLICAS = {
    "replicas": row("frozen and unused parameters", True, accumulation=2),
    "sharded parameters": ("tied by a function", way_of(accumulation=2, batches=(8,) * 4, prepare=checkpoint_layers)),
}


@pytest.mark.parametrize("kind", REPLICAS)
def test_replicas_equal_plain_pytorch(kind: str) -> None:
    name, way = REPLICAS[kind]
    if kind == "sharded parameters" and os.environ.get(NCCL) != "1" and not IS_SIMULATED:
        with pytest.raises(RankFailed, match="only gloo carries tensors of cuda"):
            run_on_gpu(train, MODELS[name], way, timeout=150)
        return
    for trace in run_on_gpu(train, MODELS[name], way, timeout=150):
        check_same(trace, reference(MODELS[name], way)[trace.replica], 1e-8)  # the reference's float64 is the CPU's
