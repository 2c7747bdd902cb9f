"""Small models and plain-PyTorch training, the reference that smpkit must equal."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS, CONTEXT, WIDTH = 17, 6, 8


class Net(nn.Module):
    """Embedding, normalisation, a residual block, a tied head, a frozen and a never used parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.grow = nn.Linear(WIDTH, 3 * WIDTH)
        self.shrink = nn.Linear(3 * WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.frozen
        x = x + self.scale * self.shrink(torch.tanh(self.grow(self.norm(x))))
        return functional.linear(x, self.embedding.weight)


@dataclass
class Trace:
    """What training did: a loss per batch, then the last gradients and the weights."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def build(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(7)
    return Net().to(dtype)


def batch(index: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    tokens = torch.randint(TOKENS, (size, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def record(model: nn.Module, losses: list[float]) -> Trace:
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return Trace(losses, gradients, {name: value.clone() for name, value in model.state_dict().items()})


def train_plainly(steps: int, accumulation: int, microbatches: int = 1) -> Trace:
    """Train in one process on whole batches, cut into microbatches by hand."""
    model = build()
    optimizer = optimizer_of(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for turn in range(accumulation):
            total = 0.0
            tokens, targets = batch(step * accumulation + turn)
            for part, goal in zip(tokens.chunk(microbatches), targets.chunk(microbatches), strict=True):
                loss = loss_of(model, part, goal)
                (loss / accumulation / microbatches).backward()
                total += loss.item() / microbatches
            losses.append(total)
        optimizer.step()
    return record(model, losses)


def at_least(tolerance: float) -> float:
    """Return a tolerance that holds where smpkit trains on a GPU: plain training stays on the CPU."""
    return max(tolerance, 1e-8) if torch.cuda.is_available() else tolerance


def assert_same(ours: Trace, plain: Trace, tolerance: float) -> None:
    """Compare to `tolerance` relative and absolute, or to the bit where it is 0."""
    tolerance = at_least(tolerance)
    torch.testing.assert_close(ours.losses, plain.losses, rtol=tolerance, atol=tolerance or 1e-15)
    assert ours.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        _assert_close(name, ours.gradients[name], gradient, tolerance)
    for name, weight in plain.weights.items():
        _assert_close(name, ours.weights[name], weight, tolerance)


def _assert_close(name: str, ours: Tensor | None, plain: Tensor | None, tolerance: float) -> None:
    if ours is None or plain is None:
        assert ours is plain, f"{name}: one gradient is None and the other is not"
        return
    message = f"{name} differs by {(ours - plain).abs().max().item():.1e}"
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance, msg=message)
