"""Torch's CheckpointPolicy.MUST_CPU_OFFLOAD and PREFER_CPU_OFFLOAD in eager mode: offloaded by the engine, run once."""

from __future__ import annotations

import functools
import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import smpkit
import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.testing import EmulatedLink
from smpkit.torch.recompute import torch_checkpoint as seam
from tests.ranks import run_ranks

ATEN = torch.ops.aten
PRODUCT = ATEN.mm.default
WIDTH, BATCH, LAYERS = 8, 4, 6
MUST, PREFER = CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD
SAVE = CheckpointPolicy.MUST_SAVE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).sin()).relu().cos()


def contexts(wanted: CheckpointPolicy, operator: Any = PRODUCT) -> Callable[[], Any]:
    def policy(_context: Any, called: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        return wanted if called is operator else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


class Model(nn.Module):
    def __init__(self, wanted: CheckpointPolicy, *, nests: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.contexts, self.nests = contexts(wanted), nests

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.nests:
                x = checkpoint(self.selectively, layer, x, use_reentrant=False)
            else:
                x = self.selectively(layer, x)
        return x

    def selectively(self, layer: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(layer, x, use_reentrant=False, context_fn=self.contexts)
        return result


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


def trained(model: Model) -> tuple[list[Tensor | None], Operators, int]:
    """Return gradients, what has run, and how many products were in memory between forward and backward."""
    x = batch()
    with Operators() as operators:
        loss = model(x).square().sum()
        num_alive = sum(not product.expired() for product in operators.products)
        loss.backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())], operators, num_alive


def same(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))  # type: ignore[arg-type]


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
            model.zero_grad()
            gradients, found, num_alive = trained(model)
            assert same(gradients, saved)
            assert found.runs[PRODUCT] == expected.runs[PRODUCT]
        report = offload.report()
    if link is None and not nests:
        assert num_alive == 2  # of 12: those of the last layer, which backward needs first
        assert found.runs[PRODUCT] == 3 * 2 * LAYERS  # once in forward, twice in backward: for weights and for inputs
    assert report.bytes_out > 2 * 2 * LAYERS * BATCH * WIDTH * 4
    assert report.bytes_back > 0


