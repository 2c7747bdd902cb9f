"""A segment's backward starts from what nobody has changed, and in two halves makes the gradients of one."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smpkit.torch.core.microbatches import root_gradient
from smpkit.torch.core.tensor_spec import spec_of
from smpkit.torch.pipeline.backward import BackwardWork
from smpkit.torch.pipeline.messages import P2PTransfer
from smpkit.torch.pipeline.split_backward import backward_inputs, watching
from smpkit.torch.recompute.torch_checkpoint import _Checkpoint
from tests.models import WIDTH, Does, NoGradient


def started(root: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Run the backward of a segment that starts at `root` and receives nothing."""
    work = BackwardWork(None, 0)  # type: ignore[arg-type]
    work.add_root(root, gradient, 0)
    work.run(0, split=False)


def gradient_of(leaf: torch.Tensor) -> Any:
    return None if leaf.grad is None else leaf.grad.tolist()


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (torch.ones(2, 3), "Mismatch in shape"),  # the engine itself would add up what it can expand
        (torch.ones(3, dtype=torch.complex64), "same dtype"),
        (None, "scalar outputs"),
    ],
    ids=["shape", "complex", "none"],
)
def test_a_gradient_that_does_not_fit_its_root_is_refused(gradient: Tensor | None, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        started(torch.ones(3, requires_grad=True) * 2, gradient)
    leaf = torch.ones(3, requires_grad=True)
    started((leaf * 2).sum(), None)
    assert gradient_of(leaf) == [2, 2, 2]


def test_each_segment_runs_what_it_has_left_and_no_more() -> None:
    work = BackwardWork(None, 0)  # type: ignore[arg-type]
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    made = first * 3
    used = work.cut(made, 0, 1) * second
    work.add_root(used, torch.ones(2), 1)
    work.run(1, split=False)
    assert first.grad is None
    work.run(0, split=False)
    work.run(2, split=False)  # has nothing
    assert work.done == {0, 1, 2}
    assert gradient_of(first) == [3, 3]
    assert gradient_of(second) == [3, 3]


def test_what_arrives_keeps_its_steps_in_memory() -> None:
    # T5's biases, of one element in the first dimension, came back from a layer with another step there: refused.
    value = torch.randn(50).as_strided((1, 2, 5, 5), (2, 1, 10, 2)).detach()
    work, transfer = BackwardWork(None, 0), P2PTransfer(0, 0, 1, 0, 0, spec_of(value))  # type: ignore[arg-type]
    assert work.add_receive(value, transfer).stride() == (2, 1, 10, 2)


def test_a_cut_makes_no_gradient_where_there_is_none() -> None:
    work, weight, other = BackwardWork(None, 0), torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)  # type: ignore[arg-type]
    work.add_root(NoGradient.apply(work.cut(weight * 3, 0, 1)) * other, torch.ones(2), 1)
    work.run(1, split=False)
    work.run(0, split=False)
    assert other.grad is not None
    assert weight.grad is None


def test_backward_starts_with_one_times_the_scale() -> None:
    leaf = torch.ones((), requires_grad=True)
    assert root_gradient(leaf * 2, None, 0.25) == 0.25
    assert root_gradient(leaf * 2, torch.tensor(3.0), 0.5) == 1.5
    assert root_gradient((leaf * 3).double(), None, 0.5).dtype is torch.float64  # type: ignore[union-attr]
    assert root_gradient(leaf.reshape(1), None, 0.5).shape == (1,)  # type: ignore[union-attr]
    assert root_gradient(torch.ones(2), None, 1.0) is None


class Double(torch.autograd.Function):
    """A Function of the user's with a weight, which counts its backwards."""

    num_backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        Double.num_backwards += 1
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH))


def custom() -> nn.Module:
    return Does(lambda own, x: Double.apply(own.first(x), own.weight), first=linear(), weight=weight())


def in_a_row() -> nn.Module:
    layer = linear()
    return nn.Sequential(layer, nn.Tanh(), layer, linear())


def side_by_side() -> nn.Module:
    """One weight in two branches that do not reach each other, and one that meets the loss without an input."""

    def act(own: Any, x: Tensor) -> Tensor:
        return torch.tanh(own.shared(x)) + torch.tanh(own.shared(2 * x)) + (own.alone @ own.alone).sum()

    return Does(act, shared=linear(), alone=weight())


