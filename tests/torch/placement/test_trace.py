"""The tracing pass gives the same on every device, wherever the weights lie when the step begins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import smpkit.torch as smp
from smpkit.plan.partition.assignment import UnitCost
from smpkit.torch.pipeline.split_backward import backward_inputs
from smpkit.torch.placement.fused_kernels import FusedKernels
from smpkit.torch.placement.trace import TrialStep, measure_units, run_fake
from smpkit.torch.placement.units import units_of
from tests.models import Does

WIDTH, LENGTH, VOCABULARY, HEADS = 32, 16, 64, 4

DEVICE = "meta"
"""Stands for another one than the CPU: a CPU build of torch has no operators of a GPU, not even without data."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.packed(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], dropout_p=0.1, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(functional.gelu(self.up(x))))


class Language(nn.Module):
    """A small GPT whose head is its embedding, with a table of positions as a buffer and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", torch.randn(LENGTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Checkpointed(Language):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = smp.checkpoint(block, x)
        logits: Tensor = self.head(self.norm(x))
        return logits.mean()


class Grouped(nn.Module):
    """Attention whose keys and values are fewer than its queries, under a mask; and torch's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.pair = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = self.pair(x).unflatten(-1, (2, HEADS // 2, -1)).permute(2, 0, 3, 1, 4)
        mask = x.new_zeros(x.shape[1], x.shape[1])
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        return self.layer(mixed.transpose(1, 2).flatten(2))


def vision() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(16 * 5 * 5, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 10)),
    )


def delayed() -> nn.Module:
    with smp.delay_param_initialization():
        return Language()


TOKENS = torch.zeros(2, LENGTH, dtype=torch.int64)
IMAGES = torch.zeros(2, 3, 16, 16)
STATES = torch.zeros(2, LENGTH, WIDTH)
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "language": (Language, TOKENS),
    "checkpointed": (Checkpointed, TOKENS),
    "grouped": (Grouped, STATES),
    "vision": (vision, IMAGES),
    "delayed": (delayed, TOKENS),
}


def on(device: str, argument: Tensor) -> Tensor:
    """Return the argument on a device; without data on a GPU, which need not be there."""
    with FakeTensorMode():
        return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=device)


def costs_of(model: nn.Module, argument: Tensor, body: Callable[..., Any] | None = None) -> list[UnitCost]:
    step = TrialStep(body or model, (argument,))
    costs = measure_units(model, units_of(model), lambda: run_fake(model, step))
    assert any(cost.activation_bytes for cost in costs), "the pass has failed"
    # Without ids, which differ between two models.
    return [
        replace(cost, shared={str(number): size for number, size in enumerate(cost.shared.values())}) for cost in costs
    ]


@pytest.fixture
def no_failed_pass(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, "smpkit")
    yield
    assert not caplog.records


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("no_failed_pass")
def test_a_pass_on_another_device_gives_what_one_on_the_cpu_gives(case: str) -> None:
    make, argument = CASES[case]
    assert costs_of(make(), on(DEVICE, argument)) == costs_of(make(), argument)


@pytest.mark.parametrize("moved", ["everything", "the first layer"])
@pytest.mark.usefixtures("no_failed_pass")
def test_weights_that_lie_on_the_device_already_cost_the_same(moved: str) -> None:
    model, argument = vision(), on(DEVICE, IMAGES)
    with torch.device(DEVICE):
        there: Any = vision()
    if moved == "the first layer":
        model[0] = there[0]
        there = model
    assert costs_of(there, argument) == costs_of(vision(), IMAGES)


