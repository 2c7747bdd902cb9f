"""`sharded_data_parallel_degree` changes where parameters are, and nothing else."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.placement.blocks import repeated_blocks
from tests.models import MODELS, WIDTH, Case, Stack, TiedFunctional, mse_step, singles, token_step, tokens, vectors
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks, train_step
from tests.train import (
    Trace,
    Way,
    batch,
    build,
    checkpoint_layers,
    differ,
    same,
    trace_of,
    train_plainly,
    training,
    world,
)

CASE = MODELS["tied by a function"]


def way_of(*, replicas: int = 2, config: dict[str, Any] | None = None, **more: Any) -> Way:
    # Small parameters are not divided unless told.
    sharding = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, **(config or {})}
    return Way(**{"replicas": replicas, "microbatches": 2, "optimizer": "AdamW", "config": sharding, **more})


ROWS = [
    ("tied by a function", way_of(prepare=checkpoint_layers)),
    ("frozen and unused parameters", way_of(replicas=4, accumulation=2, batches=(8,) * 4, clip=0.05, early=True)),
    ("BatchNorm", way_of(optimizer="Adagrad", prepare=differ, config={"sdp_param_persistence_threshold": 9})),
    ("tied by a function", way_of(optimizer="LAMB", accumulation=2, batches=(8,) * 4, stepwise=False, microbatches=1)),
]


@pytest.mark.parametrize(("name", "way"), ROWS, ids=str)
def test_training_equals_plain_pytorch(name: str, way: Way) -> None:
    same(MODELS[name], way)


def norm_of(trace: Trace, kind: float = 2.0) -> float:
    return nn.utils.get_total_norm([each for each in trace.gradients.values() if each is not None], kind).item()


def num_elements(tensors: Iterable[Any]) -> int:
    return sum(each.to_local().numel() for each in tensors)


@on_ranks(4)
def test_each_rank_of_a_sharding_group_holds_its_part_and_sees_the_norm_of_all() -> None:
    way = way_of(replicas=4, batches=(8,))
    plain = train_plainly(CASE, way)[0]
    with training(CASE, way) as script:
        script.run(0)
        model, parameters = script.model, [*script.model.parameters()]
        held, whole = num_elements(parameters), sum(each.numel() for each in plain.values.values())
        assert 0.45 * whole <= held <= 0.55 * whole
        first, second, *_ = smp.allgather(held, smp.CommGroup.WORLD)
        assert first + second == whole
        assert num_elements(each.grad for each in parameters) == held
        states = [each for entry in script.optimizer.state.values() for each in entry.values() if each.ndim]
        assert num_elements(states) == 2 * held
        assert model.local_state_dict()["layers.0.0.weight"].shape == (WIDTH, WIDTH)
        assert len(model.state_dict(gather_to_rank0=True)) == (len(plain.values) if smp.rank() == 0 else 0)
        norms = [smp.clip_grad_norm_(model, 1e9, kind).item() for kind in (2.0, float("inf"))]
        assert norms == pytest.approx([norm_of(plain, kind) for kind in (2.0, float("inf"))], rel=1e-13)
        assert smp.allgather(norms, smp.CommGroup.WORLD) == [norms] * 4
        smp.clip_grad_norm_(model.parameters(), 0.01)
        assert smp.clip_grad_norm_(model, 1e9).item() == pytest.approx(0.01, rel=1e-3)


def evaluated(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


@torch.no_grad()
def double(parameters: Iterable[Tensor]) -> None:
    for each in parameters:
        each.mul_(2)


@on_ranks(2)
def test_parameters_may_be_changed_after_an_evaluation() -> None:
    """Evaluate in each way that a script may; after each, double all parameters, and train without changing them."""
    plain = build(CASE)
    in_step: Any = smp.step(evaluated)
    with training(CASE, way_of()) as script:
        model = script.model
        known = list(model.parameters())
        script.optimizer.param_groups[0]["lr"] = 0.0
        for evaluate, gradients in itertools.product((in_step, evaluated), (False, True)):
            model.eval()
            with torch.set_grad_enabled(gradients):
                loss: Any = evaluate(model, *batch(CASE, 0, 8))
            loss = loss.reduce_mean() if evaluate is in_step else loss
            assert loss.item() == pytest.approx(evaluated(plain, *batch(CASE, 0, 8)).item(), rel=1e-11)
            assert all(map(operator.is_, known, model.parameters())), "not those of the optimizer"
            double(known)
            double(plain.parameters())
            model.train()
            script.run(0)


@on_ranks(2)
def test_numbers_that_a_script_reads_are_those_of_the_whole() -> None:
    # Scripts add norms of gradients by hand, to log them, and leave out an update where a gradient is not finite.
    with training(CASE, way_of()) as script:
        script.run(0)
        gradients: list[Any] = [each.grad for each in script.model.parameters() if each.grad is not None]
        norm = sum(each.norm(2).item() ** 2 for each in gradients) ** 0.5
        assert norm == pytest.approx(float(smp.clip_grad_norm_(script.model, float("inf"))), rel=1e-11)
        with torch.no_grad():
            gradients[0].to_local().fill_(float("nan") if smp.rank() else 0.0)
        assert torch.isnan(gradients[0]).any()
        assert not torch.isfinite(gradients[0]).all()
        assert float(gradients[0].detach().isnan().sum()) == int(gradients[0].isnan().sum()) > 0


@on_ranks(2)
def test_values_that_torch_would_not_use_are_refused() -> None:
    # Averages of weights, and adversarial training that undoes its step, assign `parameter.data`.
    with training(CASE, way_of()) as script:
        weight: Any = next(script.model.parameters())
        kept = weight.data.clone()
        with pytest.raises(UnsupportedError, match=r"`\.data` of a parameter of shape"):
            weight.data = kept
        weight.data.copy_(2 * kept)
        state = script.model.state_dict()
        assert torch.equal(next(iter(state.values())), 2 * kept.full_tensor())


@on_ranks(2)
def test_a_tied_weight_is_one_in_the_whole_state() -> None:
    with training(MODELS["tied modules"], way_of()) as script:
        whole = script.model.state_dict()
        tied = {each.data_ptr(): name for name, each in whole.items()}
        assert len(tied) == len(list(script.model.parameters())) < len(whole)


@on_ranks(2)
def test_a_group_that_is_added_later_may_have_parameters_of_before() -> None:
    # Layers that are unfrozen later are added later; of parameters from before, none would be trained.
    module = build(CASE)
    before = list(module.parameters())
    with world(way_of()):
        now = list(smp.DistributedModel(module).parameters())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(now[:1], lr=0.1))
        optimizer.add_param_group({"params": before[1:]})
    assert all(map(operator.is_, optimizer.param_groups[1]["params"], now[1:]))


@on_ranks(2)
def test_the_parts_of_another_rank_are_not_loaded(tmp_path: Path) -> None:
    """Scripts for pipelines, and transformers' branch for SMP, save on rdp_rank 0 alone; shapes are the same on all."""
    smp.init({"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0})
    model: Any = smp.DistributedModel(nn.Linear(4, 4))
    optimizer: Any = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    train_step(model, torch.ones(2, 4))
    optimizer.step()
    for name, trained in (("model", model), ("optimizer", optimizer)):
        own = trained.local_state_dict()
        if smp.rdp_rank() == 0:
            smp.save(own, tmp_path / name)
        smp.barrier()
        trained.load_state_dict(own)
        if smp.rdp_rank() == 0:
            trained.load_state_dict(smp.load(tmp_path / name))
        else:
            with pytest.raises(UsageError, match=r"has part 0 of 2 .* this rank has part 1 of 2\n.*all ranks save"):
                trained.load_state_dict(smp.load(tmp_path / name))


@on_ranks(2)
def test_hooks_that_would_never_run_are_refused() -> None:
    # Masks of gradients, say: torch took them, and trained without.
    early, late, calls = build(CASE), build(CASE), list[Tensor]()
    with world(way_of()):
        next(early.parameters()).register_hook(lambda gradient: 2 * gradient)
        with pytest.raises(UnsupportedError, match="a hook was registered on `"):
            smp.DistributedModel(early)
        model = smp.DistributedModel(late)
        weight = next(model.parameters())
        with pytest.raises(UnsupportedError, match="which sharded data parallelism gathers anew for each pass"):
            weight.register_hook(lambda gradient: 2 * gradient)
        weight.register_post_accumulate_grad_hook(calls.append)
        smp.step(CASE.step)(model, *batch(CASE, 0, 8))
        assert len(calls) == 2, "once for each microbatch"


@smp.step
def penalized(model: Any, x: Tensor) -> Tensor:
    """Train with a gradient penalty as WGAN-GP does: at one point, while the model judges others."""
    point = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(point).sum(), point, create_graph=True)
    loss = (slope.norm(dim=-1) - 1).square().mean() + model(x + 1).mean() - model(x - 1).mean()
    model.backward(loss)
    return loss


def keep(module: Any) -> None:
    """For `prepare`: keep blocks gathered after their backward, from the first pass on."""

    def before(root: Any, _args: object) -> None:
        root.set_reshard_after_backward(False)
        handle.remove()

    handle = module.register_forward_pre_hook(before)


def test_weights_that_are_kept_are_new_after_an_update_outside_of_steps() -> None:
    # The second forward found the first one's.
    same(CASE, way_of(stepwise=False, microbatches=1, prepare=keep), like=way_of(stepwise=False, microbatches=1))


@on_ranks(2)
def test_a_gradient_penalty_trains_if_weights_are_kept() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))  # the same on both replicas
    norms = []
    for config, keeps in (({}, False), (way_of().config, True), (way_of().config, False)):
        torch.manual_seed(0)
        with world(Way(replicas=2, microbatches=2, config=config)):
            layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
            model: Any = smp.DistributedModel(nn.Sequential(*layers, nn.Linear(4, 1)))
            if config and not keeps:
                with pytest.raises(RuntimeError, match="storage of size 0") as caught:
                    penalized(model, x)
                assert "set_reshard_after_backward(False)" in "".join(caught.value.__notes__)
                break
            if keeps:
                model.get_module().set_reshard_after_backward(False)
            penalized(model, x)
            norms.append(float(smp.clip_grad_norm_(model, 1.0)))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


