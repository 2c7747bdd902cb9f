"""The models of the checkpointing tests, and a training run of each that can be compared bit for bit."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp

TOKENS, LENGTH, WIDTH, STEPS = 11, 5, 8, 3


@dataclass(frozen=True)
class Variant:
    """A training run.

    Args:
        strategy: how its layers are checkpointed; None for not at all.
        microbatches: how many per step.
        autocast: whether layers run in bfloat16.
        dropout: probability.
        tied: whether the head is the embedding's weight.
        frozen: whether a layer and the embedding are not trained.
        horizon: how many tasks ahead offloaded activations are loaded; None keeps them on the device.
    """

    strategy: str | None = None
    microbatches: int = 1
    autocast: bool = False
    dropout: float = 0.0
    tied: bool = False
    frozen: bool = False
    horizon: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The configuration of offloading."""
        if self.horizon is None:
            return {}
        return {"offload_activations": True, "activation_loading_horizon": self.horizon}


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.grow = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.shrink = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.shrink(self.dropout(torch.tanh(self.grow(self.norm(x)))))
        return result


class Model(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        # Dropout and Tanh hold nothing and run with their neighbours.
        layers = [Block(variant.dropout) for _ in range(5)]
        self.layers = nn.Sequential(*layers[:2], nn.Dropout(variant.dropout), *layers[2:4], nn.Tanh(), layers[4])
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if variant.tied:
            self.head.weight = self.embedding.weight
        if variant.frozen:
            self.layers[0].requires_grad_(False)
            self.layers[3].requires_grad_(False)
            self.embedding.requires_grad_(variant.tied)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.embedding(tokens)))
        return scores


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(TOKENS, (size, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train_step_of(variant: Variant) -> Any:
    @smp.step
    def train_step(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=variant.autocast):
            scores = model(tokens)
        loss = functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten())
        model.backward(loss)
        return loss

    return train_step


@contextlib.contextmanager
def world(degree: int, microbatches: int, options: dict[str, Any] | None = None) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="microbatches is 1")  # trains right, if not fast
        smp.init({"pipeline_parallel_degree": degree, "microbatches": microbatches, "ddp": True, **(options or {})})
    try:
        yield
    finally:
        smp.shutdown()


def train(variant: Variant, degree: int) -> dict[str, Any]:
    """Train on this rank; return losses, and gradients and weights of what it holds."""
    with world(degree, variant.microbatches, variant.options):
        torch.manual_seed(7)
        module = Model(variant)
        model = smp.DistributedModel(module)
        if variant.strategy is not None:
            smp.set_activation_checkpointing(module.layers, strategy=variant.strategy)
        found = run(model, train_step_of(variant), batch)
        if variant.horizon == 1 and variant.strategy == "each":  # with more ahead or fewer groups, all may stay
            assert smp.offload_report().bytes_back > 0
        return found


def run(model: smp.DistributedModel, train_step: Any, batch: Callable[[int], tuple[Any, ...]]) -> dict[str, Any]:
    """Run a few steps, and return everything that came out."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(trained, lr=0.1, momentum=0.9))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(train_step(model, *batch(step)).reduce_mean().item())
        optimizer.step()
    found: dict[str, Any] = {"losses": losses}
    for name, parameter in model.local_named_parameters():
        found[name] = parameter.detach().clone()
        found[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
    return found


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Return the names of what is not bit-equal."""
    return [name for name in {**left, **right} if not _same(left.get(name, ""), right.get(name, ""))]


def _same(left: Any, right: Any) -> bool:
    return (
        torch.equal(left, right)
        if isinstance(left, Tensor) and isinstance(right, Tensor)
        else left is right or (not isinstance(left, Tensor) and not isinstance(right, Tensor) and left == right)
    )
