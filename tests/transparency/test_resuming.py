"""A job that resumes on other ranks or in another precision goes on as if it had not stopped."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import smpkit.torch as smp
from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints.load import _number
from tests.models import MODELS, Case, mse_step, sequential, singles
from tests.pairwise import slow
from tests.ranks import run_ranks
from tests.train import (
    TOLERANCE,
    Trace,
    Training,
    Way,
    batch,
    check_same,
    flat,
    same,
    trace_of,
    train_plainly,
    training,
    whole,
)

SLOW = pytest.mark.slow
BEFORE, AFTER = range(2), range(2, 4)
PLAIN = Way(microbatches=2, batches=(4,) * 4, optimizer="AdamW")


def go_on(trained: Training, case: Case, numbers: range) -> list[Any]:
    """Train all replicas on the same, so that their number does not matter."""
    return [flat(trained.step(*batch(case, number, 4))) for number in numbers]


def save(case: Case, way: Way, folder: Path) -> Trace:
    """Save a checkpoint in the middle, and go on."""
    with training(case, way) as trained:
        go_on(trained, case, BEFORE)
        smp.save_checkpoint(folder, "middle")
        return trace_of(go_on(trained, case, AFTER), trained.model)


def resume(case: Case, way: Way, folder: Path) -> Trace:
    with training(case, way) as trained:
        smp.resume_from_checkpoint(folder, "middle")
        return trace_of(go_on(trained, case, AFTER), trained.model)


def check(case: Case, saved: Way, now: Way, folder: Path, tolerance: float, *, is_plain: bool) -> None:
    """Compare what a resumed job has at its end with plain PyTorch, or with the job that went on."""
    [expected, *others] = whole(run_ranks(save, saved.ranks, case, saved, folder))
    for other in others:  # a rank with a share of the optimizer's states has no other gradients
        expected.gradients |= other.gradients
    if is_plain:
        expected = plainly(case)
    for trace in run_ranks(resume, now.ranks, case, now, folder):
        check_same(trace, expected, tolerance)


@functools.cache
def plainly(case: Case) -> Trace:
    [[trace]] = run_ranks(train_plainly, 1, case, PLAIN)
    return replace(trace, outputs=trace.outputs[AFTER.start :])


def divided(pipeline: int = 1, tensor: int = 1, replicas: int = 1, **config: Any) -> Way:
    """Return a way over so many ranks, of which `replicas` are neither a pipeline's nor tensor-parallel ones."""
    return replace(
        PLAIN,
        pipeline=pipeline,
        tensor=tensor,
        replicas=replicas * tensor,
        config=config,
        prepare=smp.set_tensor_parallelism,
    )


# --- other ranks ------------------------------------------------------------------------------------------------------

LOOP = MODELS["ModuleList and a loop"]
GPT_2 = MODELS["GPT-2, loss outside"]  # inside, the loss is one of float32
LAYOUTS = {
    "one rank": divided(),
    "pp2": divided(2),
    "tp2, sharded states": divided(1, 2, shard_optimizer_state=True),
    "pp2 tp2": divided(2, 2),
    "pp2 dp2": divided(2, 1, 2),
    "tp2 dp2, sharded states": divided(1, 2, 2, shard_optimizer_state=True),
    "pp4": divided(4),
    "dp4": divided(1, 1, 4),
    "pp2 tp2 dp2": divided(2, 2, 2),
    "sharded data": divided(1, 1, 2, sharded_data_parallel_degree=2, sdp_gradient_clipping=0.0),
    "sharded data, of four": divided(1, 1, 4, sharded_data_parallel_degree=4, sdp_gradient_clipping=0.0),
}
FEW = [
    ("pp2 tp2", "sharded data"),
    ("sharded data", "tp2, sharded states"),
    ("tp2, sharded states", "pp2"),
    ("sharded data, of four", "sharded data"),
]


EACH_FOR_THE_NEXT = zip(LAYOUTS, [*[*LAYOUTS][1:], *[*LAYOUTS][:1]], strict=True)


@pytest.mark.parametrize(("saved", "now"), [*FEW, *slow(EACH_FOR_THE_NEXT)])
def test_a_job_resumes_on_other_ranks(saved: str, now: str, tmp_path: Path) -> None:
    check(LOOP, LAYOUTS[saved], LAYOUTS[now], tmp_path, TOLERANCE, is_plain=True)


@pytest.mark.parametrize(
    ("tensor", "now"), [(2, "one rank"), (2, "sharded data"), pytest.param(4, "one rank", marks=SLOW)]
)
def test_packed_weights_and_their_states_resume_on_other_ranks(tensor: int, now: str, tmp_path: Path) -> None:
    check(GPT_2, divided(1, tensor), LAYOUTS[now], tmp_path, TOLERANCE, is_plain=True)


def test_numbers_of_weights_resume_beside_other_weights(tmp_path: Path) -> None:
    """NovoGrad divides by one number for each weight, and the packed weights of this model are replaced together."""
    way = replace(divided(1, 2), optimizer="NovoGrad")
    check(GPT_2, way, replace(way, tensor=1, replicas=1), tmp_path, TOLERANCE, is_plain=False)