# --- half precision ---------------------------------------------------------------------------------------------------

SCALE, STEPS = 2.0**10, 3
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PartlyFloat32Block(nn.Module):
    """A gate and sinks in float32, as in mixtures of experts and attentions of today, beside a layer that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.gate(x) + self.sinks
        return x + self.norm(self.grow(x.to(self.grow.weight.dtype))) * gate.sigmoid()


class PartlyFloat32(Stack):
    """Blocks with parts that half precision leaves in float32: batch normalisation, and what the model names.

    What a block adds to is in float32, too, as in a Mamba.
    """

    layer = PartlyFloat32Block
    _keep_in_fp32_modules_strict = ("gate.weight", "gate.bias", "sinks")

    def __init__(self) -> None:
        super().__init__(2)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x.float()))


PARTLY = Case(PartlyFloat32, singles, mse_step, torch.float32)


def train_in_half(precision: str, folder: Path) -> tuple[dict[str, Tensor], float]:
    """Train all replicas on the same batches, one block from the second on; return weights, and the last scale."""
    scaling = {"dynamic_loss_scale": True, "init_scale": SCALE}
    way = way_of(clip=0.5, microbatches=1, config={precision: True}, scaling=scaling)
    with training(PARTLY, way) as script:
        model, optimizer = script.model, script.optimizer
        for number in range(STEPS):
            model.module.get_submodule("layers.0").requires_grad_(number > 0)
            script.step(*batch(PARTLY, number, 8))
        weights = copy.deepcopy(model.state_dict())
        first: Any = next(model.parameters())
        first.grad.mul_(float("inf") if precision == "fp16" and smp.rank() else 1)
        optimizer.step()
        assert optimizer.overflow is (precision == "fp16")
        smp.save_checkpoint(folder, tag="saved")
        saved, scale = copy.deepcopy(model.state_dict()), optimizer.loss_scale
    for with_states in (False, True):
        with training(PARTLY, way) as script:
            model, optimizer = script.model, script.optimizer
            optimizer.param_groups[0]["lr"] = 0.07
            smp.resume_from_checkpoint(folder, load_sharded_optimizer_state=with_states)
            assert all(torch.equal(each, saved[name]) for name, each in model.state_dict().items())
            assert optimizer.loss_scale == scale
            assert bool(optimizer.state) is with_states
            assert optimizer.param_groups[0]["lr"] == (0.05 if with_states else 0.07)
    if precision == "fp16":
        assert all(torch.equal(each, saved[name]) for name, each in weights.items()), "an overflow changes nothing"
    return weights, scale


@pytest.mark.parametrize("precision", HALVES)
def test_half_precision_computes_with_copies_of_weights_in_float32(precision: str, tmp_path: Path) -> None:
    dtype = HALVES[precision]
    scale = SCALE if precision == "fp16" else 1.0
    model = build(PARTLY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, eps=1e-4)  # as that of tests.train
    for number in range(STEPS):
        model.get_submodule("layers.0").requires_grad_(number > 0)
        half = copy.deepcopy(model)
        for name, module in half.named_modules():
            if name.endswith("grow"):
                module.to(dtype)
        x, y = batch(PARTLY, number, 8)
        (functional.mse_loss(half(x.to(dtype)).float(), y) * scale).backward()
        for weight, copied in zip(model.parameters(), half.parameters(), strict=True):
            weight.grad = None if copied.grad is None else copied.grad.float() / scale
        for buffer, counted in zip(model.buffers(), half.buffers(), strict=True):
            buffer.copy_(counted)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for weights, last_scale in run_ranks(train_in_half, 2, precision, tmp_path):
        assert last_scale == (SCALE / 2 if precision == "fp16" else 1.0)
        # The norm, a sum of float32 over ranks, is rounded elsewhere.
        torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_model_that_is_made_in_other_precisions_has_weights_in_float32() -> None:
    with world(way_of(config={"bf16": True})):
        module = build(CASE).to(torch.bfloat16)
        next(module.parameters()).data = next(module.parameters()).double()
        model = smp.DistributedModel(module)
        assert {each.dtype for each in model.parameters()} == {torch.float32}


class Adapted(nn.Module):
    """A linear layer and a scale beside it, with an adapter; as PEFT makes them of a model in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.down, self.up = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.up(self.down(x.double())) * self.scale
        return self.base(x).tanh() + adapted.to(x.dtype)


