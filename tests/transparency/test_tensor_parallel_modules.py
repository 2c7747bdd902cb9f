"""Modules of `smp.nn` compute what plain PyTorch does, and several tensor-parallel ranks what one does.

Modules of a kind are tried together, one after the other: the name of what differs says which it was.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import smpkit.torch as smp
from smpkit.torch.tensor_parallel.module import initialize_shard
from tests.models import Case
from tests.pairwise import pairwise, slow
from tests.torch.steps import on_ranks
from tests.train import TOLERANCE, Way, batch, build, same, world
from tests.transparency import tensor_parallel_plain as plain

LENGTH, OTHER, HIDDEN, TOKENS = 8, 6, 16, 21
SIZES: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_size": 4,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
}
DROPOUTS: dict[str, Any] = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
PRE: dict[str, Any] = {"pre_layernorm": True, "post_layernorm": False}
CAUSAL: dict[str, Any] = {"causal_mask_size": LENGTH}


# --- batches and the step ---------------------------------------------------------------------------------------------


def hidden(size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Make hidden states, those of an encoder, and a mask to add for each."""
    states = [torch.randn(size, each, HIDDEN, generator=generator).double() for each in (LENGTH, OTHER)]
    masks = [torch.zeros(size, 1, 1, each, dtype=torch.float64) for each in (LENGTH, OTHER)]
    for mask in masks:
        mask[::2, :, :, -2:] = mask[1::4, :, :, -1:] = -10000.0
    return *states, *masks


