"""A pipeline trains on the arguments of its rank 0, whatever scripts pass on the other ranks."""

from __future__ import annotations

import copy
import importlib
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from smpkit.drop_in import DROP_IN_PATH
from tests.models import WIDTH, Case, mse_step, sequential, vectors
from tests.ranks import run_ranks
from tests.torch.steps import error_of, evaluate, on_ranks, over_ranks
from tests.train import Way, batch, build, same, training

# --- what the other ranks pass ----------------------------------------------------------------------------------------


@dataclass
class Sample:
    """A batch as a class of the user's."""

    x: Tensor
    y: Tensor | None


class Recipe:
    """An object that each rank has of its own."""

    scale = 2.0


def any_step(model: Any, inputs: Any, y: Any = None, recipe: Any = None) -> Tensor:
    if isinstance(inputs, Sample):
        inputs, y = inputs.x, inputs.y
    elif isinstance(inputs, dict):
        inputs, y = inputs["x"], inputs["more"][0]
    loss = functional.mse_loss(model(inputs), y) * (1.0 if recipe is None else getattr(recipe, "scale", recipe))
    model.backward(loss)
    return loss


def by_rank(row: str, size: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Return what pipeline rank 0 passes, and on the others what they do."""
    return ROWS[row](*vectors(size, generator))[min(smp.pp_rank(), 1)]


ROWS: dict[str, Callable[[Tensor, Tensor], tuple[Any, Any]]] = {
    "empty tensors": lambda x, y: ((x, y), (torch.empty(0), torch.empty(0))),
    "other shapes and dtypes": lambda x, y: ((x, y), (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(1))),
    "None": lambda x, y: ((x, y), (None, None)),
    "a dict with other keys": lambda x, y: (({"x": x, "more": [y, {"note": "a"}]},), ({"z": 1},)),
    "a tensor given twice": lambda x, y: ((x, x), (x, y)),
    "a class": lambda x, y: ((Sample(x, y), None, Recipe()), (None, 3, Recipe())),
    # CutMix makes such a number of what it has drawn, on each rank another one.
    "a number of numpy's": lambda x, y: ((x, y, np.float64(2.0)), (x, y, np.float64(3.0))),
    "another memory order": lambda x, y: ((x.t().contiguous().t(), y), (x, y)),
}


ONE_RANK = Way(microbatches=2, batches=(8, 4, 8))


@pytest.mark.parametrize("row", ROWS)
def test_all_ranks_use_the_arguments_of_rank_0(row: str) -> None:
    same(Case(sequential, partial(by_rank, row), any_step), replace(ONE_RANK, pipeline=2), like=ONE_RANK)


def test_tensor_parallel_ranks_compare_what_the_first_ranks_of_their_pipelines_pass() -> None:
    way = Way(pipeline=2, replicas=2, tensor=2, microbatches=2)
    same(Case(sequential, partial(by_rank, "empty tensors"), any_step), way, like=Way(replicas=2, microbatches=2))


def drawing_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Use what is drawn on the first rank and on the last, as GANs do with the class that they ask for."""
    scale = random.random() + np.random.random()
    return mse_step(model, scale * x, scale * y)


def seeded_by_rank(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    random.seed(smp.pp_rank())
    np.random.seed(smp.pp_rank())
    return vectors(size, generator)


def test_all_ranks_draw_in_a_step_what_rank_0_draws() -> None:
    # The first layer got other numbers than the loss, without a word.
    same(Case(sequential, seeded_by_rank, drawing_step), replace(ONE_RANK, pipeline=2), like=ONE_RANK)


@smp.step
def noise_step(model: Any, x: Tensor) -> Tensor:
    """Use noise on the first rank and on the last, as diffusion models and masked autoencoders do."""
    noise = torch.randn_like(x)
    return functional.mse_loss(model(x + noise), noise)


def noise_losses(way: Way) -> Tensor:
    with training(CASE, way) as trained, torch.no_grad():
        torch.manual_seed(smp.pp_rank())
        trained.model.eval()
        return noise_step(trained.model, batch(CASE, 0, 8)[0]).stack()


def test_all_ranks_draw_in_an_evaluation_what_rank_0_draws() -> None:
    # The loss compared one noise with another.
    expected = run_ranks(noise_losses, 1, ONE_RANK) * 2
    torch.testing.assert_close(run_ranks(noise_losses, 2, replace(ONE_RANK, pipeline=2)), expected)


def masking_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Change the batch in place, as scripts that mask tokens and FSMT of transformers do."""
    x[x > 1] = 0.0
    return mse_step(model, x, y)


def test_a_step_may_change_its_microbatch_in_place() -> None:
    # Parts of a batch counted their changes together, so backward refused what a later microbatch had not touched.
    same(Case(sequential, vectors, masking_step), Way(pipeline=2))


# --- what a rank lacks ------------------------------------------------------------------------------------------------

CASE = Case(sequential, vectors, any_step)


def wrapped() -> Any:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, "skip_tracing": True})
    return smp.DistributedModel(build(CASE))


def own_object() -> str:
    step, model = smp.step(any_step), wrapped()
    return error_of(lambda: step(model, *batch(CASE, 0, 8), Recipe() if smp.pp_rank() == 0 else None))


def local_class() -> str:
    """Pass an object of a class that cannot be pickled."""

    @dataclass
    class Local:
        x: Tensor

    def local_step(model: Any, sample: Any) -> Tensor:
        return mse_step(model, sample.x, sample.x)

    step, model = smp.step(local_step), wrapped()
    return error_of(lambda: step(model, Local(batch(CASE, 0, 8)[0])))


def test_an_object_that_a_rank_lacks_is_named() -> None:
    _, second = run_ranks(own_object, 2)
    assert "pipeline rank 0 passed an object of type `tests.transparency.test_pipeline_inputs.Recipe`" in second
    assert "as argument 3 of the step `any_step`" in second
    assert "pipeline rank 1 passed one of type `builtins.NoneType`" in second


def test_arguments_that_cannot_be_sent_are_named() -> None:
    for message in run_ranks(local_class, 2):
        assert "pipeline rank 0 passed arguments to the step `local_step`" in message
        assert "cannot be sent" in message
        assert "Local" in message


# --- what is said -----------------------------------------------------------------------------------------------------


def sharded_by_rank(v1: bool, alike: bool) -> list[str]:
    """Return the warnings of a script that gives each rank of a pipeline data of its own, as if all were replicas."""
    if v1:
        sys.path.insert(0, str(DROP_IN_PATH))
        importlib.import_module("smdistributed.modelparallel.torch")
    with training(CASE, Way(pipeline=2)) as trained, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            trained.step(*batch(CASE, number if alike else 10 * number + smp.rank(), 8))
    return [str(each.message) for each in caught if "dp_rank" in str(each.message)]


def test_data_sharded_by_rank_is_warned_of_once() -> None:
    first, second = run_ranks(sharded_by_rank, 2, False, False)
    assert first == []
    (warning,) = second
    assert "pipeline rank 1 passed other values to the step `any_step`" in warning
    assert "shard data by smp.dp_rank() of smp.dp_size()" in warning


@pytest.mark.parametrize(("v1", "alike"), [(False, True), (True, False)], ids=["equal data", "a script of SMP v1"])
def test_other_scripts_are_not_warned(v1: bool, alike: bool) -> None:
    assert run_ranks(sharded_by_rank, 2, v1, alike) == [[], []]


@on_ranks(2)
def test_a_batch_that_needs_gradients_is_refused_where_it_would_get_none() -> None:
    # An encoder outside the model was never trained, and nothing was said.
    step, model, (x, y) = smp.step(any_step), wrapped(), batch(CASE, 0, 8)
    encoder = nn.Linear(WIDTH, WIDTH, dtype=x.dtype)
    with torch.no_grad():
        step(model, encoder(x).requires_grad_(True), y)
    message = error_of(lambda: step(model, {"x": encoder(x), "more": [y]}))
    assert f"a tensor of shape [8, {WIDTH}] that needs gradients was passed to the step `any_step`" in message


# --- how inputs and outputs lie in memory -----------------------------------------------------------------------------


class Turned(nn.Module):
    """Gives its input to a unit of either rank, and returns what lies in memory the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.near, self.far = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.far(self.first(x) + self.near(x)) + self.far(x)
        return y.t().contiguous().t()


@on_ranks(2)
def test_inputs_and_outputs_lie_alike_on_all_ranks() -> None:
    """Ranks that know other kinds of arguments than the others wait for them for ever."""
    torch.manual_seed(3)
    module = Turned()
    plain = copy.deepcopy(module)
    wrapped, text = over_ranks(module, {module.far: 1}, microbatches=2), torch.randn(8, 2 * WIDTH)
    turned = torch.randn(WIDTH, 4).t()
    for first, own in (
        (text[:4, :WIDTH].clone(), None),
        (text[:4, :WIDTH], None),  # with gaps, as `tokens[:, :-1]` has
        (turned, None),
        (turned, torch.zeros(4, WIDTH)),  # of the other rank, whose contents nobody looks at, nor how they lie
        (text[:2, :WIDTH], None),  # microbatches of one row
    ):
        with torch.no_grad():
            returned = evaluate(wrapped, first if own is None or smp.pp_rank() == 0 else own).outputs
            wanted = [plain(part) for part in first.clone().chunk(2)]
        assert smp.pp_rank() > 0 or all(map(torch.equal, returned, wanted))
        strides = [output.stride() for output in returned]
        assert smp.allgather(strides, smp.CommGroup.PP_GROUP) == [strides] * 2
