"""What scripts do with plain models, done with an OffloadModel."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.offload.arena import Arena

pytestmark = pytest.mark.usefixtures("place")
CPU = torch.device("cpu")
both_ways = pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])


def make_pair(plain: nn.Sequential, **options: Any) -> tuple[nn.Sequential, OffloadModel]:
    return plain, OffloadModel(copy.deepcopy(plain), CPU, **options)


@both_ways
@pytest.mark.parametrize("num_slices", [1, 2, 6])
def test_a_layer_may_be_there_several_times(num_slices: int, checkpoint: bool) -> None:
    torch.manual_seed(0)
    layer, activation = nn.Linear(3, 3), nn.Tanh()
    plain, model = make_pair(
        nn.Sequential(nn.Linear(3, 3), activation, layer, activation, layer, nn.Linear(3, 2)),
        num_slices=num_slices,
        checkpoint_activation=checkpoint,
    )
    inputs = torch.randn(4, 3)
    outputs = [network(inputs) for network in (plain, model)]
    assert torch.equal(outputs[0], outputs[1])
    for output in outputs:
        output.square().sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_slices_may_work_in_place_without_a_graph(mode: Any, num_microbatches: int) -> None:
    torch.manual_seed(0)
    plain, model = make_pair(
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)),
        num_microbatches=num_microbatches,
    )
    inputs = torch.randn(9, 3)
    with mode():
        torch.testing.assert_close(model(inputs), plain(inputs))


def test_the_first_parameter_may_be_a_number() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(2.0))

        def forward(self, value: Tensor) -> Tensor:
            return value * self.factor

    plain, model = make_pair(nn.Sequential(Scale(), nn.Linear(3, 2)))
    inputs = torch.randn(4, 3)
    for network in (plain, model.to("cpu")):
        network(inputs).sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)


@both_ways
def test_dropout_in_place_works_in_training_after_a_pass_in_evaluation(checkpoint: bool) -> None:
    torch.manual_seed(0)
    plain, model = make_pair(
        nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(4, 4), nn.Dropout(0.5, inplace=True), nn.Linear(4, 4)),
        num_slices=4,
        checkpoint_activation=checkpoint,
    )
    inputs = torch.randn(3, 4)
    for network in (plain, model):
        network.eval()
        network(inputs.clone()).sum().backward()
        network.train()
        torch.manual_seed(1)
        network(inputs.clone()).sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)


@both_ways
def test_the_mode_may_change_between_forward_and_backward(checkpoint: bool) -> None:
    torch.manual_seed(0)
    plain, model = make_pair(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)),
        checkpoint_activation=checkpoint,
    )
    inputs = torch.randn(3, 4)
    for network in (plain, model):
        torch.manual_seed(1)
        loss = network(inputs).square().sum()
        network.eval()
        loss.backward()
        assert not any(module.training for module in network.modules())
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)
    for one, other in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(one, other)


@both_ways
def test_a_backward_that_failed_cannot_be_repeated(checkpoint: bool) -> None:
    class Interrupted(nn.Module):
        now = False

        def forward(self, value: Tensor) -> Tensor:
            output = value * 1
            if output.requires_grad:
                output.register_hook(self.interrupt)
            return output

        def interrupt(self, _: Tensor) -> None:
            if self.now:
                raise KeyboardInterrupt

    torch.manual_seed(0)
    middle = Interrupted()
    model = OffloadModel(
        nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 2)), CPU, num_slices=1, checkpoint_activation=checkpoint
    )
    plain = nn.Sequential(*copy.deepcopy([piece.model_shard for piece in model.model_slices]))
    inputs = torch.randn(3, 4)
    loss = model(inputs).sum()
    Interrupted.now = True
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    Interrupted.now = False
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    for network in (plain, model):
        network(inputs).sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)


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


@pytest.mark.parametrize("paths", [False, True], ids=["sequential", "paths"])
def test_state_dicts_of_the_modules_inside_are_up_to_date(paths: bool) -> None:
    calls = []

    class Sink:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: calls.append(name)

    plain = layers()
    model = OffloadModel(plain, CPU, layers=["0", "2", "4"] if paths else None)
    sink = Sink()
    model._engine.attach(sink)
    for module in (model, model._model, plain[2]):
        calls.clear()
        state = module.state_dict()
        assert "synchronize" in calls
        calls.clear()
        module.load_state_dict(state)
        assert "synchronize" in calls
        with pytest.raises(UsageError, match=r"load_state_dict\(assign=True\) would take the parameters"):
            module.load_state_dict(state, assign=True)
    del model, sink
    calls.clear()
    plain[2].load_state_dict(plain[2].state_dict(), assign=True)
    assert not calls


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


def test_another_default_device_changes_nothing() -> None:
    inputs, plain = torch.randn(3, 4), layers()
    with torch.device("meta"):  # as torch.set_default_device("cuda") where there is a GPU
        model = OffloadModel(plain, CPU, dtype=torch.bfloat16, checkpoint_activation=True, num_microbatches=3)
        optimizer = OffloadOptimizer(model, max_grad_norm=1.0, num_threads=1)
        for _ in range(2):
            model(inputs.bfloat16()).float().sum().backward()
            optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
    assert {each["step"].device for each in state["state"].values()} == {CPU}
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("fails", [False, True])
def test_forwards_without_a_backward_leave_no_borders_on_the_host(num_microbatches: int, fails: bool) -> None:
    """Losses that are computed without `no_grad`, only to be looked at; batches that are given up."""

    class Fragile(nn.Module):
        broken = False

        def forward(self, value: Tensor) -> Tensor:
            if self.broken:
                raise ValueError("broken")
            return value * 1

    torch.manual_seed(0)
    fragile = Fragile()
    parts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), fragile, nn.Linear(4, 4), nn.Linear(4, 4))
    model = OffloadModel(parts, CPU, CPU, 5, True, num_microbatches)
    arena = model._engine.offloader._arena or Arena()
    inputs = torch.randn(8, 4)
    output = model(inputs)
    assert arena.num_blocks in (0, 3 if num_microbatches == 1 else 16)  # one alone keeps the last slice's input
    Fragile.broken = fails
    if fails:
        with pytest.raises(ValueError, match="broken"):
            output.sum().backward()
        with pytest.raises(ValueError, match="broken"):
            model(inputs)
    del output
    assert arena.num_blocks == 0


@both_ways
def test_other_weights_may_be_trained_in_the_next_step(checkpoint: bool) -> None:
    torch.manual_seed(0)
    plain, model = make_pair(
        nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), num_slices=2, checkpoint_activation=checkpoint
    )
    inputs = torch.randn(3, 4)
    for frozen in (0, 1, 2, 7):  # always as many
        for network in (plain, model):
            network.zero_grad()
            for number, parameter in enumerate(network.parameters()):
                parameter.requires_grad_(number != frozen)
            network(inputs).square().sum().backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)


@both_ways
def test_an_input_may_be_used_by_some_microbatches_only(checkpoint: bool) -> None:
    class Sometimes(nn.Module):
        def forward(self, value: Tensor, other: Tensor) -> Tensor:
            return value * other if value[0, 0] > 0 else value * 1

    model = OffloadModel(nn.Sequential(Sometimes(), nn.Identity()), CPU, CPU, 2, checkpoint, 3)
    value = torch.tensor([[1.0], [1.0], [1.0], [-1.0], [-1.0], [1.0], [1.0]], requires_grad=True)  # cut into 3, 2, 2
    other = torch.full((7, 1), 3.0, requires_grad=True)
    model(value, other).sum().backward()
    assert value.grad is not None
    assert other.grad is not None
    assert value.grad.flatten().tolist() == [3, 3, 3, 1, 1, 3, 3]
    assert other.grad.flatten().tolist() == [1, 1, 1, 0, 0, 1, 1]


@both_ways
def test_more_weights_may_be_trained_in_the_next_step(checkpoint: bool) -> None:
    plain, model = make_pair(layers(), checkpoint_activation=checkpoint)
    inputs = torch.randn(3, 4)
    for smallest in (1, 2):  # biases, then all
        for network in (plain, model):
            network.eval().zero_grad()
            for parameter in network.parameters():
                parameter.requires_grad_(parameter.dim() == 1 or smallest == 2)
            network(inputs).square().sum().backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)


@both_ways
def test_a_weight_may_be_handed_on_and_returned(checkpoint: bool) -> None:
    class Give(nn.Linear):
        def forward(self, value: Tensor) -> Any:
            return super().forward(value), self.weight

    class Keep(nn.Linear):
        def forward(self, values: Any) -> Any:
            return super().forward(values[0]), values[1]

    torch.manual_seed(0)
    plain, model = make_pair(
        nn.Sequential(Give(4, 4), *[Keep(4, 4) for _ in range(4)]), num_slices=5, checkpoint_activation=checkpoint
    )
    inputs = torch.randn(3, 4)
    for network in (plain, model):
        value, weight = network(inputs)
        assert torch.equal(weight, next(plain.parameters()))
        (value.sum() + weight.square().sum()).backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=1e-6)
