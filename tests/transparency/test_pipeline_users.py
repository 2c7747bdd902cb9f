"""What scripts do besides calling layers works over pipelines as in one process, or is refused in a clear sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from smpkit.errors import UsageError
from tests.models import WIDTH, Case, Loop, block, mse_step, tokens, vectors
from tests.ranks import RankFailed, run_ranks
from tests.torch.pipeline.training import Setup, run_all

SETUPS = [
    Setup(3, "interleaved", None, (9, 9)),
    Setup(3, "zero_bubble", 13, (9, 9), {"active_microbatches": 2}),
    Setup(2, "interleaved", -1, (8, 4)),
]


def train(cases: dict[str, Case], setups: list[Setup]) -> int:
    return len(run_all(cases, setups, 2))


# --- Hugging Face's outputs by hooks ----------------------------------------------------------------------------------


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    config = MixtralConfig(**sizes, **heads, num_local_experts=4)
    config._experts_implementation = "eager"  # the others know no float64
    return MixtralForCausalLM(config)


def collecting_step(model: Any, ids: Tensor, labels: Tensor) -> Any:
    out = model(input_ids=ids, labels=labels, output_router_logits=True, output_hidden_states=True)
    loss = out.loss + 1e-2 * sum(hidden.pow(2).mean() for hidden in out.hidden_states)
    model.backward(loss)
    return loss, out.aux_loss, out.router_logits, out.hidden_states


def test_what_hugging_face_models_collect_by_hooks_comes_from_all_ranks() -> None:
    # Each rank had what its own layers had collected: the loss of the routers missed all others'.
    case = Case(mixtral, tokens, collecting_step)
    assert run_ranks(train, 2, {"Mixtral": case}, SETUPS, timeout=120) == [1, 1]


# --- parameters between units -----------------------------------------------------------------------------------------


class Reused(Loop):
    """Uses a layer's weight as a value, and another layer's for a head."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        scaled = functional.normalize(self.first.weight) * 2
        return functional.linear(hidden, scaled) + self.norm(self.first.weight).mean(0) + self.first.weight.T.sum()


def penalised_step(model: Any, x: Tensor, y: Tensor) -> Any:
    penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
    weights = torch.cat([parameter.flatten() for name, parameter in model.named_parameters() if "bias" not in name])
    loss = functional.mse_loss(model(x), y) + 1e-2 * penalty + 1e-2 * weights.abs().sum()
    model.backward(loss)
    with torch.no_grad():
        norm = sum(parameter.norm() for parameter in model.parameters())
    return loss, penalty, norm, sum(parameter.numel() for parameter in model.parameters())


class Shift(nn.Module):
    """Keeps nothing for backward, so that its input may be changed after it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class ThroughViews(nn.Module):
    """Changes a value through views after it has been sent, and sends it again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block(), block(), block(), Shift()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * 2
        y = self.layers[3](x)
        x[:, 0].zero_()
        y = y + self.layers[3](x)
        x.view(-1).add_(1)
        y = y + self.layers[3](x)
        x.T.mul_(2)
        y = y + self.layers[3](x)
        x.mT[1:][0] = 3
        y = y + self.layers[3](x)
        whole = x.view(-1)
        functional.relu(x, inplace=True)
        result: Tensor = y + self.layers[3](whole.view_as(x)) + self.layers[3](x)
        return result


class Fetching(nn.Module):
    """Keeps what backward needs under hooks, around layers of several ranks, and counts how often each is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block() for _ in range(4)])
        self.fetched: list[int] = []

    def fetch(self, kept: tuple[int, Tensor]) -> Tensor:
        self.fetched[kept[0]] += 1
        return kept[1]

    def keep(self, tensor: Tensor) -> tuple[int, Tensor]:
        self.fetched.append(0)
        return len(self.fetched) - 1, tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.keep, self.fetch):
            for index in (0, 2, 1, 3, 0, 2):
                x = x + self.layers[index](x)
        return x


def most_fetches(pipeline: str) -> int:
    placed = {"auto_partition": False, "default_partition": 0}
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 3, "pipeline": pipeline, **placed})
    module = Fetching()
    for index, layer in enumerate(module.layers):
        smp.set_partition(layer, index // 2)
    model = smp.DistributedModel(module)
    smp.step(mse_step)(model, torch.ones(6, WIDTH), torch.ones(6, WIDTH))
    return max(module.fetched)


def test_a_split_backward_fetches_once_what_hooks_around_several_ranks_keep() -> None:
    # Segments that began inside the hooks were walked through twice.
    assert run_ranks(most_fetches, 2, "zero_bubble") == [1, 1]


def test_parameters_and_views_are_values_between_units() -> None:
    # Parameters were NaN on the ranks that do not hold them. What had been sent stayed as it was before the change.
    cases = {
        "reused weights": Case(Reused, vectors, mse_step),
        "penalties": Case(Loop, vectors, penalised_step),
        "changes through views": Case(ThroughViews, vectors, mse_step),
    }
    assert run_ranks(train, 2, cases, SETUPS, timeout=120) == [3, 3]


# --- what models keep -------------------------------------------------------------------------------------------------


class Remembering(nn.Module):
    """Registers a hook at its first call, and keeps a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block(), block()])
        self.seen: list[int] = []
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.layers[0].register_forward_hook(lambda _module, _args, out: 2 * out)
            self.hooked = True
        self.seen.append(len(self.seen))
        for layer in self.layers:
            x = layer(x)
        return x + WIDTH * len(self.seen)


