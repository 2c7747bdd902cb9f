"""Training with tensor parallelism gives the losses, gradients and weights of plain PyTorch in one process.

Every pair of values of two axes meets in one of the combinations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from tests.models import CASES, WIDTH, Case, vectors
from tests.pairwise import pairwise, slow
from tests.torch.steps import error_of, on_ranks
from tests.train import Way, differ, same
from tests.transparency.test_tensor_parallel_modules import CAUSAL, DROPOUTS, LENGTH, PRE, SIZES

TOKENS = 17  # a vocabulary that ranks cannot divide evenly


def language_model() -> nn.Module:
    """A transformer of `smp.nn`, whose other sizes four ranks divide."""
    if not smp.is_initialized():  # for the reference in one process
        smp.init()
    sizes = {**SIZES, "num_layers": 2, "vocab_size": TOKENS, "num_positions": LENGTH, "initializer_range": 0.2}
    return smp.nn.DistributedTransformerLMHead(**sizes, **DROPOUTS, **PRE, **CAUSAL, use_normal_initialization=True)


def tokens(size: int, generator: torch.Generator) -> tuple[Tensor]:
    return (torch.randint(TOKENS, (size, LENGTH), generator=generator),)


def language_step(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model((ids, None, None, None, ids))[0]
    model.backward(loss)
    return loss


MODELS = {
    "encoder and decoder": CASES["encoder and decoder"],  # has what 2 ranks divide and 4 do not
    "language model": Case(language_model, tokens, language_step),
}


def divide_different(module: nn.Module) -> None:
    differ(module)
    smp.set_tensor_parallelism(module)


def row(
    name: str, degrees: tuple[int, int, int], prescaled: bool, optimize: str, sharded: bool = False, **more: Any
) -> tuple[str, Way]:
    """Return a model and a way to train it; `degrees` are pipeline and tensor-parallel ranks, and copies of each."""
    pipeline, tensor, copies = degrees
    config = {"prescaled_batch": prescaled, "optimize": optimize, "shard_optimizer_state": sharded, **more}
    replicas = copies * (1 if prescaled else tensor)
    return name, Way(pipeline, replicas, tensor, config=config, prepare=smp.set_tensor_parallelism)


AXES: list[list[Any]] = [list(MODELS), [(1, 2, 1), (2, 2, 1)], [False, True], ["speed", "memory"]]
PAIRS = pairwise([*AXES, [False, True]])
ROWS = [
    *(row(*pair) for pair in PAIRS),
    row("encoder and decoder", (1, 4, 1), False, "memory"),
    # All three kinds of parallelism at once, on eight ranks.
    row("language model", (2, 2, 2), True, "memory"),
]
# Exchanges between tensor-parallel ranks come in another order when backwards are split and stages are virtual.
OTHER_SCHEDULES = [
    row("language model", (2, 2, 1), False, "memory", pipeline="zero_bubble"),
    row("language model", (2, 2, 1), True, "speed", virtual_pipeline_degree=2),
]
DEGREES = [(pp, tp, copies) for pp in (1, 2) for tp in (1, 2, 4) for copies in (1, 2) if pp * tp * copies <= 8]
GRID = [row(*pair) for pair in pairwise([AXES[0], DEGREES, *AXES[2:], [False, True]])]


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *ROWS,
        *(pytest.param(*each, id=f"schedule {number}") for number, each in enumerate(OTHER_SCHEDULES)),
        *slow(each for each in GRID if each not in ROWS),
    ],
    ids=str,
)
def test_training_equals_plain_pytorch(name: str, way: Way) -> None:
    same(MODELS[name], way)


@pytest.mark.parametrize(("prescaled", "optimize"), [(False, "speed"), (True, "memory")])
def test_without_a_step_function_training_equals_plain_pytorch(prescaled: bool, optimize: str) -> None:
    name, way = row("encoder and decoder", (1, 2, 1), prescaled, optimize)
    same(MODELS[name], replace(way, stepwise=False, microbatches=1, prepare=divide_different))


def test_norms_of_divided_weights_are_those_of_the_whole_with_sharded_states() -> None:
    name, way = row("language model", (1, 2, 2), True, "speed", sharded=True)
    same(MODELS[name], replace(way, optimizer="LAMB"))


@pytest.mark.parametrize("prescaled", [False, True])
@on_ranks(2)
def test_a_penalty_on_divided_weights_in_the_loss_is_refused(prescaled: bool) -> None:
    """As in EWC, FedProx and orthogonal regularisers: gradients were halved, norms and products those of a piece."""
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": prescaled})
    divided, whole = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    smp.set_tensor_parallelism(divided)
    model = smp.DistributedModel(nn.Sequential(divided, nn.Tanh(), whole))

    @smp.step
    def train_step(model: Any, x: Tensor, names: Any) -> Tensor:
        penalised = [weight for name, weight in model.named_parameters() if name in names]
        loss: Tensor = model(x).square().mean() + 0.1 * sum(weight.square().sum() for weight in penalised)
        model.backward(loss)
        return loss

    x, _ = vectors(4, torch.Generator().manual_seed(0))
    train_step(model, x.float(), ["2.weight", "0.bias"])  # which each rank has whole
    message = error_of(lambda: train_step(model, x.float(), ["2.weight", "0.weight"]))
    assert "the loss contains `0.weight` itself" in message
    assert "add the gradient of a penalty" in message
