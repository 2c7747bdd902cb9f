"""Scripts train an OffloadModel as they train the plain model: the same results, gradients, weights and buffers.

A row is a model, a script, and how the OffloadModel is made. The script gets the network, and may return more to
compare.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel, OffloadOptimizer
from tests.models import Does


@dataclass(frozen=True)
class Row:
    build: Callable[[], nn.Module]
    script: Callable[[Any], Iterable[Any] | None]
    options: dict[str, Any] = field(default_factory=dict)
    """Of the OffloadModel."""
    tolerance: float = 1e-6
    given: Callable[[Any], Any] = lambda model: model
    """What the OffloadModel gets of a copy: a list of pieces, as from FairScale's `shard_model`, or a Sequential."""


def optimizer_of(network: Any, rule: Any = torch.optim.AdamW, groups: Any = None, **options: Any) -> Any:
    """Return the optimizer of a script: torch's own for the plain model, and an OffloadOptimizer for ours."""
    parameters = None if groups is None else groups([*network.parameters()])
    options = {"lr": 1e-2, **options}
    if isinstance(network, OffloadModel):
        return OffloadOptimizer(network, rule, parameters, **options)
    for ours in ("max_grad_norm", "overlap"):
        options.pop(ours, None)
    return rule(network.parameters() if parameters is None else parameters, **options)


def x(size: int = 5) -> Tensor:
    return torch.randn(size, 4)


def train(network: Any, optimizer: Any, backwards: int = 1, clip: float | None = None, steps: int = 4) -> Iterator[Any]:
    """Train for some steps, and yield the norm of what is clipped; an OffloadOptimizer clips itself."""
    for _ in range(steps):
        for _ in range(backwards):
            network(x()).square().mean().backward()
        norm = clip and not isinstance(network, OffloadModel) and nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        if clip:
            yield torch.as_tensor(optimizer.grad_norm if isinstance(network, OffloadModel) else norm)
        optimizer.zero_grad()


class Signs(torch.optim.Optimizer):
    """Moves against the sign of all gradients so far; has its states from the beginning."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["total"] = torch.zeros_like(each)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(self.state[each]["total"].add_(each.grad).sign(), alpha=group["lr"])


def trained(rule: Any = torch.optim.AdamW, groups: Any = None, backwards: int = 1, **options: Any) -> Any:
    """Return a script that trains with an optimizer of this kind."""

    def script(network: Any) -> list[Any]:
        return [
            *train(network, optimizer_of(network, rule, groups, **options), backwards, options.get("max_grad_norm"))
        ]

    return script


# --- models -----------------------------------------------------------------------------------------------------------


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5, inplace=True), nn.Linear(4, 4))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def repeated() -> nn.Module:
    """Use a layer, and an activation, in several places."""
    layer, activation = nn.Linear(4, 4), nn.Tanh()
    return nn.Sequential(nn.Linear(4, 4), activation, layer, activation, layer, nn.Linear(4, 2))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[0].weight
    return model


class Residual(nn.Sequential):
    """A Sequential that does more than to call its layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.scale + super().forward(value)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_forward_hook(lambda _module, _args, output: 2 * output)
    return model


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        return self.used(value)


def frozen() -> nn.Module:
    model = nn.Sequential(Unused(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    return model


class Forgetful(nn.Module):
    """Sets its buffer to None when it has used it."""

    memory: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.ones(4))

    def forward(self, value: Tensor) -> Tensor:
        memory, self.memory = self.memory, None
        return value if memory is None else value * memory * 2


def thin() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4), nn.Linear(4, 1))


