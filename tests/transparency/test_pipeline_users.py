"""What scripts do besides calling layers works over pipelines as in one process, or is refused in a clear sentence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, run_all
from tests.transparency.pipeline_models import WIDTH, Case, Loop, block, mse_step, tokens, vectors

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
    return MixtralForCausalLM(
        MixtralConfig(
            **sizes, **heads, num_local_experts=4, experts_implementation="eager"
        )  # the others know no float64
    )


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


def test_parameters_are_values_between_units() -> None:
    # They were NaN on the ranks that do not hold them.
    cases = {
        "reused weights": Case(Reused, vectors, mse_step),
        "penalties": Case(Loop, vectors, penalised_step),
    }
    assert run_ranks(train, 2, cases, SETUPS, timeout=120) == [2, 2]


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