def test_weights_with_different_numbers_are_not_put_together() -> None:
    assert _number("packed", "step", lambda: torch.full((2, 2), 3.0)).equal(torch.tensor(3.0))
    with pytest.raises(CheckpointError, match=r"`exp_avg_sq` of `packed` is one number, and .* have different ones"):
        _number("packed", "exp_avg_sq", lambda: torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize(
    "model", ["BatchNorm", *[pytest.param(each, marks=SLOW) for each in ("tied modules", "parameters of the root")]]
)
def test_buffers_and_shared_weights_resume_on_another_pipeline(model: str, tmp_path: Path) -> None:
    one, two = replace(PLAIN, pipeline=1), replace(PLAIN, pipeline=2)
    check(MODELS[model], two, one, tmp_path, TOLERANCE, is_plain=True)


# --- states that are loaded as they were saved, without a checkpoint --------------------------------------------------


def train_twice(case: Case, way: Way, parts: bool) -> Trace:
    """Train on the last batch, go back to the states before it, and train on it again.

    In parts, each rank has its own; whole ones are those of the first rank, which is the one that scripts save on.
    """
    last = len(way.batches) - 1
    with training(case, way) as trained:
        model, optimizer = trained.model, trained.optimizer
        outputs = [trained.run(number) for number in range(last)]
        saved = [each.local_state_dict() if parts else each.state_dict() for each in (model, optimizer)]
        saved = saved if parts else smp.allgather(saved)[0]
        weights, states = copy.deepcopy(saved)  # they refer to what training goes on to change
        trained.run(last)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        return trace_of([*outputs, trained.run(last)], model)


def mark(module: Any) -> None:
    smp.set_tensor_parallelism(module.layers)


def sharded(tensor: int = 1, **config: Any) -> Way:
    """Return a way over two replicas that share something, and over tensor-parallel ranks besides."""
    way = Way(replicas=2, microbatches=2, optimizer="AdamW", config=config)
    if tensor == 1:
        return way
    return replace(way, tensor=tensor, clip=0.3, config={**config, "prescaled_batch": True}, prepare=mark)


@pytest.mark.parametrize(
    ("way", "parts"),
    [
        (sharded(shard_optimizer_state=True), True),
        (sharded(sharded_data_parallel_degree=2), False),
        (sharded(2, shard_optimizer_state=True), False),
        (sharded(2, sharded_data_parallel_degree=2), True),
    ],
    ids=str,
)
def test_states_that_are_loaded_are_those_that_were_saved(way: Way, parts: bool) -> None:
    same(MODELS["tied by a function"], way, by=functools.partial(train_twice, parts=parts))


# --- other precisions -------------------------------------------------------------------------------------------------


HALF = Case(sequential, singles, mse_step, torch.float32)
SHARDED: dict[str, Any] = {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0}
MODES = {
    "float32": divided(replicas=2),
    "bf16": divided(replicas=2, bf16=True),
    "bf16 pipeline": divided(2, bf16=True),
    "bf16 states": divided(replicas=2, bf16=True, shard_optimizer_state=True),
    "bf16 tensor": divided(tensor=2, bf16=True),
    "bf16 sharded": divided(replicas=2, bf16=True, **SHARDED),
    "fp16": divided(replicas=2, fp16=True),
    "fp16 states": divided(replicas=2, fp16=True, shard_optimizer_state=True),
    "fp16 sharded": divided(replicas=2, fp16=True, **SHARDED),
}


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ("bf16 pipeline", "bf16"),
        ("fp16", "fp16 states"),
        pytest.param("bf16", "bf16 pipeline", marks=SLOW),
        pytest.param("fp16 states", "fp16", marks=SLOW),
    ],
)
def test_a_job_in_half_precision_goes_on(saved: str, now: str, tmp_path: Path) -> None:
    # A pipeline's microbatches and one rank's round their sums in another order.
    check(HALF, MODES[saved], MODES[now], tmp_path, 1e-5, is_plain=False)


def carry(saved: str, now: str, folder: Path) -> str | None:
    """Resume in another mode; return the error, or nothing if the weights are those that were saved."""
    with training(HALF, MODES[saved]) as trained:
        go_on(trained, HALF, BEFORE)
        smp.save_checkpoint(folder, "middle")
        expected = {name: value.detach().clone() for name, value in trained.model.state_dict().items()}
    with training(HALF, MODES[now]) as trained:
        try:
            smp.resume_from_checkpoint(folder, "middle")
        except CheckpointError as error:
            smp.resume_from_checkpoint(folder, "middle", load_optimizer=False)
            for name, value in trained.model.state_dict().items():
                assert torch.equal(value, expected[name].to(value.dtype)), name
            return str(error)
        for name, value in trained.model.state_dict().items():
            assert torch.equal(value, expected[name]), name
        return None


FLOAT, BFLOAT, HALVES = "float32 weights", *(f"{kind} weights with float32 masters" for kind in ("bfloat16", "float16"))


@pytest.mark.parametrize(
    ("saved", "now", "refusal"),
    [
        ("bf16 states", "bf16 sharded", f"is of {BFLOAT}, but this job has {FLOAT}"),
        ("float32", "bf16 tensor", f"is of {FLOAT}, but this job has {BFLOAT}"),
        ("bf16 sharded", "float32", None),
        pytest.param("bf16", "fp16", f"is of {BFLOAT}, but this job has {HALVES}", marks=SLOW),
        pytest.param("bf16 sharded", "fp16 sharded", None, marks=SLOW),
    ],
    ids=["masters that would be lost", "masters that are missing", "float32", "other halves", "float32 in halves"],
)
def test_another_precision_is_refused_where_weights_would_be_rounded(
    saved: str, now: str, refusal: str | None, tmp_path: Path
) -> None:
    for error in run_ranks(carry, 2, saved, now, tmp_path):
        assert (error is None) == (refusal is None)
        assert refusal is None or (refusal in error and "load_optimizer=False" in error)