class Bilinear(nn.Bilinear):
    def forward(self, one: Tensor, other: Tensor, *, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
        value = super().forward(one, other) * factor
        return value if bias is None else value + bias


class Pieces(nn.Sequential):
    """Takes and hands on what a list does: any arguments, and those that the piece before has returned."""

    def forward(self, *values: Any, **options: Any) -> Any:
        for piece in self:
            returned, options = piece(*values, **options), {}
            values = returned if isinstance(returned, tuple) else (returned,)
        return returned


def joining() -> nn.Module:
    return Pieces(Bilinear(4, 2, 4), nn.Linear(4, 2))


def in_sequence(model: Pieces) -> nn.Sequential:
    return nn.Sequential(*model)


def pieces() -> nn.Module:
    two = lambda _, value: (value, value.exp())  # noqa: E731
    return Pieces(nn.Linear(4, 4), Does(two), nn.Bilinear(4, 4, 3), Does(two))


def traced() -> nn.Module:
    """Cut a model as FairScale's `auto_shard` does."""
    parts = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    return nn.Sequential(*map(torch.fx.symbolic_trace, parts))


def perceptual() -> nn.Module:
    """Return a frozen network of which a loss takes features from the middle of a layer, as that of VGG."""
    layers = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(6))
    return nn.Sequential(*layers).requires_grad_(False)