class AdaptedLayers(nn.Sequential):
    """Layers that share adapters; all but these is frozen, and of another dtype."""

    def __init__(self) -> None:
        layers = [Adapted() for _ in range(4)]
        layers[1].down = layers[0].down
        layers[2].down.weight = layers[0].down.weight
        super().__init__(*layers, nn.Linear(WIDTH, WIDTH))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        super().to(*args, **kwargs)
        for name, each in self.named_parameters():
            adapts = "base" not in name and not name.startswith("4.")
            each.requires_grad_(adapts)
            each.data = each.data.double() if adapts else each.data
        return self


def test_a_block_may_have_several_dtypes() -> None:
    same(Case(AdaptedLayers, singles, mse_step, torch.float32), way_of(), tolerance=1e-6)


# --- models without memory --------------------------------------------------------------------------------------------


class Watching(nn.Linear):
    """Notes, when it is initialised, how many elements of all its kind have memory and are not divided."""

    known: set[nn.Module] = set()  # noqa: RUF012 - of the process, which is a rank's
    peaks: list[int] = []  # noqa: RUF012

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.known.add(self)
        each = [p for module in self.known for p in module.parameters() if not isinstance(p, DTensor)]
        self.peaks.append(sum(p.numel() for p in each if p.untyped_storage().nbytes() > p.element_size()))


