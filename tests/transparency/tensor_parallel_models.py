"""Models with marked modules, trained over any grid of ranks and in one process: both must come out the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from smpkit.torch.placement.delayed import initialize
from smpkit.torch.tensor_parallel.state_dict import join_state
from tests.transparency.models import Trace, loss_of, record

TOKENS, WIDTH, LENGTH = 17, 8, 8
STEPS = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.grow = nn.Linear(WIDTH, 3 * WIDTH)
        self.shrink = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(torch.tanh(self.grow(self.norm(x))))


class MarkedNet(nn.Module):
    """Embeddings, blocks and a head to be distributed; a linear layer that 4 ranks cannot divide, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.narrow = nn.Linear(WIDTH, 6)
        self.widen = nn.Linear(6, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x + self.widen(functional.gelu(self.narrow(x)))))


def build_marked() -> MarkedNet:
    torch.manual_seed(7)
    return MarkedNet().double()


def build_delayed() -> MarkedNet:
    torch.manual_seed(7)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with smp.delay_param_initialization():
            return MarkedNet()
    finally:
        torch.set_default_dtype(before)


def build_language_model() -> nn.Module:
    """A transformer of `smp.nn`, whose sizes four ranks divide, the vocabulary aside."""
    torch.manual_seed(7)
    model = smp.nn.DistributedTransformerLMHead(
        num_layers=2,
        num_attention_heads=4,
        attention_head_size=4,
        hidden_size=16,
        intermediate_size=24,
        vocab_size=TOKENS,
        num_positions=LENGTH,
        attention_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        initializer_range=0.2,
        use_normal_initialization=True,
        causal_mask_size=LENGTH,
        pre_layernorm=True,
        post_layernorm=False,
    )
    return model.double()


def loss_of_language_model(model: nn.Module, tokens: Tensor, _: Tensor) -> Tensor:
    loss: Tensor = model((tokens, None, None, None, tokens))[0]
    return loss


def samples(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    tokens = torch.randint(TOKENS, (16, LENGTH), generator=generator)
    return tokens, tokens.roll(1, 1)


@dataclass(frozen=True)
class Case:
    """A model that can be made at every degree, and its loss."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]


CASES = {
    "marked": Case(build_marked, loss_of),
    "delayed": Case(build_delayed, loss_of),
    "language model": Case(build_language_model, loss_of_language_model),
}


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    # A bias of keys has no gradient but rounding errors, which AdamW with its usual epsilon would make steps of.
    return torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1, eps=1e-4)


def train_plainly(name: str, steps: int = STEPS, device: str | torch.device = "cpu") -> Trace:
    """Train in one process on whole batches, on the CPU.

    Args:
        name: of the case.
        steps: how many.
        device: what the ranks compute on, whose random numbers delayed parameters are made of.
    """
    smp.init()
    case = CASES[name]
    module = case.build()
    initialize(module, [*module.parameters()], torch.device(device), 7)
    module.cpu()
    optimizer = optimizer_of(module)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = case.loss(module, *samples(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    smp.shutdown()
    return record(module, losses)


@smp.step
def train_step(model: Any, case: Case, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = case.loss(model, tokens, targets)
    model.backward(loss)
    return loss


def own_part(size: int = 16) -> slice:
    """Return which samples of the global batch this rank feeds: with `prescaled_batch` those of its whole tp group."""
    if smp.state.cfg.prescaled_batch:
        return slice(smp.rdp_rank(), size, smp.rdp_size())
    return slice(smp.dp_rank(), size, smp.dp_size())


def train(name: str, config: Mapping[str, Any], *, stepwise: bool = True) -> Trace:
    """Train on this world and return whole gradients of what this rank holds pieces of, and whole weights.

    Args:
        name: of the case; all modules of its model are marked.
        config: of `smp.init`.
        stepwise: use `@smp.step`; else the documented plain life at pipeline degree 1.
    """
    smp.init({"ddp": True, **config})
    case = CASES[name]
    module = case.build()
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = samples(step)
        mine = own_part()
        if stepwise:
            loss = train_step(model, case, tokens[mine], targets[mine]).reduce_mean()
        else:
            loss = case.loss(model, tokens[mine], targets[mine])
            loss.backward()
        losses.append(sum(smp.allgather(loss.item(), smp.DP_GROUP)) / smp.dp_size())
        optimizer.step()
    # With a sharded optimizer state only the owner of a parameter has its gradient.
    gradients = {} if smp.state.cfg.shard_optimizer_state else whole_gradients(model)
    trace = Trace(losses, gradients, dict(model.state_dict()))
    smp.shutdown()
    return trace


def whole_gradients(model: Any) -> dict[str, Tensor | None]:
    """Return the gradients of what this rank holds, joined over its tensor-parallel group."""
    named = {name: None if p.grad is None else p.grad.clone() for name, p in model.local_named_parameters()}
    trained = {name: gradient for name, gradient in named.items() if gradient is not None}
    return {**named, **join_state(model.get_module(), trained)}