class Skips(nn.Module):
    """Leaves out a block, or calls one twice; its blocks are of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.others = nn.ModuleList([nn.Linear(4, 4), nn.GRU(4, 4), nn.Bilinear(4, 4, 4)])

    def forward(self, value: Tensor, *, skips: bool) -> Tensor:
        linear, recurrent, joins = self.others
        value = linear(self.first(value))
        return joins(value, value) if skips else joins(recurrent(value)[0], linear(value))


class Tasks(nn.Module):
    """A trunk, which may fail in backward, and a head for each task."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 2)])

    def forward(self, value: Tensor, task: int = 0) -> Tensor:
        for block in self.trunk:
            value = block(value).tanh()
            if self.fails:
                value.register_hook(lambda _: 1 // 0)
        return self.heads[task](value)


# --- scripts ----------------------------------------------------------------------------------------------------------


def back(network: Any, *arguments: Any) -> None:
    network(*(arguments or (x(3),))).square().sum().backward()


def pass_rows(count: int) -> Any:
    def script(network: Any) -> list[Any]:
        output = network(x(count))
        output.square().sum().backward()
        return [output]

    return script


def features(network: Any) -> list[Any]:
    image, taken = x().requires_grad_(), list[Tensor]()
    first = next(each for each in network.modules() if isinstance(each, nn.Linear))
    first.register_forward_hook(lambda _module, _args, output: taken.append(output))
    network(image)
    taken[0].square().sum().backward()
    return [image.grad]


def several_inputs(network: Any) -> list[Any]:
    bias = torch.randn(1, 4, requires_grad=True)
    output = network(x(7), torch.randn(7, 2), factor=3.0, bias=bias)
    output.sum().backward()
    return [output, bias.grad]


def tuples(network: Any) -> list[Any]:
    one, other = network(x())
    (one.sum() + other.sum()).backward()
    return [one, other]


def autocast(network: Any) -> None:
    optimizer = optimizer_of(network, torch.optim.SGD, lr=0.1)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            output = network(x(10))
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def clip_what_is_not_finite(value: float) -> Any:
    """Return a script of which no step is dropped: a norm that is no number leaves none in any weight."""

    def script(network: Any) -> None:
        optimizer = optimizer_of(network, torch.optim.SGD, max_grad_norm=1.0)
        (network(x()) * torch.tensor([value, 1.0])).sum().backward()
        if not isinstance(network, OffloadModel):
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return script


def accumulate(network: Any) -> None:
    back(network)
    back(network)


def keep_gradients(network: Any) -> list[Any]:
    """Keep those of several batches without copies, as learners of PPO do that hand them to each other."""
    kept: list[Any] = []
    for _ in range(3):
        network.zero_grad()
        back(network)
        kept += [parameter.grad.data for parameter in network.parameters()]
    return kept


def forward_twice(network: Any) -> None:
    one, other = network(x(5)), network(x(2))
    other.square().sum().backward()
    one.sum().backward()


def backward_twice(network: Any) -> list[Any]:
    """The second backward must not find the first one's gradients at the borders between slices."""
    inputs = x(6).requires_grad_()
    loss = network(inputs).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [inputs.grad]


def train_tasks_in_turn(network: Any) -> None:
    """Each backward reaches one head; gradients of the others stay as they are."""
    for task in (0, 1, 0):
        network(x(3), task).square().sum().backward()


def clear_after_a_failure(network: Any) -> None:
    """What fairseq does when a backward has no memory left."""
    optimizer = torch.optim.SGD(network.parameters())
    back(network)
    Tasks.fails = True
    loss = network(x(3)).sum()
    Tasks.fails = False
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    optimizer.zero_grad()
    back(network)


def ask_autograd(network: Any) -> list[Any]:
    inputs = x().requires_grad_()
    return [*torch.autograd.grad(network(inputs).square().sum(), [*network.parameters(), inputs])]


def evaluate_first(network: Any) -> None:
    network.eval()
    back(network)
    network.train()
    back(network)


def evaluate_before_backward(network: Any) -> None:
    loss = network(x(3)).square().sum()
    network.eval()
    loss.backward()
    assert not any(module.training for module in network.modules())


def freeze_in_turn(network: Any) -> None:
    for chosen in (0, 1, 2, 5):  # always as many
        network.zero_grad()
        for number, parameter in enumerate(network.parameters()):
            parameter.requires_grad_(number != chosen)
        back(network)


def unfreeze(network: Any) -> None:
    for smallest in (1, 2):  # biases, then all
        network.zero_grad()
        for parameter in network.parameters():
            parameter.requires_grad_(parameter.dim() == 1 or smallest == 2)
        back(network)


def change_statistics(set_norm: Callable[[Any, bool], None]) -> Any:
    """Return a script that does something to norms in the third step."""

    def script(network: Any) -> None:
        for step in range(4):
            for each in network.modules():
                if isinstance(each, nn.BatchNorm1d):
                    set_norm(each, step > 1)
            accumulate(network)

    return script


def skip_in_turn(network: Any) -> None:
    inputs = x(3)
    for skips in (False, True, False):
        network.zero_grad()
        network(inputs, skips=skips).square().sum().backward()


def penalise(network: Any) -> None:
    (network(x(2)).sum() + sum(each.square().sum() for each in network.parameters())).backward()


def penalise_apart(network: Any) -> None:
    back(network)
    torch.stack([each.square().sum() for each in network.parameters()]).sum().backward()
    back(network)


def change_weights_before_the_step(network: Any) -> None:
    optimizer = optimizer_of(network)
    back(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2)
    optimizer.step()
    optimizer.zero_grad()


def forget_gradients(network: Any) -> None:
    optimizer = optimizer_of(network, torch.optim.SGD)
    back(network)
    network.zero_grad()
    optimizer.step()


def train_a_weight_later(rule: Any = torch.optim.AdamW, **options: Any) -> Any:
    """Return a script that does so."""

    def script(network: Any) -> None:
        first, *_ = network.parameters()
        first.requires_grad_(False)
        optimizer = optimizer_of(network, rule, lr=0.1, **options)
        [*train(network, optimizer)]
        first.requires_grad_(True)
        [*train(network, optimizer)]

    return script


def start_anew(network: Any) -> None:
    optimizer = optimizer_of(network)
    [*train(network, optimizer)]
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    [*train(network, optimizer)]


def replace_the_optimizer(network: Any) -> None:
    """Gradients go to the parameters again when it is gone, whose last updates may still run."""
    optimizer = optimizer_of(network, torch.optim.SGD)
    [*train(network, optimizer)]
    del optimizer
    [*train(network, torch.optim.SGD(network.parameters(), lr=0.1))]


def follow_a_schedule(network: Any) -> None:
    optimizer = optimizer_of(network, groups=matrices_and_vectors)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 2e-2], total_steps=6)
    for _ in range(4):
        [*train(network, optimizer, steps=1)]
        schedule.step()