def words(size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Make token ids, which of them count, token types, labels, and hidden states of an encoder."""
    ids, labels = (torch.randint(TOKENS, (size, LENGTH), generator=generator) for _ in range(2))
    types, kept = torch.randint(2, (size, LENGTH), generator=generator), torch.ones(size, LENGTH, dtype=torch.int64)
    kept[::2, -2:] = 0
    labels[::4, 2:4] = -100
    return ids, kept, types, labels, torch.randn(size, OTHER, HIDDEN, generator=generator).double()


def every_element_step(model: Any, *inputs: Tensor) -> Any:
    """Go back from a loss in which every element of every output counts differently."""
    outputs = model(*inputs)
    model.backward(loss_of(outputs))
    return outputs


def loss_of(outputs: Mapping[str, Tensor]) -> Tensor:
    losses = [(each * torch.arange(each[0].numel()).view(each[0].shape).cos()).mean() for each in outputs.values()]
    return torch.stack(losses).sum()


# --- kinds of modules -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A module, how it is called with a batch, and what it should return, given its weights and the same batch."""

    make: Callable[[], nn.Module]
    call: Callable[..., Tensor]
    plainly: Callable[..., Tensor]


def linear(make: Callable[[], nn.Module], plainly: Callable[[plain.State, Tensor], Tensor]) -> Part:
    return Part(make, lambda module, x, *_: module(x), lambda state, x, *_: plainly(state, x))


def one_linear(state: plain.State, x: Tensor) -> Tensor:
    return F.linear(x, state["weight"], state.get("bias"))


LINEAR = {
    "whole": linear(lambda: smp.nn.DistributedLinear(HIDDEN, 10), one_linear),
    "of two dimensions, without bias": Part(
        lambda: smp.nn.DistributedLinear(HIDDEN, 7, bias=False),
        lambda module, x, *_: module(x[:, 0]),
        lambda state, x, *_: one_linear(state, x[:, 0]),
    ),
    "column and row": linear(
        lambda: nn.Sequential(smp.nn.ColumnParallelLinear(HIDDEN, 24), nn.GELU(), smp.nn.RowParallelLinear(24, HIDDEN)),
        lambda state, x: plain.linear(state, "2", F.gelu(plain.linear(state, "0", x))),
    ),
    "output": linear(
        lambda: smp.nn.DistributedTransformerOutputLayer(HIDDEN, 24, 0.0, "relu", **PRE),
        lambda state, x: plain.output(state, x, {"activation": "relu"}),
    ),
}
EMBEDDING = {
    "by width": linear(
        lambda: smp.nn.DistributedEmbedding(TOKENS, HIDDEN, padding_idx=3),
        lambda state, ids: F.embedding(ids, state["weight"], 3),
    ),
    "by an uneven vocabulary": linear(
        lambda: smp.nn.VocabularyParallelEmbedding(TOKENS, HIDDEN, padding_idx=17),
        lambda state, ids: F.embedding(ids, state["weight"], 17),
    ),
}


def layer(kind: str = "Layer", **options: Any) -> Part:
    sizes = {**SIZES, **options}
    has_cross = "add_cross_attention" in options
    compute = plain.layer if kind == "Layer" else plain.transformer

    def call(module: nn.Module, x: Tensor, states: Tensor, mask: Tensor, cross_mask: Tensor) -> Tensor:
        return module((x, states, mask, cross_mask) if has_cross else (x, mask))[0]

    def plainly(state: plain.State, x: Tensor, states: Tensor, mask: Tensor, cross_mask: Tensor) -> Tensor:
        return compute(state, x, mask, (states, cross_mask) if has_cross else (None, None), sizes)

    module_class = smp.nn.DistributedTransformerLayer if kind == "Layer" else smp.nn.DistributedTransformer
    return Part(lambda: module_class(**sizes, **DROPOUTS), call, plainly)


LAYER = {
    "norm after": layer(),
    "norms before and after, ALiBi": layer(pre_layernorm=True, use_alibi=True, **CAUSAL),
    "cross attention": layer(**PRE, add_cross_attention=True),
    "GPT-J": layer(**PRE, **CAUSAL, parallel_residual=True, rotary_dim=2, query_key_value_bias=False),
}
STACK = {
    "norms before and after": layer("Stack", num_layers=2, pre_layernorm=True, post_layernorm=True),
    "GPT-Neo": layer("Stack", **PRE, **CAUSAL, num_layers=2, window_sizes=[None, 3], scale_attention_scores=False),
    "cross attention": layer("Stack", num_layers=2, add_cross_attention=True),
}


def model(**options: Any) -> Part:
    sizes = {**SIZES, "num_layers": 2, "vocab_size": TOKENS, "num_positions": LENGTH, **options}

    def given(ids: Tensor, kept: Tensor, types: Tensor, labels: Tensor, states: Tensor) -> tuple[Tensor | None, ...]:
        types_of = types if "num_token_types" in options else None
        cross = (states, None) if "add_cross_attention" in options else ()
        return (ids, kept, types_of, None, *cross, labels if options.get("add_lm_head", True) else None)

    def whole(outputs: Any) -> Tensor:
        """Put the loss beside the logits."""
        return outputs if isinstance(outputs, Tensor) else outputs[1] + outputs[0]

    return Part(
        lambda: smp.nn.DistributedTransformerLMHead(**sizes, **DROPOUTS),
        lambda module, *batch: whole(module(given(*batch))),
        lambda state, *batch: whole(plain.language_model(state, given(*batch), sizes)),
    )


MODEL = {
    "GPT-2": model(**PRE, **CAUSAL),
    "BERT": model(num_token_types=2),
    "decoder": model(**PRE, **CAUSAL, add_cross_attention=True),
    "both norms, own head": model(
        pre_layernorm=True, num_positions=0, rotary_dim=4, tie_lm_head=False, lm_head_bias=True, vocab_size=24
    ),
    "without head": model(**PRE, add_lm_head=False),
}
KINDS = {"linear": LINEAR, "embedding": EMBEDDING, "layer": LAYER, "stack": STACK, "model": MODEL}


class Kind(nn.Module):
    """All modules of a kind, each called with the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if not smp.is_initialized():  # for the reference in one process
            smp.init()
        self.kind = kind
        self.first = nn.Linear(HIDDEN, HIDDEN)  # its gradient is made of those that the modules give to their inputs
        self.parts = nn.ModuleDict({name: part.make() for name, part in KINDS[kind].items()})
        for each in self.parameters():
            initialize_shard(each, lambda whole: nn.init.normal_(whole, std=0.3))

    def forward(self, *batch: Tensor) -> dict[str, Tensor]:
        inputs = [self.first(each) if each.is_floating_point() and each.dim() == 3 else each for each in batch]
        return {name: part.call(self.parts[name], *inputs) for name, part in KINDS[self.kind].items()}


def plainly(kind: str, state: plain.State, batch: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return what `Kind` does, in plain PyTorch."""
    is_states = [each.is_floating_point() and each.dim() == 3 for each in batch]
    inputs = [plain.linear(state, "first", each) if is_s else each for each, is_s in zip(batch, is_states, strict=True)]
    return {name: part.plainly(plain.below(state, f"parts.{name}."), *inputs) for name, part in KINDS[kind].items()}


CASES = {
    kind: Case(functools.partial(Kind, kind), words if kind in ("embedding", "model") else hidden, every_element_step)
    for kind in KINDS
}


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_one_rank_equals_plain_pytorch(kind: str) -> None:
    case = CASES[kind]
    with world(Way()):
        module, arguments = build(case), batch(case, 0, 4)
        state = {name: each.detach().clone().requires_grad_() for name, each in module.named_parameters()}
        ours, theirs = module(*arguments), plainly(kind, state, arguments)
        loss_of(ours).backward()
        loss_of(theirs).backward()
        pairs: dict[str, Any] = {name: (each, theirs[name]) for name, each in ours.items()}
        pairs |= {f"the gradient of {name}": (each.grad, state[name].grad) for name, each in module.named_parameters()}
        found = {name: (left - right).abs().max().item() for name, (left, right) in pairs.items() if left is not None}
        assert {name: each for name, each in found.items() if not each < TOLERANCE} == {}


def way_of(tensor: int, prescaled: bool, optimize: str) -> Way:
    config = {"prescaled_batch": prescaled, "optimize": optimize}
    # One batch shows it: the weights are random, biases and norms too.
    return Way(replicas=1 if prescaled else tensor, tensor=tensor, microbatches=1, batches=(4,), config=config)


PAIRS = pairwise([list(KINDS), [False, True], ["speed", "memory"]])
ROWS = [(kind, way_of(2, prescaled, optimize)) for kind, prescaled, optimize in PAIRS]
ROWS += [(kind, way_of(4, False, "memory")) for kind in ("linear", "embedding")]
GRID = [
    (kind, way_of(tensor, prescaled, optimize))
    for kind, tensor, prescaled, optimize in itertools.product(KINDS, (2, 4), (False, True), ("speed", "memory"))
]


@pytest.mark.parametrize(("kind", "way"), [*ROWS, *slow(row for row in GRID if row not in ROWS)], ids=str)
def test_several_ranks_equal_one(kind: str, way: Way) -> None:
    same(CASES[kind], way)