def test_torch_alone_runs_these_operators_again() -> None:
    """When this fails, torch offloads in eager mode itself: say in `torch_checkpoint.py` whose copies are made."""
    script = (
        "import functools, torch\nfrom tests.torch.recompute.test_policies import *\n"
        "print(trained(Model(MUST))[1].runs[PRODUCT] - trained(Model(SAVE))[1].runs[PRODUCT])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert int(ran.stdout) == 2 * LAYERS


def test_in_a_recomputation_that_needs_them_at_once_outputs_stay() -> None:
    """The outer checkpoint saves something behind the inner one, so its recomputation runs all of the inner forward."""

    def gradients(wanted: CheckpointPolicy) -> tuple[list[Tensor | None], int]:
        model, x = Model(wanted), batch()
        offload = smpkit.offload_activations(model) if wanted is MUST else None
        layer = model.layers[0]
        model.forward = lambda x: checkpoint(lambda y: model.selectively(layer, y).sin(), x, use_reentrant=False)  # type: ignore[method-assign]
        model(x).square().sum().backward()
        moved = 0 if offload is None else offload.report().bytes_out
        return [x.grad, *(parameter.grad for parameter in layer.parameters())], moved

    saved, _ = gradients(SAVE)
    offloaded, moved = gradients(MUST)
    assert same(saved, offloaded)
    assert moved == 3 * BATCH * WIDTH * 4  # the input, and two products of the first forward only


def test_a_second_backward_is_torchs_own_error() -> None:
    model = Model(MUST)
    with smpkit.offload_activations(model):
        loss = model(batch()).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
            loss.backward()


class Odd(nn.Module):
    """Makes an output of an operator that cannot be taken away."""

    def __init__(
        self, function: Callable[[nn.Linear, Tensor], Tensor], operator: Any, wanted: CheckpointPolicy
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function, self.contexts = nn.Linear(WIDTH, WIDTH), function, contexts(wanted, operator)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.run, x, use_reentrant=False, context_fn=self.contexts)
        return result

    def run(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x)


ODD: dict[str, tuple[Callable[[nn.Linear, Tensor], Tensor], Any, str]] = {
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
    function, operator, reason = ODD[name]
    model = Odd(function, operator, MUST)
    with (
        smpkit.offload_activations(model),
        pytest.raises(UsageError, match=f"MUST_CPU_OFFLOAD for {operator}.*{reason}"),
    ):
        model(batch())
    model = Odd(function, operator, PREFER)
    with smpkit.offload_activations(model), caplog.at_level(logging.WARNING, "smpkit"):
        for _ in range(2):
            model(batch()).sum().backward()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "outputs that a policy offloads stay on the device, in `Odd` and elsewhere"
    ]
    plain = Odd(function, operator, SAVE)
    plain(batch()).sum().backward()
    assert torch.equal(plain.linear.weight.grad, model.linear.weight.grad / 2)  # type: ignore[arg-type, operator]


def test_views_are_made_again_and_a_policy_for_all_operators_works() -> None:
    def everything(*_: Any, **__: Any) -> CheckpointPolicy:
        return MUST

    model, saved = Model(MUST), Model(SAVE)
    model.contexts = functools.partial(create_selective_checkpoint_contexts, everything)
    with smpkit.offload_activations(model) as offload:
        assert same(trained(model)[0], trained(saved)[0])
        num_outputs = LAYERS * 5  # two products, sin, relu and cos of each layer
        assert offload.report().bytes_out == (num_outputs + 1) * BATCH * WIDTH * 4  # and the first layer's input


def test_an_output_that_is_changed_in_place_is_named() -> None:
    model = Odd(lambda linear, x: linear(x).sin_().cos(), ATEN.addmm.default, MUST)
    with smpkit.offload_activations(model):
        loss = model(batch()).sum()
        with pytest.raises(UsageError, match="`Odd` saved for backward was changed in place"):
            loss.backward()


def test_without_room_on_the_host_must_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    for wanted in (PREFER, MUST):
        model = Model(wanted)
        with smpkit.offload_activations(model, host_budget_bytes=256):
            if wanted is MUST:
                with pytest.raises(UsageError, match="host memory for activations is used up"):
                    model(batch())
            else:
                assert same(trained(model)[0], trained(Model(SAVE))[0])


@pytest.mark.usefixtures("world")
def test_without_an_engine_must_is_refused() -> None:
    smp.init({})
    model = smp.DistributedModel(Model(MUST))
    with pytest.raises(UsageError, match="nothing offloads here"):
        model(batch())


def test_a_torch_whose_contexts_are_unknown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(MUST)
    with smpkit.offload_activations(model):
        monkeypatch.setattr(torch_checkpoint, "_VersionWrapper", lambda value: value)
        seam._hears_policies.cache_clear()
        with pytest.raises(
            UsageError, match=re.escape(f"selective checkpointing of torch {torch.__version__} is not known")
        ):
            model(batch())
    monkeypatch.undo()
    seam._hears_policies.cache_clear()


# --- whoever calls torch's checkpoint ---------------------------------------------------------------------------------


def fsdp(wanted: CheckpointPolicy, around: bool) -> tuple[list[Tensor], int]:
    """Train with FSDP2, which wraps each layer around its checkpoint or inside it."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    layers: list[Any] = [Block() for _ in range(LAYERS)]
    if around:
        layers = [fully_shard(checkpoint_wrapper(layer, context_fn=contexts(wanted)), mesh=mesh) for layer in layers]
    else:
        layers = [checkpoint_wrapper(fully_shard(layer, mesh=mesh), context_fn=contexts(wanted)) for layer in layers]
    model = nn.Sequential(*layers)
    fully_shard(model, mesh=mesh)
    offload = smpkit.offload_activations(model) if wanted is MUST else None
    gradients = list[Tensor]()
    for _ in range(2):
        model(batch()).square().sum().backward()
        gradients += [parameter.grad.to_local().clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    return gradients, 0 if offload is None else offload.report().bytes_out


@pytest.mark.parametrize("around", [False, True])
def test_under_fsdp2(around: bool) -> None:
    for (saved, _), (offloaded, num_bytes) in zip(
        run_ranks(fsdp, 2, SAVE, around), run_ranks(fsdp, 2, MUST, around), strict=True
    ):
        assert all(torch.equal(one, other) for one, other in zip(saved, offloaded, strict=True))
        assert num_bytes > 2 * 2 * LAYERS * BATCH * WIDTH * 4


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    model.backward(loss)
    return loss


def over_a_pipeline(wanted: CheckpointPolicy, config: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, **config})
    model = smp.DistributedModel(Model(wanted))
    x = torch.randn(4 * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model.zero_grad()
        train_step(model, x)
    gradients = {name: parameter.grad.clone() for name, parameter in model.local_named_parameters()}  # type: ignore[union-attr]
    return gradients, smp.offload_report().bytes_out if config else 0


def test_over_a_pipeline_with_a_horizon() -> None:
    config = {"offload_activations": True, "activation_loading_horizon": 1}
    for (saved, _), (offloaded, num_bytes) in zip(
        run_ranks(over_a_pipeline, 2, SAVE, {}), run_ranks(over_a_pipeline, 2, MUST, config), strict=True
    ):
        assert saved.keys() == offloaded.keys()
        assert all(torch.equal(saved[name], offloaded[name]) for name in saved)
        assert num_bytes > 0