def watching_block() -> nn.Module:
    return nn.Sequential(Watching(WIDTH, WIDTH), Watching(WIDTH, WIDTH))


@on_ranks(2)
def test_a_model_without_memory_is_created_in_parts() -> None:
    with world(way_of()):
        with smp.delay_param_initialization():
            module = nn.Sequential(*[watching_block() for _ in range(4)])
        block = sum(each.numel() for each in module[0].parameters())
        smp.DistributedModel(module)
        assert 0 < max(Watching.peaks) < 2 * block


# --- failing ----------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_step_before_the_groups_have_averaged_is_refused() -> None:
    with training(CASE, way_of(replicas=4, accumulation=2)) as script:
        script.run(0)
        with pytest.raises(UnsupportedError, match="gradients were to be used after 1 of 2 passes"):
            script.optimizer.step()


# --- what scripts see and say -----------------------------------------------------------------------------------------


def test_blocks_are_what_a_list_repeats_without_those_that_share_parameters() -> None:
    model: Any = build(CASE)
    assert repeated_blocks(model) == list(model.layers)
    model.register_parameter("outside", model.layers[1][0].weight)
    assert repeated_blocks(model) == [model.layers[0], model.layers[2]]
    assert repeated_blocks(nn.Linear(2, 2)) == []