@pytest.mark.parametrize("device", ["cpu", DEVICE])
@pytest.mark.usefixtures("no_failed_pass")
def test_a_trial_step_sees_the_weights_and_changes_nothing(device: str) -> None:
    model = Language()
    seen: dict[str, Any] = {}

    def body(x: Tensor, weight: Tensor) -> Tensor:
        seen["tied"] = model.head.weight is model.embed.weight is weight
        seen["kinds"] = {isinstance(each, nn.Parameter) for each in model.parameters()}
        seen["places"] = {each.device for each in [*model.parameters(), *model.buffers()]}
        seen["trainable"] = [name for name, each in model.named_parameters() if not each.requires_grad]
        seen["mark"] = getattr(model.scale, "mark", None)
        loss: Tensor = model(x) + weight.sum()
        model.embed.weight.data.zero_()
        model.extra = nn.Parameter(weight * 2)
        return loss

    vars(model.scale)["mark"] = 7
    before, values = dict(model.named_parameters(remove_duplicate=False)), model.embed.weight.detach().clone()
    positions = model.positions
    run_fake(model, TrialStep(body, (on(device, TOKENS), model.embed.weight)))
    expected = {"tied": True, "kinds": {True}, "places": {torch.device(device)}, "trainable": ["scale"], "mark": 7}
    assert seen == expected
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert model.positions is positions
    assert model.embed.weight.equal(values)