def scale_losses(network: Any) -> None:
    optimizer, scaler = optimizer_of(network, torch.optim.SGD), torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(network(x(3)).sum() * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def clip_by_hand(network: Any) -> None:
    optimizer = optimizer_of(network, torch.optim.SGD, lr=0.1)
    back(network)
    nn.utils.clip_grad_norm_(network.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def matrices_and_vectors(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.5},
        {"params": [each for each in parameters if each.dim() == 1], "weight_decay": 0.0, "lr": 5e-3},
    ]


def in_turn(first: dict[str, Any], second: dict[str, Any]) -> Any:
    """Return what puts every other parameter into another group."""
    return lambda parameters: [{"params": parameters[::2], **first}, {"params": parameters[1::2], **second}]


# --- the table --------------------------------------------------------------------------------------------------------

MAXIMIZE = in_turn({"maximize": True}, {})
ROWS = {
    "gradients add up": Row(layers, accumulate, tolerance=0),
    "gradients that are kept": Row(layers, keep_gradients, tolerance=0),
    "two forwards before a backward": Row(layers, forward_twice, tolerance=0),
    "a graph that is kept": Row(layers, backward_twice),
    "a graph that is kept, microbatches": Row(layers, backward_twice, {"num_microbatches": 3}),
    "tasks in turn": Row(Tasks, train_tasks_in_turn, {"layers": ["trunk"]}, 0),
    "tasks in turn, heads in a slice": Row(Tasks, train_tasks_in_turn, {"layers": ["trunk", "heads"]}, 0),
    "a failed backward, cleared": Row(Tasks, clear_after_a_failure, {"layers": ["trunk"]}, 0),
    "torch.autograd.grad": Row(layers, ask_autograd, tolerance=0),
    "integer inputs": Row(
        lambda: nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3)),
        lambda network: back(network, torch.randint(0, 10, (5, 6))),
        tolerance=0,
    ),
    **{
        f"{rows} rows for 4 microbatches": Row(layers, pass_rows(rows), {"num_microbatches": 4})
        for rows in (1, 2, 4, 5)
    },
    "width one": Row(thin, pass_rows(7), {"num_microbatches": 3}),
    "several inputs": Row(joining, several_inputs, given=in_sequence),
    "several inputs, microbatches": Row(joining, several_inputs, {"num_microbatches": 3}, given=in_sequence),
    "a list of pieces": Row(pieces, tuples, given=list),
    "a list of pieces, microbatches": Row(pieces, tuples, {"num_microbatches": 3}, given=list),
    "traced pieces": Row(traced, trained(torch.optim.SGD), {"num_microbatches": 5}, given=list),
    "traced pieces under autocast": Row(traced, autocast, given=list),
    "traced pieces under autocast, microbatches": Row(traced, autocast, {"num_microbatches": 5}, 1e-2, given=list),
    "sparse gradients": Row(
        lambda: nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 4)),
        lambda network: back(network, torch.randint(0, 6, (5,))),
        tolerance=0,
    ),
    "a penalty on weights": Row(layers, penalise, tolerance=0),
    "a penalty with a backward of its own": Row(layers, penalise_apart, tolerance=0),
    "a layer in several places": Row(repeated, back),
    "blocks by path, some of them skipped": Row(
        Skips, skip_in_turn, {"num_slices": 4, "layers": ["first", "others"]}, 0
    ),
    "evaluation, then dropout in place": Row(dropping, evaluate_first),
    "evaluation between forward and backward": Row(normed, evaluate_before_backward),
    "other weights in each step": Row(layers, freeze_in_turn),
    "more weights in each step": Row(layers, unfreeze),
    "statistics that are frozen": Row(normed, change_statistics(lambda norm, late: norm.train(late)), tolerance=1e-5),
    "statistics without momentum": Row(
        normed, change_statistics(lambda norm, late: setattr(norm, "momentum", 0.1 if late else 0.0)), tolerance=1e-5
    ),
    "a buffer that becomes None": Row(lambda: nn.Sequential(nn.Linear(4, 4), Forgetful(), nn.Linear(4, 4)), accumulate),
    # With an optimizer.
    "RMSprop": Row(layers, trained(torch.optim.RMSprop)),
    "Adagrad": Row(layers, trained(torch.optim.Adagrad)),
    "states from the beginning": Row(layers, trained(Signs)),
    "NAdam": Row(layers, trained(torch.optim.NAdam)),
    "AdamW that maximizes": Row(layers, trained(groups=MAXIMIZE)),
    "SGD that maximizes": Row(layers, trained(torch.optim.SGD, MAXIMIZE)),
    # Without momentum torch's SGD takes no notice of dampening.
    "SGD with momentum of some": Row(layers, trained(torch.optim.SGD, in_turn({"momentum": 0.9}, {"dampening": 0.5}))),
    "groups and a schedule": Row(layers, follow_a_schedule, tolerance=1e-5),
    "several backwards": Row(layers, trained(backwards=3)),
    "several backwards, clipped": Row(layers, trained(backwards=3, max_grad_norm=0.05), tolerance=1e-5),
    "frozen and unused weights": Row(frozen, trained()),
    "tied weights": Row(tied, trained(), {"num_slices": 4}),
    "a Sequential with a forward of its own": Row(Residual, trained()),
    "a Sequential with a hook": Row(hooked, trained()),
    "features that a hook takes": Row(perceptual, features),
    "tied weights, clipped": Row(tied, trained(max_grad_norm=0.05), {"num_slices": 4}),
    "tied weights, updated in backward": Row(tied, trained(overlap="backward"), {"num_slices": 4}),
    "weights that change before the step": Row(layers, change_weights_before_the_step),
    "gradients that the model forgets": Row(layers, forget_gradients),
    "a weight that is trained later": Row(layers, train_a_weight_later(), tolerance=1e-4),
    "a weight that gets momentum later": Row(layers, train_a_weight_later(torch.optim.SGD, momentum=0.9)),
    "a weight that gets damped momentum later": Row(
        layers, train_a_weight_later(torch.optim.SGD, momentum=0.9, dampening=0.5)
    ),
    "no saved state": Row(layers, start_anew, tolerance=1e-5),
    "another optimizer afterwards": Row(layers, replace_the_optimizer),
    "clipped to infinity": Row(layers, clip_what_is_not_finite(float("inf"))),
    "clipped to what is no number": Row(layers, clip_what_is_not_finite(float("nan"))),
    "torch's scaler": Row(layers, scale_losses),
    "torch's clipping": Row(layers, clip_by_hand),
}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", ROWS)
def test_a_script_trains_it_as_the_plain_model(checkpoint: bool, name: str, request: pytest.FixtureRequest) -> None:
    row = ROWS[name]
    tolerance = row.tolerance
    if "num_microbatches" in row.options and row.script is not autocast:
        # Some machines' kernels round float32 otherwise where there are fewer rows.
        torch.set_default_dtype(torch.float64)
        request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
        tolerance = 1e-12
    torch.manual_seed(0)
    plain = row.build()
    model = OffloadModel(row.given(copy.deepcopy(plain)), "cpu", checkpoint_activation=checkpoint, **row.options)
    found = []
    for network in (plain, model):
        torch.manual_seed(1)
        results = [*(row.script(network) or ())]
        found.append(
            [*results, *(each.grad for each in network.parameters()), *network.parameters(), *network.buffers()]
        )
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(
                ours.to_dense(), theirs.to_dense(), rtol=0, atol=tolerance, check_dtype=False, equal_nan=True
            )