@on_ranks(2)
def test_scripts_can_read_their_shards() -> None:
    """See what a script finds on the parameters and the optimizer, after a step that it clips."""
    way = way_of(clip=0.25, batches=(8,))
    norm = norm_of(train_plainly(CASE, replace(way, clip=0.0))[0])
    whole = torch.cat([each.flatten() for each in train_plainly(CASE, way)[0].values.values()]).float().sort().values
    wholes = dict(build(CASE).named_parameters())
    with training(CASE, way) as script:
        optimizer = script.optimizer
        names: dict[Any, str] = {each: name for name, each in script.model.module.named_parameters()}
        parameters = list(names)
        assert [each.ds_id for each in parameters] == list(range(len(parameters)))
        assert [each.ds_shape for each in parameters] == [each.shape for each in wholes.values()]
        assert [each.ds_numel for each in parameters] == [each.numel() for each in wholes.values()]
        # As scripts describe their shards for the tools that merge them.
        group: Any
        (group,) = optimizer.fp16_groups
        assert {names[each]: each.ds_shape for each in group} == {name: each.shape for name, each in wholes.items()}
        assert optimizer._global_grad_norm is None
        script.run(0)
        assert optimizer._global_grad_norm == pytest.approx(norm)
        (flat,) = optimizer.fp32_partitioned_groups_flat
        held = [each.ds_tensor for each in parameters]
        assert flat.dtype is torch.float32
        assert torch.equal(flat, torch.cat([each.flatten().float() for each in held]))
        assert sum(each.ds_numel for each in held) == flat.numel()
        assert optimizer.ds_param_shard_group.size() == 2
        both = torch.cat(smp.allgather(flat.cpu(), smp.CommGroup.WORLD)).sort().values
        torch.testing.assert_close(both, whole)


