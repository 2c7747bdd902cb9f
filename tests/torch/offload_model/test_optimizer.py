"""OffloadOptimizer beside torch's optimizers."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit import OffloadModel, OffloadOptimizer
from smpkit.errors import UnsupportedError, UsageError
from smpkit.testing.emulated_link import EmulatedLink
from smpkit.testing.ranks import RankFailed
from smpkit.torch.offload_model import model as module
from tests.ranks import run_ranks

CPU = torch.device("cpu")
everywhere = pytest.mark.usefixtures("place")
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 2))


def make_pair(**options: Any) -> tuple[nn.Sequential, OffloadModel]:
    plain = make_model()
    options = {"num_slices": 3, "checkpoint_activation": True} | options
    return plain, OffloadModel(copy.deepcopy(plain), CPU, **options)


def train(networks: Any, *optimizers: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    for _ in range(4):
        inputs = torch.randn(5, 6)
        for network in networks:
            network(inputs).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def close(plain: nn.Module, model: nn.Module, tolerance: float = 2e-6) -> None:
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=tolerance)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_slow_links_and_jitter_change_nothing(
    overlap: Any, seed: int, num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies end at other times in every run; a buffer that is used too early or too late shows as another weight."""
    link = EmulatedLink(latency_seconds=2e-4, jitter_seconds=3e-3, seed=seed)
    monkeypatch.setattr("smpkit.torch.offload_model.model.is_the_host", lambda _: False)
    monkeypatch.setattr("smpkit.torch.offload_model.engine.link_for", lambda *_: link)
    plain, model = make_pair(num_slices=5, num_microbatches=num_microbatches)
    expected = torch.optim.AdamW(plain.parameters(), **ADAMW)
    actual = OffloadOptimizer(model, torch.optim.AdamW, overlap=overlap, **ADAMW)
    train((plain, model), expected, actual)
    close(plain, model)
    link.close()


@pytest.mark.parametrize("limit", [5e-6, 1.0])
def test_clipping_is_torchs_to_the_last_epsilon(limit: float) -> None:
    """With SGD, for Adam takes no notice of a factor; with a norm that is not much larger than torch's 1e-6."""
    plain, model = make_pair()
    expected = torch.optim.SGD(plain.parameters(), lr=1e4)
    actual = OffloadOptimizer(model, torch.optim.SGD, lr=1e4, max_grad_norm=limit)
    inputs = torch.randn(5, 6)
    for network in (plain, model):
        (network(inputs).square().mean() * 1e-5).backward()
    assert torch.nn.utils.clip_grad_norm_(plain.parameters(), limit) > 5e-6
    expected.step()
    actual.step()
    close(plain, model, 0.0)


@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, smp.clip_grad_norm_])
def test_a_script_may_clip_and_scale_unless_gradients_are_used_up_in_backward(clip: Any) -> None:
    """Then it would find no gradient in any parameter, clip nothing, and return a norm of 0.

    That it may clip otherwise is a row in `test_same.py`.
    """
    _, model = make_pair()
    inputs = torch.randn(5, 6)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, overlap="backward")
    model(inputs).square().mean().backward()
    with pytest.raises(UsageError, match=r"would clip nothing: these gradients go to an OffloadOptimizer"):
        clip(model.parameters(), 1.0)
    with pytest.raises(UsageError, match="GradScaler would unscale nothing: these gradients go to"):
        smp.amp.GradScaler(device="cpu").step(optimizer)
    optimizer.step()
    del optimizer
    model(inputs).square().mean().backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0


