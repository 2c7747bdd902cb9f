"""Torch's CheckpointPolicy.MUST_CPU_OFFLOAD and PREFER_CPU_OFFLOAD in eager mode: offloaded by the engine, run once.

Under FSDP2 they are in `tests/torch/offload/test_around.py`.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import smpkit
from smpkit.errors import UsageError
from smpkit.testing import EmulatedLink
from smpkit.torch.core import devices, offloader
from smpkit.torch.recompute import torch_checkpoint as seam
from tests.models import WIDTH, Case, singles
from tests.models import mse_step as step
from tests.ranks import run_ranks
from tests.torch.recompute.layers import same
from tests.train import Way
from tests.train import same as trains_the_same

ATEN = torch.ops.aten
PRODUCT = ATEN.mm.default
BATCH, LAYERS = 4, 6
BYTES = 4 * BATCH * WIDTH
MUST, PREFER = CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD
SAVE = CheckpointPolicy.MUST_SAVE


def contexts(wanted: CheckpointPolicy, operator: Any = PRODUCT) -> Callable[[], Any]:
    """Return the `context_fn` of a policy for one operator, or for all: None."""

    def policy(_context: Any, called: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        return wanted if operator in (None, called) else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).sin()).relu().cos()


class Model(nn.Module):
    """Calls layers in selective checkpoints, and these in checkpoints if it `nests`."""

    def __init__(self, wanted: CheckpointPolicy, operator: Any = PRODUCT, *, nests: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.contexts, self.nests = contexts(wanted, operator), nests

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.nests:
                x = checkpoint(self.selectively, layer, x, use_reentrant=False)
            else:
                x = self.selectively(layer, x)
        return x

    def selectively(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False, context_fn=self.contexts)


class Operators(TorchDispatchMode):
    """Counts operators, and knows whether what products have made is still in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[Any] = Counter()
        self.products: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.runs[func] += 1
        if func is PRODUCT:
            self.products.append(StorageWeakRef(output.untyped_storage()))
        return output


def batch() -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def trained(model: nn.Module) -> tuple[list[Tensor | None], Operators, int]:
    """Return gradients, what has run, and how many products were in memory between forward and backward."""
    x = batch()
    model.zero_grad()
    with Operators() as operators:
        loss = model(x).square().sum()
        num_alive = sum(not product.expired() for product in operators.products)
        loss.backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())], operators, num_alive


@pytest.mark.parametrize("nests", [False, True])
@pytest.mark.parametrize("wanted", [MUST, PREFER])
@pytest.mark.parametrize("link", [None, EmulatedLink(1e9, latency_seconds=1e-3)])
def test_what_a_policy_offloads_is_as_what_it_saves_and_runs_as_often(
    wanted: CheckpointPolicy, nests: bool, link: EmulatedLink | None
) -> None:
    saved, expected, _ = trained(Model(SAVE, nests=nests))
    model = Model(wanted, nests=nests)
    with smpkit.offload_activations(model, lead=1, link=link) as offload:
        for _ in range(2):
            gradients, found, num_alive = trained(model)
            assert same(gradients, saved)
            assert found.runs[PRODUCT] == expected.runs[PRODUCT]
        report = offload.report()
    if link is None and not nests:
        assert num_alive == 2  # of 12: those of the last layer, which backward needs first
        assert found.runs[PRODUCT] == 3 * 2 * LAYERS  # once in forward, twice in backward: for weights and for inputs
    assert report.bytes_out > 2 * 2 * LAYERS * BYTES
    if link is None:  # over a link, backward may come before anything has left
        assert report.bytes_back > 0


def products(wanted: CheckpointPolicy) -> int:
    return trained(Model(wanted))[1].runs[PRODUCT]


def test_torch_alone_runs_these_operators_again() -> None:
    """When this fails, torch offloads in eager mode itself: say in `torch_checkpoint.py` whose copies are made."""
    [found], [saved] = run_ranks(products, 1, MUST), run_ranks(products, 1, SAVE)  # smpkit has replaced nothing there
    assert found - saved == 2 * LAYERS