class LooksAtValues(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        return self[1](x) if x.sum() > 0 else x


def test_a_pass_that_fails_is_a_warning_with_its_reason_and_what_is_done_instead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = LooksAtValues(nn.Linear(4, 4), nn.Linear(4, 8))
    with caplog.at_level(logging.WARNING, "smpkit"):
        costs = measure_units(model, units_of(model), lambda: run_fake(model, TrialStep(model, (torch.ones(2, 4),))))
    assert [cost.flops for cost in costs] == [20 * 4, 40 * 4]
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelno == logging.WARNING
    assert "DataDependentOutputException: aten._local_scalar_dense.default" in message
    assert "partitioned by the sizes of its parameters" in message
    assert "skip_tracing: true" in message


def test_attention_costs_its_products_and_keeps_no_scores() -> None:
    def attend(own: Any, x: Tensor) -> Tensor:
        heads = own.packed(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], dropout_p=0.5)
        return mixed.transpose(1, 2).flatten(2)

    model = nn.Sequential(Does(attend, packed=nn.Linear(WIDTH, 3 * WIDTH, bias=False)))
    (cost,) = costs_of(model, STATES)
    values = 2 * LENGTH * WIDTH
    assert cost.flops == 2 * values * 3 * WIDTH + 2 * 2 * values * LENGTH
    assert cost.activation_bytes == 4 * (values + 3 * values + values + 2 * HEADS * LENGTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_cost_a_product_for_each_row(dtype: torch.dtype) -> None:
    def mix(own: Any, x: Tensor) -> Tensor:  # as transformers 5 calls its mixtures of experts, unless told otherwise
        ends = torch.arange(1, 5, dtype=torch.int32) * (x.shape[0] // 4)
        return functional.grouped_mm(x, own.weight, offs=ends)

    experts = Does(mix, weight=nn.Parameter(torch.randn(4, WIDTH, 3 * WIDTH, dtype=dtype)))
    x = torch.randn(8 * LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    (cost,) = costs_of(nn.Sequential(experts), x)
    assert cost.flops == 2 * len(x) * WIDTH * 3 * WIDTH
    assert cost.weight_products == 1
    assert 0 <= cost.activation_bytes - x.nbytes <= 32  # and where each expert's rows end


def test_replaced_kernels_are_for_tensors_without_data() -> None:
    x, layer = torch.randn(2, HEADS, LENGTH, 8), nn.BatchNorm1d(HEADS)

    def results() -> list[Tensor]:
        torch.manual_seed(0)
        attended = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return [attended, functional.dropout(x, 0.5), layer(x[:, :, :, 0])]

    def same(found: list[Tensor]) -> bool:
        return all(map(torch.equal, found, expected))

    expected = results()
    kernels = FusedKernels()
    with kernels.installed():
        assert same(results())
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x).requires_grad_()
            attended = functional.scaled_dot_product_attention(fake, fake, fake)
            assert torch.autograd.grad(attended.sum(), fake)[0].shape == x.shape
    assert kernels.flops == 2 * 2 * HEADS * LENGTH * LENGTH * 16
    assert same(results())
    assert "_Attention" not in type(functional.scaled_dot_product_attention(x.requires_grad_(), x, x).grad_fn).__name__


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_waits_between_the_halves_of_a_backward_is_counted(dtype: torch.dtype | None) -> None:
    blocks, x = nn.Sequential(Block(), Block()), STATES

    def body(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return blocks(x)

    costs = costs_of(blocks, x, body)
    counted = sum(cost.postponed_bytes for cost in costs)
    start = x.clone().requires_grad_()
    left: Any = backward_inputs([body(start).sum()], [None], [start])
    waiting = {each.untyped_storage() for each in tree_leaves(list(left.boundary_gradients.values()))}
    assert counted == sum(each.nbytes() for each in waiting) > 0
    assert sum(cost.weight_products for cost in costs) == len(left.groups)


def six_operators(own: Any, x: Tensor) -> Tensor:
    """A product with a transposed weight, two views, and two element-wise operators, one of them in place."""
    return functional.relu(own.linear(x)).add_(1).view(-1).view(x.shape)


def test_operators_of_a_unit_are_counted_and_what_those_move_whose_products_nobody_counts() -> None:
    blocks = nn.ModuleList([Does(six_operators, linear=nn.Linear(WIDTH, WIDTH)) for _ in range(2)])
    model, rows = Does(lambda own, x: own.blocks[1](own.blocks[0](own.blocks[0](x) * 2)), blocks=blocks), 6
    first, second = costs_of(model, torch.zeros(rows, WIDTH))
    assert (first.name, second.name) == ("blocks.0", "blocks.1")
    # t, addmm, relu, add_, view, view; the multiplication between units is of the unit before.
    assert (first.operations, second.operations) == (12 + 1, 6)
    # relu and add_ read and write the value; views move nothing, and the product's time follows from its operations.
    value = rows * WIDTH * 4
    assert (first.moved_bytes, second.moved_bytes) == (2 * 4 * value + 2 * value, 4 * value)
    assert second.flops == 2 * rows * WIDTH * WIDTH


class Between(nn.Module):
    """A U-Net of one level: what its activations, its pooling and its joints keep is kept between units."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = functional.silu(self.norm(self.down(x.exp())))
        deep = functional.silu(self.deep(functional.max_pool2d(kept, 2)))
        return self.out(torch.cat([self.up(deep), kept], 1)).sigmoid()


def test_what_is_kept_between_units_is_counted_for_the_unit_before() -> None:
    model, images = Between(), torch.ones(2, 3, 16, 16)
    costs = costs_of(model, images)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(images)
    weights = {each.data_ptr() for each in model.parameters()}
    assert sum(cost.activation_bytes for cost in costs) == sum(kept[key] for key in kept.keys() - weights)
    assert costs[-1].activation_bytes == output.nbytes + 2 * 16 * 16 * 16 * 4  # of the sigmoid, and of the joint
    # The loss that a script computes itself, which `smpkit plan` does not see, is no unit's.
    assert costs_of(model, images, lambda each: model(each).square().mean()) == costs


class HandsOn(nn.Module):
    """Adds an input that nothing saves, and hands on another one that each layer saves."""

    def __init__(self) -> None:
        super().__init__()
        saving = lambda own, value, source, bias: own.linear(value) * source + bias  # noqa: E731
        self.layers = nn.ModuleList(Does(saving, linear=nn.Linear(4, 4)) for _ in range(2))

    def forward(self, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        source = value.exp()
        for layer in self.layers:
            value = layer(value, source, bias.requires_grad_())
        return value


def test_inputs_that_a_unit_does_not_save_first_are_counted_for_a_rank_that_receives_them() -> None:
    model = HandsOn()
    step = TrialStep(model, (torch.ones(2, 4, requires_grad=True), torch.ones(4)))
    first, second = measure_units(model, units_of(model, ["layers"]), lambda: run_fake(model, step))
    # `exp` has saved its result before the first layer runs, which saves it first as a unit.
    assert (first.unsaved_input_bytes, second.unsaved_input_bytes) == (4 * 4, 4 * 4 + 2 * 4 * 4)
