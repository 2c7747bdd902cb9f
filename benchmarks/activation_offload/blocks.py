"""The model of this benchmark: dense decoder blocks of 12.25 d² parameters, and what a step of it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, noop_context_fn


class Block(nn.Module):
    """Attention and a gated feed-forward of 2.75 d, both after an RMS norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        hidden = 11 * width // 4
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.before_attention(x)
        projections = (self.q, self.k, self.v)
        q, k, v = (project(y).view(batch, length, self.heads, -1).transpose(1, 2) for project in projections)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        y = self.before_feed(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Layers(nn.Module):
    """Layers, checkpointed one by one or not at all."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.is_checkpointed = False
        self.context_fn: Callable[[], Any] = noop_context_fn
        """The `context_fn` of selective checkpoints."""
        self.before_layer: Callable[[Tensor], object] = id
        """Called with each layer's input; one contestant needs that."""
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            self.before_layer(x)
            if self.is_checkpointed:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=self.context_fn)
            else:
                x = layer(x)
        return x


class Decoder(Layers):
    """Dense decoder blocks."""

    def __init__(self, width: int, heads: int, num_layers: int) -> None:
        super().__init__(Block(width, heads) for _ in range(num_layers))


def train_step(model: Layers, x: Tensor, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> Tensor:
    """Run forward inside of `around()` and backward; return the loss."""
    model.zero_grad(set_to_none=True)
    with around():
        y = model(x)
    loss = y.float().square().mean()
    loss.backward()
    return loss.detach()


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return copies of all gradients."""
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