def test_tracing_leaves_no_hooks_and_nothing_in_lists() -> None:
    assert run_ranks(train, 2, {"it": Case(Remembering, vectors, mse_step)}, SETUPS[:1]) == [1, 1]


class Centred(nn.Module):
    """Keeps a running mean beside the layer in it, as the module around a unit."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        with torch.no_grad():
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return x - self.mean


def whole_and_own_buffers() -> tuple[bool, list[str]]:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False, "default_partition": 1})
    module = nn.Sequential(Centred(), block())
    smp.set_partition(module[0], 0)
    model = smp.DistributedModel(module)
    smp.step(mse_step)(model, torch.ones(4, WIDTH), torch.ones(4, WIDTH))
    mean = model.state_dict()["0.mean"]
    names = [name for name, _ in model.local_named_buffers()]
    smp.barrier()
    return bool(mean.abs().sum() > 0), names


def test_buffers_around_a_unit_are_those_of_the_rank_that_changes_them() -> None:
    # A state dict had them as the last rank had them: as they were at first.
    assert run_ranks(whole_and_own_buffers, 2) == [(True, ["0.mean"]), (True, [])]


# --- what cannot work is refused --------------------------------------------------------------------------------------


class Noting(nn.Module):
    """Keeps a loss of its own as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.loss = x.pow(2).mean()
        return x.tanh()


def noted_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.mse_loss(model(x), y) + sum(layer.loss for layer in model.module)
    model.backward(loss)
    return loss


def gradient_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    prediction = model(x)
    (gradient,) = torch.autograd.grad(prediction.sum(), x, create_graph=True)
    loss = functional.mse_loss(prediction, y) + gradient.pow(2).mean()
    model.backward(loss)
    return loss


def returning_step(model: Any, x: Tensor, y: Tensor) -> Tensor | None:
    loss = functional.mse_loss(model(x), y)
    model.backward(loss)
    return loss if smp.pp_rank() == 0 else None


def left_behind_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    layers = model.module
    hidden = layers[0](x)
    column = hidden[:, 0]
    back = layers[0](layers[3](hidden))  # both are cut off their graph where this comes back, each for itself
    column.zero_()
    loss = functional.mse_loss(layers[0](hidden) + back, y)
    model.backward(loss)
    return loss


def scripted() -> nn.Module:
    return nn.Sequential(block(), torch.jit.script(block()), block())


def take_step(step: Any) -> None:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "timeout_seconds": 60})
    model = smp.DistributedModel(nn.Sequential(*[Noting() for _ in range(4)]))
    smp.step(step)(model, torch.ones(4, WIDTH), torch.ones(4, WIDTH))


@pytest.mark.parametrize(
    ("step", "hint"),
    [
        pytest.param(noted_step, "return it from the module's forward", id="a loss kept as an attribute"),
        pytest.param(gradient_step, "take others inside a torch.nn.Module", id="a gradient penalty"),
        pytest.param(returning_step, "returned other things from the step", id="a result on one rank only"),
        pytest.param(left_behind_step, "assign to the value itself", id="a view whose base has left its graph"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_what_to_do(step: Any, hint: str) -> None:
    with pytest.raises(RankFailed, match=UsageError.__name__) as caught:
        run_ranks(take_step, 2, step)
    assert hint in str(caught.value)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_layer_trains() -> None:
    assert run_ranks(train, 2, {"scripted": Case(scripted, vectors, mse_step)}, SETUPS[:1]) == [1, 1]