def test_over_a_pipeline_with_a_horizon() -> None:
    config = {"offload_activations": True, "activation_loading_horizon": 1}
    saves, offloads = (Case(functools.partial(Model, wanted), singles, step, torch.float32) for wanted in (SAVE, MUST))
    trains_the_same(saves, Way(pipeline=2, batches=(8, 8)), tolerance=1e-6)
    trains_the_same(offloads, Way(pipeline=2, batches=(8, 8), config=config), tolerance=1e-6)


def test_in_a_recomputation_that_needs_them_at_once_outputs_stay() -> None:
    """The outer checkpoint saves something behind the inner one, so its recomputation runs all of the inner forward."""

    class Outer(Model):
        def forward(self, x: Tensor) -> Tensor:
            def inner(x: Tensor) -> Tensor:
                return self.selectively(self.layers[0], x).sin()

            return checkpoint(inner, x, use_reentrant=False)

    saved, model = trained(Outer(SAVE))[0], Outer(MUST)
    with smpkit.offload_activations(model) as offload:
        assert same(trained(model)[0], saved)
        assert offload.report().bytes_out == 3 * BYTES  # the input, and two products of the first forward only


def test_views_are_made_again_and_a_policy_for_all_operators_works() -> None:
    model, saved = Model(MUST, None), Model(SAVE)
    with smpkit.offload_activations(model) as offload:
        assert same(trained(model)[0], trained(saved)[0])
        num_outputs = LAYERS * 5  # two products, sin, relu and cos of each layer
        assert offload.report().bytes_out == (num_outputs + 1) * BYTES  # and the first layer's input


# --- what cannot be served --------------------------------------------------------------------------------------------


def test_a_second_backward_is_torchs_own_error() -> None:
    model = Model(MUST)
    with smpkit.offload_activations(model):
        loss = model(batch()).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
            loss.backward()