def recurrent() -> nn.Module:
    return Does(lambda own, x: own.cell(x)[0], cell=nn.LSTM(WIDTH, WIDTH)).double()


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    # The module, the shape of its input, and the weights whose gradients come late.
    "chain": (
        lambda: nn.Sequential(linear(), nn.Tanh(), linear()),
        (3, WIDTH),
        {"0.weight", "0.bias", "2.weight", "2.bias"},
    ),
    "a layer twice in a row": (in_a_row, (3, WIDTH), {"3.weight", "3.bias"}),
    "a layer side by side": (side_by_side, (3, WIDTH), {"shared.weight", "shared.bias", "alone"}),
    "frozen": (
        lambda: nn.Sequential(linear().requires_grad_(False), nn.Tanh(), linear()),
        (3, WIDTH),
        {"2.weight", "2.bias"},
    ),
    "custom Function": (custom, (3, WIDTH), {"first.weight", "first.bias"}),
    "weights made of weights": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        (3, WIDTH),
        {"bias", "parametrizations.weight.original0", "parametrizations.weight.original1"},
    ),
    "norms are cheap": (lambda: nn.Sequential(nn.LayerNorm(WIDTH), linear()), (3, WIDTH), {"1.weight", "1.bias"}),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0, batch_first=True),
        (2, 3, WIDTH),
        {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "self_attn.out_proj.bias"}
        | {f"linear{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias")},
    ),
    # In float64, torch runs it step by step: what goes from step to step is used many times in a row.
    "recurrent": (recurrent, (3, 2, WIDTH), {"cell.weight_ih_l0", "cell.bias_ih_l0"}),
}


def halved(module: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
    leaf = x.clone().requires_grad_()
    half = backward_inputs([module(leaf.view_as(leaf)).square().mean()], [None], [leaf])
    assert leaf.grad is not None
    return leaf.grad, half


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: each.grad for name, each in module.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_backward_to_the_bit(name: str) -> None:
    build, shape, late = CASES[name]
    torch.manual_seed(0)
    module = build()
    x = torch.randn(shape, dtype=next(module.parameters()).dtype)
    plain = copy.deepcopy(module)
    trained = {key: each for key, each in module.named_parameters() if each.requires_grad}
    added = Counter[str]()
    for key, each in trained.items():
        each.register_post_accumulate_grad_hook(lambda _, key=key: added.update([key]))
    for times in (1, 2):  # the second one is added to the first
        leaf = x.clone().requires_grad_()
        plain(leaf.view_as(leaf)).square().mean().backward()
        before = {key: None if each is None else each.clone() for key, each in gradients(module).items()}
        gradient, half = halved(module, x)
        assert _equal(gradient, leaf.grad)
        unchanged = {key for key, each in gradients(module).items() if _equal(each, before[key])}
        assert {key for key, each in gradients(plain).items() if each is not None} & unchanged == late
        half.run()
        assert all(_equal(each, gradients(plain)[key]) for key, each in gradients(module).items())
        assert added == dict.fromkeys(trained, times), "the reducer of data parallelism counts on one addition to each"


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return (one is None) == (other is None) and (one is None or other is None or torch.equal(one, other))


def test_a_custom_function_runs_once() -> None:
    Double.num_backwards = 0
    _, half = halved(custom(), torch.randn(3, WIDTH))
    half.run()
    assert Double.num_backwards == 1


def test_without_inputs_or_late_weights_everything_runs_at_once() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    assert backward_inputs([layer(torch.randn(3, WIDTH)).sum()], [None], []) is None
    assert layer.weight.grad is not None
    norm = nn.LayerNorm(WIDTH)
    assert halved(norm, torch.randn(3, WIDTH))[1] is None
    assert norm.weight.grad is not None


def test_a_reentrant_checkpoint_of_another_library_runs_whole() -> None:
    """Torch's own is none any more where smpkit has wrapped a model; Megatron's, for one, has the same name."""
    own: Any = type("CheckpointFunction", (_Checkpoint.__mro__[1],), {})
    layer = nn.Linear(WIDTH, WIDTH)
    leaf = torch.randn(3, WIDTH, requires_grad=True)
    out = own.apply(layer, True, leaf.view_as(leaf))
    assert backward_inputs([out.sum()], [None], [leaf]) is None
    assert layer.weight.grad is not None


def test_hooks_that_would_run_twice_are_noticed() -> None:
    seen: list[int] = []
    x = torch.randn(3, WIDTH, requires_grad=True)
    with watching(seen.append):
        (2 * x).sum()
        assert seen == []
        checkpoint(torch.tanh, x, use_reentrant=False)
        assert seen == [1, -1]
        (2 * x).register_hook(lambda gradient: gradient)
        (2 * x).retain_grad()
        assert seen == [1, -1, 0, 0]
    (2 * x).register_hook(lambda gradient: gradient)
    checkpoint(torch.tanh, x, use_reentrant=False)
    assert seen == [1, -1, 0, 0]
