"""What scripts do with plain models, done with an OffloadModel."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.errors import UnsupportedError, UsageError

pytestmark = pytest.mark.usefixtures("place")
CPU = torch.device("cpu")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 2))


def train(network: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> None:
    dtype = next(iter(network.parameters())).dtype
    for number in range(num_steps):
        torch.manual_seed(number)
        optimizer.zero_grad()
        network(torch.randn(5, 4, dtype=dtype)).square().sum().backward()
        optimizer.step()


# --- trained as the plain model is -----------------------------------------------------------------------------------


def repeated() -> nn.Sequential:
    """Use a layer, and an activation, in several places."""
    layer, activation = nn.Linear(4, 4), nn.Tanh()
    return nn.Sequential(nn.Linear(4, 4), activation, layer, activation, layer, nn.Linear(4, 2))


def dropping_in_place() -> nn.Sequential:
    return nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(4, 4), nn.Dropout(0.5, inplace=True), nn.Linear(4, 4))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


class Give(nn.Linear):
    def forward(self, value: Tensor) -> Any:
        return super().forward(value), self.weight


class Keep(nn.Linear):
    def forward(self, values: Any) -> Any:
        return super().forward(values[0]), values[1]


def handing_a_weight_on() -> nn.Sequential:
    return nn.Sequential(Give(4, 4), Keep(4, 4), Keep(4, 4))


def train_once(network: Any) -> None:
    network(torch.randn(3, 4)).square().sum().backward()


def evaluate_first(network: Any) -> None:
    network.eval()
    train_once(network)
    network.train()
    train_once(network)


def evaluate_before_backward(network: Any) -> None:
    loss = network(torch.randn(3, 4)).square().sum()
    network.eval()
    loss.backward()
    assert not any(module.training for module in network.modules())


def freeze_in_turn(network: Any) -> None:
    for frozen in (0, 1, 2, 5):  # always as many
        network.zero_grad()
        for number, parameter in enumerate(network.parameters()):
            parameter.requires_grad_(number != frozen)
        train_once(network)


def unfreeze(network: Any) -> None:
    for smallest in (1, 2):  # biases, then all
        network.zero_grad()
        for parameter in network.parameters():
            parameter.requires_grad_(parameter.dim() == 1 or smallest == 2)
        train_once(network)


def train_a_returned_weight(network: Any) -> None:
    value, weight = network(torch.randn(3, 4))
    (value.sum() + weight.square().sum()).backward()


SCRIPTS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[Any], None]]] = {
    "a layer in several places": (repeated, train_once),
    "dropout in place after an evaluation": (dropping_in_place, evaluate_first),
    "evaluation between forward and backward": (normed, evaluate_before_backward),
    "other weights in each step": (layers, freeze_in_turn),
    "more weights in each step": (layers, unfreeze),
    "a weight that is handed on and returned": (handing_a_weight_on, train_a_returned_weight),
}


@pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_trains_as_the_plain_model(name: str, checkpoint: bool) -> None:
    make, script = SCRIPTS[name]
    torch.manual_seed(0)
    plain = make()
    model = OffloadModel(copy.deepcopy(plain), CPU, num_slices=2, checkpoint_activation=checkpoint)
    for network in (plain, model):
        torch.manual_seed(1)
        script(network)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=1e-6)
    assert all(map(torch.equal, plain.buffers(), model.buffers()))


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_slices_may_work_in_place_without_a_graph(num_microbatches: int) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    model = OffloadModel(copy.deepcopy(plain), CPU, num_microbatches=num_microbatches)
    inputs = torch.randn(9, 4)
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs), plain(inputs))


# --- copies, averages, writes to weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "ours"])
@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_copies_train_by_themselves(way: str, ours: bool) -> None:
    def optimizer(model: OffloadModel) -> torch.optim.Optimizer:
        return OffloadOptimizer(model, lr=0.1) if ours else torch.optim.AdamW(model.parameters(), lr=0.1)

    model = OffloadModel(layers(), CPU, CPU, 2, True, 2)
    first = optimizer(model)
    train(model, first)
    if way == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    second = optimizer(other)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    start = [parameter.detach().clone() for parameter in model.parameters()]
    train(other, second)
    for p, q in zip(start, model.parameters(), strict=True):
        assert torch.equal(p, q)
    train(model, first)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_averages_of_weights() -> None:
    plain, model = layers(), OffloadModel(layers(), CPU)
    averages = []
    for network in (plain, model):
        averages.append(torch.optim.swa_utils.AveragedModel(network, use_buffers=True))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(2):
            train(network, optimizer, 1)
            averages[-1].update_parameters(network)
    inputs = torch.randn(3, 4)
    outputs = [average.eval()(inputs) for average in averages]
    assert torch.equal(outputs[0], outputs[1])


def test_one_weight_is_saved_without_its_slice() -> None:
    model = OffloadModel(nn.Sequential(*[nn.Linear(100, 100) for _ in range(4)]), CPU, num_slices=1)
    optimizer = OffloadOptimizer(model)
    for _ in range(2):
        file = io.BytesIO()
        torch.save({name: value for name, value in model.state_dict().items() if "bias" in name}, file)
        assert file.tell() < 10_000
        train_one = model(torch.randn(2, 100)).sum()
        train_one.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("weights", "computed"),
    [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None)],
    ids=["fp32", "fp32-in-bf16", "bf16"],
)
@pytest.mark.parametrize("way", ["data", "evaluation", "vector"])
def test_weights_written_past_their_versions_count(
    weights: torch.dtype, computed: torch.dtype | None, way: str
) -> None:
    """Averages are put in with `parameter.data.copy_`, or by `vector_to_parameters`."""
    model = OffloadModel(layers().to(weights), CPU, num_slices=2, dtype=computed)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.25)
    inputs = torch.ones(1, 4, dtype=computed or weights)
    held = list(model.parameters())
    for _ in range(2):
        model(inputs).float().sum().backward()
        optimizer.step()
    if way == "vector":
        torch.nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in held), dtype=weights), held)
    elif way == "data":
        for parameter in model.parameters():
            parameter.data.zero_()
    else:
        model.synchronize()
        for parameter in held:
            parameter.data.zero_()
        model.eval()
    assert not model(inputs).any()
    model.train()
    model(inputs).float().sum().backward()
    optimizer.step()
    expected = [torch.full((2,), -0.25, dtype=weights) if p is held[-1] else torch.zeros_like(p) for p in held]
    for p, q in zip(expected, model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_masters_keep_what_rounding_takes_from_their_weights() -> None:
    model = OffloadModel(layers().bfloat16(), CPU)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=1e-5)
    train(model, optimizer)
    before = [each["master"].clone() for each in optimizer.state_dict()["state"].values()]
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1)
    for p, q in zip(before, optimizer.state_dict()["state"].values(), strict=True):
        assert torch.equal(p, q["master"])


def test_gradients_that_the_model_forgets_the_optimizer_forgets() -> None:
    plain, model = layers().eval(), OffloadModel(layers(), CPU).eval()
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    model.zero_grad()
    optimizer.step()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_weight_that_is_trained_later_needs_another_optimizer() -> None:
    plain, model = layers(), OffloadModel(layers(), CPU)
    networks: list[tuple[nn.Module, Any]] = [(plain, torch.optim.AdamW), (model, OffloadOptimizer)]
    for network, make in networks:
        first, *_ = network.parameters()
        first.requires_grad_(False)
        optimizer = make(network.parameters(), lr=0.1) if network is plain else make(network, lr=0.1)
        train(network, optimizer)
        first.requires_grad_(True)
        if network is model:
            with pytest.raises(UsageError, match=r"1 parameters were frozen when .* shape \(8, 4\)"):
                model(torch.randn(3, 4)).sum().backward()
            state = optimizer.state_dict()
            optimizer = OffloadOptimizer(model, lr=0.1)
            optimizer.load_state_dict(state)
        train(network, optimizer)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-4)


def test_after_an_interrupt_the_next_backward_updates_again() -> None:
    class Interrupted(nn.Module):
        now = False

        def forward(self, value: Tensor) -> Tensor:
            if self.now:
                raise KeyboardInterrupt
            return value * 1

    middle = Interrupted()
    model = OffloadModel(nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 2)), CPU, checkpoint_activation=True)
    optimizer = OffloadOptimizer(model, overlap="backward")
    loss = model(torch.randn(3, 4)).sum()
    Interrupted.now = True
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    Interrupted.now = False
    train(model, optimizer)
    model(torch.randn(3, 4)).sum().backward()
    with pytest.raises(UsageError, match="a second backward"):
        model(torch.randn(3, 4)).sum().backward()


def test_what_cannot_work_is_refused_clearly() -> None:
    plain, model = layers(), OffloadModel(layers(), CPU)
    with pytest.raises(UsageError, match="`weight` of a LazyLinear has no shape yet"):
        OffloadModel(nn.Sequential(nn.LazyLinear(3)), CPU)
    with pytest.raises(UsageError, match="a slice of another OffloadModel is in this OffloadModel"):
        OffloadModel(nn.Sequential(model, plain), CPU)
    other = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    with pytest.raises(UsageError, match="`weight` of a Linear is not the parameter"):
        torch.func.functional_call(model, other, (torch.randn(3, 4),))
    narrow = OffloadModel(layers().bfloat16(), CPU, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match=r"weights of torch\.bfloat16 that are computed in torch\.float32"):
        OffloadOptimizer(narrow)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = OffloadOptimizer(model)
    scaler.scale(model(torch.randn(3, 4)).sum()).backward()
    with pytest.raises(UsageError, match="cannot unscale the gradients of an OffloadOptimizer"):
        scaler.step(optimizer)
