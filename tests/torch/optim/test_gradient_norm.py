"""The norm of a gradient that ranks hold in parts is that of one process, and so is clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from unittest import mock

import pytest
import torch
import torch.nn.utils.clip_grad as torch_clip_grad
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.optim.gradient_norm import global_norm, hold_gradients
from tests.models import MODELS
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks, wrap
from tests.train import Training, Way, reference, world

pytestmark = pytest.mark.usefixtures("world")
NORMS = [2.0, 1.0, 3.0, float("inf")]
CASE = MODELS["tied modules"]


def clip_over_a_pipeline(way: Way, clip: Callable[..., Tensor]) -> tuple[list[float], float, float]:
    with world(way):
        script = Training(CASE, way)
        script.run(0)
        model = script.model
        norms = [clip(model.local_parameters(), 1e9, norm_type).item() for norm_type in NORMS]
        clipped = clip(model.parameters(), 0.25).item()
        return norms, clipped, smp.clip_grad_norm_(model, 1e9).item()


def clip_by_hand(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip as torchtitan does, with the two halves of torch's function."""
    known = list(parameters)
    norm = nn.utils.get_total_norm([each.grad for each in known if each.grad is not None], norm_type)
    nn.utils.clip_grads_with_norm_(known, max_norm, norm)
    return norm


@pytest.mark.parametrize(
    ("replicas", "clip"),
    [(1, smp.clip_grad_norm_), (2, smp.clip_grad_norm_), (1, nn.utils.clip_grad_norm_), (1, clip_by_hand)],
)
def test_pipeline_ranks_and_a_weight_on_two_of_them_count_once(replicas: int, clip: Callable[..., Tensor]) -> None:
    way = Way(pipeline=2, replicas=replicas, batches=(8,))
    gradients = [each for each in reference(CASE, way)[0].gradients.values() if each is not None]
    wanted = [nn.utils.get_total_norm(gradients, norm_type).item() for norm_type in NORMS]
    for norms, clipped, after in run_ranks(clip_over_a_pipeline, way.ranks, way, clip):
        assert norms == pytest.approx(wanted, rel=1e-13)
        assert clipped == norms[0]
        assert after == pytest.approx(0.25, rel=1e-5)


@on_ranks(2)
def test_not_a_number_reaches_every_rank_and_half_precision_does_not_overflow() -> None:
    smp.init({"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 2})
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, float("nan") if smp.rank() == 0 else 2.0, 3.0])
    assert all(smp.clip_grad_norm_(parameter, float("inf"), norm_type).isnan() for norm_type in NORMS)
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
        smp.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
    half = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    half.grad = torch.full((4,), 60000.0, dtype=torch.float16)
    assert smp.clip_grad_norm_([half, half], 1e9).item() == pytest.approx(math.sqrt(8) * 59968, rel=1e-3)
    norm = global_norm([(half, torch.ones(4)), (parameter, torch.zeros(3))] if smp.rank() == 0 else [])
    assert norm.item() == pytest.approx(2.0)


def test_torchs_function_clips_what_the_master_weights_get_until_the_job_ends() -> None:
    before = vars(torch_clip_grad).copy(), vars(nn.utils).copy()
    model = wrap(nn.Linear(2, 1, bias=False), fp16=True)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=128.0)
    model.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.5).item() == pytest.approx(5.0)
    assert smp.clip_grad_norm_(model, 1e9).item() == pytest.approx(0.5)
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.tensor([3.0, 4.0])
    assert nn.utils.clip_grad_norm_([other], 1.0).item() == pytest.approx(5.0)
    assert other.grad.norm().item() == pytest.approx(1.0)
    optimizer.step()
    smp.shutdown()
    after = vars(torch_clip_grad), vars(nn.utils)  # which has other modules, once they are imported
    assert all(then.items() <= now.items() for then, now in zip(before, after, strict=True))


def test_torchs_function_clips_values_without_the_scale_of_the_loss() -> None:
    torch.manual_seed(0)  # of some weights no gradient would be clipped
    model = wrap(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)), fp16=True)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), static_loss_scale=128.0)
    before = [each.detach().float().clone() for each in model.parameters()]
    model.backward(model(torch.tensor([[3.0, 4.0], [-1.0, 2.0]])).square().sum())
    wanted = [(each.grad.float() / 128).clamp(-0.25, 0.25) for each in model.parameters() if each.grad is not None]
    assert all(each.abs().max() == 0.25 for each in wanted)
    nn.utils.clip_grad_value_(model.parameters(), 0.25)
    optimizer.step()
    for old, new, moved in zip(before, model.parameters(), wanted, strict=True):
        torch.testing.assert_close(new.float(), (old - moved).to(new.dtype).float(), rtol=0, atol=0)


def test_torchs_function_refuses_master_weights_that_have_no_gradients_yet() -> None:
    """As scripts for Apex give them, with `amp.master_params(optimizer)`."""
    model = wrap(nn.Linear(2, 1), bf16=True)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    model.backward(model(torch.ones(1, 2)).sum())
    masters = [each for group in optimizer.param_groups for each in group["params"]]
    with pytest.raises(UsageError, match="was given master weights, which have no gradients before"):
        nn.utils.clip_grad_norm_(masters, 1.0)
    assert smp.clip_grad_norm_(masters, 1.0) > 0


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_torchs_functions_refuse_to_clip_nothing(clip: Callable[..., object]) -> None:
    held, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    holder = mock.Mock(holds_gradients_of=lambda: [held])
    hold_gradients(holder)
    with pytest.raises(UsageError, match=f"{clip.__name__} would clip nothing"):
        clip([held], 1.0)
    other.grad = torch.tensor([3.0, 4.0])
    clip([other], 1.0)
    assert other.grad.max().item() <= 1