@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backwards", [1, 2])
def test_narrow_gradients_are_clipped_by_their_exact_norm(dtype: torch.dtype, backwards: int) -> None:
    """In their own type it would be rounded to three digits, or infinite, which leaves all weights as they were."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    plain, model = copy.deepcopy(layers).to(dtype), OffloadModel(layers, CPU, dtype=dtype)
    before = [each.clone() for each in model.parameters()]
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=1.0, max_grad_norm=1.0)
    inputs = torch.randn(8, 64, dtype=dtype)
    for _ in range(backwards):
        model(inputs).sum().mul(2000).backward()
    plain(inputs).sum().mul(2000).backward()
    norm = torch.stack([each.grad.double().norm() for each in plain.parameters() if each.grad is not None]).norm()
    assert norm > torch.finfo(torch.float16).max
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(backwards * norm.item(), rel=1e-5)
    moved = [(after - each).double().norm() for after, each in zip(model.parameters(), before, strict=True)]
    assert torch.stack(moved).norm().item() == pytest.approx(1.0, rel=1e-3)


@everywhere
def test_a_norm_is_that_of_the_gradients_that_the_script_has_left() -> None:
    _, model = make_pair()
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.0, max_grad_norm=1.0)
    norms = []
    for changes in (False, True):
        model(torch.ones(5, 6)).sum().backward()
        if changes:
            for number, parameter in enumerate(model.parameters()):
                assert parameter.grad is not None
                if number:
                    parameter.grad = parameter.grad * 2
                else:  # as fairseq does, and as torch's GradScaler: the version stays
                    parameter.grad.data.mul_(2)
        optimizer.step()
        assert optimizer.grad_norm is not None
        norms.append(optimizer.grad_norm)
    assert norms[1] == pytest.approx(2 * norms[0])


@everywhere
@pytest.mark.parametrize("ours", [False, True], ids=["torch", "ours"])
def test_bf16_computation_with_fp32_weights(ours: bool) -> None:
    """The same as rounding a copy of the weights for each forward, and updating the fp32 ones."""
    plain, model = make_pair(dtype=torch.bfloat16)
    narrow = copy.deepcopy(plain).to(torch.bfloat16)
    expected = torch.optim.AdamW(plain.parameters(), **ADAMW)
    actual: torch.optim.Optimizer = (
        OffloadOptimizer(model, torch.optim.AdamW, **ADAMW) if ours else torch.optim.AdamW(model.parameters(), **ADAMW)
    )
    torch.manual_seed(1)
    for _ in range(4):
        inputs = torch.randn(5, 6, dtype=torch.bfloat16)
        with torch.no_grad():
            for p, q in zip(plain.parameters(), narrow.parameters(), strict=True):
                q.copy_(p)
        for network in (narrow, model):
            network(inputs).float().square().mean().backward()
        for p, q in zip(plain.parameters(), narrow.parameters(), strict=True):
            p.grad, q.grad = q.grad.float(), None  # type: ignore[union-attr]
        for each in (expected, actual):
            each.step()
            each.zero_grad()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    close(plain, model)


@everywhere
def test_state_goes_to_and_comes_from_torchs_optimizer() -> None:
    plain, model = make_pair()
    expected = torch.optim.AdamW(plain.parameters(), **ADAMW)
    train((plain,), expected)
    model.load_state_dict(dict(zip(model.state_dict(), plain.state_dict().values(), strict=True)))
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=1.0)
    optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 1e-3
    train((plain, model), expected, optimizer)
    close(plain, model)
    for number, state in optimizer.state_dict()["state"].items():
        wanted = expected.state_dict()["state"][number]
        assert state.keys() == wanted.keys()
        assert all(torch.allclose(state[name], wanted[name], atol=1e-6) for name in wanted)


@everywhere
def test_a_checkpoint_loaded_into_a_running_model_is_used() -> None:
    _, model = make_pair(dtype=torch.bfloat16)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    inputs = torch.randn(5, 6, dtype=torch.bfloat16)
    state = copy.deepcopy(model.state_dict())
    first = model(inputs).detach()
    model(inputs).sum().backward()
    optimizer.step()
    assert not torch.equal(model(inputs), first)
    model.load_state_dict(state)
    assert torch.equal(model(inputs), first)


def curve(path: Path, die: int | None = None) -> list[float]:
    """Train from what was saved on, and save after step 3; return the losses, unless a step is to be the last."""
    module.is_the_host = lambda device: False
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 1))
    model = OffloadModel(layers, CPU, checkpoint_activation=True, dtype=torch.bfloat16)
    optimizer = OffloadOptimizer(model, lr=1e-2, max_grad_norm=0.5)
    losses, first = list[float](), 0
    if path.exists():
        saved, first = torch.load(path), 4
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, 8):
        torch.manual_seed(100 + step)
        loss = (model(torch.randn(8, 4, dtype=torch.bfloat16)).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 3:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        if step == die:
            os.kill(os.getpid(), signal.SIGKILL)
    return losses


def test_killed_and_resumed_the_curve_is_the_same_to_the_bit(tmp_path: Path) -> None:
    [whole] = run_ranks(curve, 1, tmp_path / "whole.pt")
    with pytest.raises(RankFailed, match="exit code -9"):
        run_ranks(curve, 1, tmp_path / "killed.pt", 5)
    [resumed] = run_ranks(curve, 1, tmp_path / "killed.pt")
    assert resumed == whole[4:]


class Packed(Tensor):
    """As the states of torchao's AdamW8bit: what is computed with it is a plain tensor."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class Packs(torch.optim.SGD):
    """Has a state of another class."""

    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            self.state[each].setdefault("packed", torch.zeros(2).as_subclass(Packed)).add_(1)
        return super().step(closure)