class UsesOutside(TiedFunctional):
    """The model itself uses a parameter of a layer, after the layers."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(x * self.layers.get_parameter("1.2.bias"), self.embedding.weight)


OUTSIDE = Case(UsesOutside, tokens, token_step)


def register(module: nn.Module) -> None:
    smp.register_parameter(module, module.get_parameter("layers.1.2.bias"))


def register_after_wrapping(case: Case, way: Way) -> Trace:
    with training(case, way) as script:
        register(script.model.module)
        return trace_of([script.run(number) for number in range(len(way.batches))], script.model)


def test_a_registered_parameter_may_be_used_outside_of_its_module() -> None:
    same(OUTSIDE, way_of(prepare=register))
    same(OUTSIDE, way_of(), by=register_after_wrapping)


@on_ranks(2)
def test_what_is_not_registered_cannot_be_used_outside() -> None:
    with training(OUTSIDE, way_of()) as script, pytest.raises(RuntimeError, match="DTensor"):
        script.model(batch(OUTSIDE, 0, 8)[0])
    wrong: Any = torch.zeros(1)
    with pytest.raises(UsageError, match="register_parameter got `Linear` and `Tensor`"):
        smp.register_parameter(nn.Linear(1, 1), wrong)


class Recurrent(nn.Module):
    """Makes its first hidden state of a weight, and has a second method, as public language models and VAEs do."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def hidden(self, size: int) -> Tensor:
        return next(self.parameters()).new_zeros(1, size, WIDTH)

    def decode(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x, hidden = self.rnn(x, hidden)
        return self.decode(x), hidden


@on_ranks(2)
def test_a_hidden_state_made_of_a_weight_is_whole_in_the_model() -> None:
    # It is a DTensor, which torch mixes with no other tensor.
    with world(way_of()):
        module = Recurrent().double()
        x = torch.ones(4, 2, WIDTH, dtype=torch.float64)
        expected = module(x, module.hidden(4))[0]
        model = smp.DistributedModel(module)
        torch.testing.assert_close(model(x, module.hidden(4))[0], expected)


@on_ranks(2)
def test_a_method_that_is_called_beside_the_model_is_refused() -> None:
    with world(way_of()):
        module = Recurrent()
        smp.DistributedModel(module)
        with pytest.raises(UsageError, match="`head` was called while this rank had a part of its weights only"):
            smp.step(module.decode)(torch.ones(2, WIDTH))


@on_ranks(2)
def test_a_divided_model_keeps_the_name_of_its_class() -> None:
    # Trainer smooths labels by it: each token was compared with itself, instead of the one before.
    with world(way_of()):
        module = Recurrent()
        smp.DistributedModel(module)
        kind = type(module)
        assert (module._get_name(), kind.__qualname__, kind.__module__) == ("Recurrent", "Recurrent", __name__)


class Dropping(TiedFunctional):
    """Leaves out layers that each rank draws for itself, as LayerDrop does."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for number, layer in enumerate(self.layers):
            x = x if number == smp.rank() else layer(x)
        return functional.linear(x, self.embedding.weight)


@on_ranks(2)
def test_layers_that_each_rank_drops_for_itself_are_refused() -> None:
    """Ranks computed with parts of each other's layers, and said nothing."""
    message = "the layers that ran differ between data-parallel ranks 0 and 1: `layers.1` against `layers.0`"
    with training(Case(Dropping, tokens, token_step), way_of()) as script, pytest.raises(UsageError, match=message):
        script.run(0)


class Masked(nn.Linear):
    """Sets weights to 0 in its forward, as the convolutions of PixelCNNs do; others clamp or shorten them there."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.weight.new_ones(WIDTH, WIDTH).tril()
        return super().forward(x)


def masked() -> nn.Module:
    return nn.Sequential(*[Masked(WIDTH, WIDTH) for _ in range(3)])


@on_ranks(2)
def test_a_forward_that_writes_to_weights_is_refused() -> None:
    # The next pass gathered the weights as they were before.
    message = r"`0\.weight` was written to in a forward, which sharded data parallelism would lose"
    with training(Case(masked, vectors, mse_step), way_of()) as script, pytest.raises(UnsupportedError, match=message):
        script.run(0)


@on_ranks(2)
def test_a_forward_with_other_weights_is_refused() -> None:
    # Torch computed with its own: the inner steps of MAML changed nothing.
    case = Case(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]), vectors, mse_step)
    message = r"a forward got another tensor as its `1\.weight`"
    with training(case, way_of()) as script:
        script.run(0)
        model, (x, _) = script.model, batch(case, 0, 8)
        layer = model.module.get_submodule("1")
        with pytest.raises(UnsupportedError, match=message):
            torch.func.functional_call(model.module, {"1.weight": 2 * layer.get_parameter("weight")}, (x,))
        layer.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        with pytest.raises(UnsupportedError, match=message):
            model(x)


def diverged() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    for layer in layers:
        nn.init.constant_(layer.weight, float("nan"))
    return nn.Sequential(*layers)


@on_ranks(2)
def test_weights_that_are_no_numbers_were_not_written_to() -> None:
    with training(Case(diverged, vectors, mse_step), way_of()) as script:
        script.run(0)


class Tempered(TiedFunctional):
    """Has a parameter without dimensions, as a CLIP has."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.logit_scale.exp()


@pytest.mark.parametrize("stepwise", [True, False], ids=["steps", "no steps"])
def test_a_scalar_parameter_stays_whole_and_counts_once(stepwise: bool) -> None:
    way = way_of(replicas=4, clip=0.05, stepwise=stepwise, microbatches=2 if stepwise else 1)
    same(Case(Tempered, tokens, token_step), way)


class Odd(TiedFunctional):
    """Has what torch's `fully_shard` cannot divide: quantised weights, complex ones, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(-WIDTH, WIDTH).view(2, -1).to(torch.int8), requires_grad=False)
        self.scales = nn.Parameter(torch.full((1,), 0.1).to(torch.float8_e4m3fn), requires_grad=False)
        self.filter = nn.Parameter(torch.linspace(0.5, 1.0, WIDTH // 2 + 1).to(torch.complex128))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids) + self.nothing.sum() + self.image.square().mean()
        weight = (self.codes * self.scales.float()).sum().to(logits.dtype)
        return logits * (self.filter.abs().mean() + weight)


def test_what_torch_cannot_divide_stays_whole() -> None:
    same(Case(Odd, tokens, token_step), way_of(optimizer="SGD"))


def failing(*_: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("in_step", [True, False])
@on_ranks(2)
def test_after_a_failed_forward_training_cannot_go_on(in_step: bool) -> None:
    with training(CASE, way_of()) as script:
        handle = script.model.get_module().register_forward_pre_hook(failing)
        with pytest.raises(ZeroDivisionError):
            script.run(0) if in_step else script.model(batch(CASE, 0, 8)[0])
        handle.remove()
        for again in (lambda: script.run(0), lambda: script.model(batch(CASE, 0, 8)[0])):
            with pytest.raises(UsageError, match="a step failed, and sharded data parallelism cannot go on after that"):
                again()