class Odd(Model):
    """Makes an output of an operator that cannot be taken away."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor], wanted: CheckpointPolicy, operator: Any) -> None:
        super().__init__(wanted, operator)
        self.layers, self.act = nn.ModuleList([nn.Linear(WIDTH, WIDTH)]), act

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False, context_fn=self.contexts)

    def run(self, x: Tensor) -> Tensor:
        return self.act(self.layers[0], x)


ODD: dict[str, tuple[Callable[[Any, Tensor], Tensor], Any, str]] = {
    "sparse": (
        lambda linear, x: linear(x).sin() * linear.weight.detach().to_sparse().mul(2).to_dense().sum(),
        ATEN.mul.Tensor,
        "of layout torch.sparse_coo",
    ),
    "on another device": (
        lambda linear, x: linear(x).sin() * torch.ones(1, device="meta").neg().numel(),
        ATEN.neg.default,
        "it lies on meta, not on cpu",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_leave_is_refused_or_stays_with_a_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    act, operator, reason = ODD[name]
    model = Odd(act, MUST, operator)
    refusal = f"MUST_CPU_OFFLOAD for {operator}.*{reason}"
    with smpkit.offload_activations(model), pytest.raises(UsageError, match=refusal):
        model(batch())
    model = Odd(act, PREFER, operator)
    with smpkit.offload_activations(model), caplog.at_level(logging.WARNING, "smpkit"):
        for _ in range(2):
            found = trained(model)[0]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "outputs that a policy offloads stay on the device, in `Odd` and elsewhere"
    ]
    assert same(found, trained(Odd(act, SAVE, operator))[0])


@pytest.mark.parametrize("inner", [None, SAVE, MUST])
def test_an_outer_policy_offloads_in_an_inner_checkpoint(inner: CheckpointPolicy | None) -> None:
    """As where a block with a checkpoint of its own is checkpointed by what wraps it."""

    def act(linear: Any, x: Tensor, **settings: Any) -> Tensor:
        return linear(checkpoint(lambda x: linear(x).sin(), x, use_reentrant=False, **settings)).cos()

    settings: dict[str, Any] = {} if inner is None else {"context_fn": contexts(inner, ATEN.addmm.default)}
    model = Odd(functools.partial(act, **settings), MUST, ATEN.addmm.default)
    with smpkit.offload_activations(model, min_bytes=0) as offload:
        assert same(trained(model)[0], trained(Odd(act, SAVE, ATEN.addmm.default))[0])
        assert offload.report().bytes_out == 3 * BYTES


def test_an_empty_output_may_stay(caplog: pytest.LogCaptureFixture) -> None:
    """As of an expert that gets no token, in a mixture of experts that calls all of them."""
    model = Odd(lambda linear, x: linear(x).sin() + linear(x[:0]).sum(), MUST, ATEN.addmm.default)
    with smpkit.offload_activations(model):
        assert same(trained(model)[0], trained(Odd(model.act, SAVE, ATEN.addmm.default))[0])
    assert not caplog.records


def test_an_output_that_is_changed_in_place_is_named() -> None:
    model = Odd(lambda linear, x: linear(x).sin_().cos(), MUST, ATEN.addmm.default)
    with smpkit.offload_activations(model), pytest.raises(UsageError, match="`Odd` saved for backward was changed in"):
        trained(model)


def test_without_room_on_the_host_must_is_refused_and_others_stay() -> None:
    model = Model(PREFER)
    with smpkit.offload_activations(model, host_budget_bytes=256):
        assert same(trained(model)[0], trained(Model(SAVE))[0])
    model = Model(MUST)
    with (
        smpkit.offload_activations(model, host_budget_bytes=256),
        pytest.raises(UsageError, match="host memory for activations is used up"),
    ):
        model(batch())


def test_without_an_engine_must_is_refused_and_others_stay_with_a_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloader.KEEPING, "_warned", frozenset())
    smpkit.offload_activations(Model(MUST)).close()  # torch's checkpoint stays ours, as in a pipeline
    with pytest.raises(UsageError, match="nothing offloads here"):
        Model(MUST)(batch())
    with caplog.at_level(logging.WARNING, "smpkit"):
        assert same(trained(Model(PREFER))[0], trained(Model(SAVE))[0])
    (line,) = caplog.messages
    assert line.endswith("stay on the device, in `Block` and elsewhere: nothing offloads here")


def test_while_a_graph_is_captured_must_is_refused_and_others_stay_with_a_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, saved = Model(PREFER), trained(Model(SAVE))[0]
    monkeypatch.setattr(devices, "is_capturing", lambda _: True)
    with smpkit.offload_activations(model), caplog.at_level(logging.WARNING, "smpkit"):
        assert same(trained(model)[0], saved)
    assert "a graph is captured" in caplog.text
    model = Model(MUST)
    with smpkit.offload_activations(model), pytest.raises(UsageError, match="a graph is captured"):
        model(batch())


def test_one_line_says_whose_copies_are_made(caplog: pytest.LogCaptureFixture) -> None:
    seam._serves_policies.cache_clear()
    model = Model(MUST)
    with smpkit.offload_activations(model), caplog.at_level(logging.INFO, "smpkit"):
        trained(model)
    assert len([line for line in caplog.messages if "smpkit copies what policies" in line]) == 1


def test_a_torch_whose_contexts_are_unknown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(MUST)
    with smpkit.offload_activations(model):
        monkeypatch.setattr(torch_checkpoint, "_VersionWrapper", lambda value: value)
        seam._serves_policies.cache_clear()
        unknown = re.escape(f"selective checkpointing of torch {torch.__version__} is not known")
        with pytest.raises(UsageError, match=unknown):
            model(batch())
    monkeypatch.undo()
    seam._serves_policies.cache_clear()