@everywhere
def test_a_state_of_another_class_keeps_it() -> None:
    _, model = make_pair()
    optimizer = OffloadOptimizer(model, Packs, lr=0.1)
    for _ in range(2):
        model(torch.randn(5, 6)).sum().backward()
        optimizer.step()
    for state in optimizer.state_dict()["state"].values():
        assert type(state["packed"]) is Packed
        assert torch.equal(state["packed"].as_subclass(Tensor), torch.full((2,), 2.0))


class Counts(torch.optim.SGD):
    """Counts its steps in its groups, as Prodigy and D-Adaptation do, and not in the parameters' states."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_a_rule_that_keeps_something_in_its_groups_is_named() -> None:
    _, model = make_pair()
    optimizer = OffloadOptimizer(model, Counts, lr=0.1)
    model(torch.randn(5, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(UnsupportedError, match="Counts keeps k for all parameters of a group"):
        model.synchronize()


def test_two_backwards_are_refused_where_the_first_updates() -> None:
    _, model = make_pair()
    optimizer = OffloadOptimizer(model, overlap="backward")
    model(torch.randn(5, 6)).sum().backward()
    with pytest.raises(UsageError, match="a second backward before step"):
        model(torch.randn(5, 6)).sum().backward()
    optimizer.step()


def test_a_model_that_is_called_twice_before_backward_is_refused_where_that_updates() -> None:
    """Contrastive losses do so. On a device each call has gradients of its own, as those in another type have."""
    _, model = make_pair(dtype=torch.bfloat16)
    optimizer = OffloadOptimizer(model, overlap="backward")
    one, other = (model(torch.randn(5, 6, dtype=torch.bfloat16)) for _ in range(2))
    with pytest.raises(UsageError, match="through layers that were called several times"):
        (one * other).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rule": torch.optim.LBFGS}, UnsupportedError, "LBFGS looks at all parameters together"),
        ({"max_grad_norm": -1.0}, UsageError, r"max_grad_norm is -1\.0"),
        ({"max_grad_norm": 1.0, "overlap": "backward"}, UsageError, "the norm is known only after the backward"),
        ({"overlap": "both"}, UsageError, "overlap is 'both'"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate"),
        ({"momentum": 0.9}, TypeError, "momentum"),
        ({"num_threads": 0}, UsageError, "num_threads is 0"),
        (
            {"groups": [{"params": [nn.Parameter(torch.zeros(1))]}]},
            UsageError,
            "1 of the parameters are not the model's",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    _, model = make_pair()
    with pytest.raises(error, match=message):
        OffloadOptimizer(model, **options)
    with pytest.raises(UnsupportedError, match=r"parameters of torch\.bfloat16, in which torch's AdamW loses small"):
        OffloadOptimizer(OffloadModel(make_model().bfloat16(), CPU))
    with pytest.raises(UsageError, match="needs an OffloadModel, not a Linear"):
        OffloadOptimizer(nn.Linear(1, 1))  # type: ignore[arg-type]
