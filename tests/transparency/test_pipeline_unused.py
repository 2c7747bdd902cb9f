"""What the loss leaves out gets no gradient over a pipeline, as in one process: none of zeros, which optimizers use."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import smpkit.torch as smp
from tests.models import WIDTH, Case, block, vectors
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Plain, Setup, batch, build, part, place, run_all, world

SETUPS = [
    *[Setup(2, pipeline, -1, (4, 4)) for pipeline in ("simple", "interleaved", "zero_bubble")],
    Setup(3, "interleaved", 13, (6, 6)),
    Setup(3, "zero_bubble", 5, (6, 6), {"active_microbatches": 2}),
]

# --- models, each with something aside that its step leaves out of the loss -------------------------------------------


class Aside(nn.Module):
    """A stem and a head, and layers in a row between them, over all ranks, whose outcome is returned beside the head's.

    Args:
        around: calls a layer of the row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.row = nn.ModuleList([block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        aside = x = self.stem(x)
        for layer in self.row:
            aside = aside + self.call(layer, aside)
        return self.head(x), aside

    def call(self, layer: nn.Module, value: Tensor) -> Tensor:
        result: Tensor = layer(value)
        return result


class Checkpointed(Aside):
    def call(self, layer: nn.Module, value: Tensor) -> Tensor:
        result: Tensor = checkpoint(layer, value, use_reentrant=False)
        return result


class TiedAside(Aside):
    """One weight is used by a layer that counts and by one that does not, most often on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.row.insert(0, nn.Linear(WIDTH, WIDTH))
        self.row[0].weight = self.head.weight


class BorrowedAside(Aside):
    """A layer is known to the last one of the row by its weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.row.insert(0, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.row[0].weight
        assert isinstance(weight, Tensor)
        return self.head(self.stem(x)), self.row[-1](weight)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x).T.contiguous().T  # the right one in another order


class OneOfTwo(nn.Module):
    """Layers with two outputs, each used by a rank of its own, of which one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.both = Both()
        self.again = Both()
        self.left, self.right, self.unused = block(), block(), block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.both(x)
        _, last = self.again(left)
        return self.left(last), self.unused(right) + self.right(right) + right


class Deaf(torch.autograd.Function):
    """Gives what it takes no gradient."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, _gradient: Tensor) -> None:
        return None


class Hears(nn.Module):
    """Uses its weight and the input's data alone, which it may change."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(2) if self.inplace else x
        result: Tensor = Deaf.apply(x) * self.weight
        return result


class Deafened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block(), block(), Hears(inplace=False), Hears(inplace=True)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers[2](self.layers[0](x)) + self.layers[3](self.layers[1](x)), x


def head_step(model: Any, x: Tensor, y: Tensor) -> Any:
    head, aside = model(x)
    loss = functional.mse_loss(head, y)
    model.backward(loss)
    return loss, aside


def sometimes_step(model: Any, x: Tensor, y: Tensor) -> Any:
    """Let it count in some microbatches, which all ranks know."""
    head, aside = model(x)
    loss = functional.mse_loss(head if y.sum() > 0 else aside, y)
    model.backward(loss)
    return loss


def asked_step(model: Any, x: Tensor, y: Tensor) -> Any:
    """Let it count in some microbatches, which a value of one rank decides."""
    head, aside = model(x)
    loss = functional.mse_loss(head, y)
    if loss > 1.3:
        loss = loss + aside.square().mean()
    model.backward(loss)
    return loss


CASES = {
    "layers in a row": Case(Aside, vectors, head_step),
    "checkpointed by torch": Case(Checkpointed, vectors, head_step),
    "tied weights": Case(TiedAside, vectors, head_step),
    "a weight as a value": Case(BorrowedAside, vectors, head_step),
    "one of two outputs": Case(OneOfTwo, vectors, head_step),
    "a layer that gives no gradient": Case(Deafened, vectors, head_step),
    "in some microbatches": Case(Aside, vectors, sometimes_step),
    "in some microbatches, asked": Case(Aside, vectors, asked_step),
}


def train(names: list[str], setups: list[Setup], degree: int) -> int:
    return len(run_all({name: CASES[name] for name in names}, setups, degree))


def test_gradients_are_none_where_those_of_one_process_are() -> None:
    assert run_ranks(train, 2, list(CASES), SETUPS, 2) == [len(CASES)] * 2


def test_that_there_is_none_is_handed_on_through_ranks() -> None:
    assert run_ranks(train, 4, ["layers in a row", "one of two outputs"], SETUPS, 4) == [2] * 4


def test_replicas_that_leave_out_different_things_reduce_what_they_have() -> None:
    setups = [
        Setup(2, "interleaved", -1, (4, 4), replicas=2),
        Setup(2, "zero_bubble", 13, (4, 4), replicas=2),
    ]
    assert run_ranks(train, 4, ["layers in a row", "in some microbatches"], setups, 2) == [2] * 4


def test_what_backward_does_not_need_may_be_offloaded() -> None:
    setups = [
        Setup(4, pipeline, -1, (8, 8, 8), {"offload_activations": True}) for pipeline in ("simple", "interleaved")
    ]
    names = ["checkpointed by torch", "in some microbatches"]
    assert run_ranks(train, 2, names, setups, 2, env={"SMPKIT_OFFLOAD_DEBUG": "1"}) == [2] * 2


# --- optimizers -------------------------------------------------------------------------------------------------------

ASIDE = Case(Aside, vectors, head_step, torch.float32)


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3)


def whole_step(model: Any, x: Tensor, y: Tensor) -> Any:
    dtype = next(model.parameters()).dtype
    return head_step(model, x.to(dtype), y.float())  # as the head: torch 2.11 knows no way back from mixed dtypes


def decayed(options: dict[str, Any], plain: dict[str, Tensor], degree: int) -> dict[str, float]:
    """Train three steps, clipped, with weight decay; return how far this rank's weights are from those of one process.

    One rank has no gradients at all.
    """
    with world(Setup(2, "interleaved", -1, options=options), degree):
        module = build(ASIDE)
        place(module, -1, degree)
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(adamw(model), static_loss_scale=64.0 if options else None)
        for number in range(3):
            optimizer.zero_grad()
            smp.step(whole_step)(model, *batch(ASIDE, number, 4))
            smp.clip_grad_norm_(model, 0.5)
            optimizer.step()
        return {name: float((each - plain[name]).abs().max()) for name, each in model.local_named_parameters()}


def trained_plainly() -> dict[str, Tensor]:
    model = Plain(build(ASIDE), 2)
    optimizer = adamw(model)
    for number in range(3):
        optimizer.zero_grad()
        whole = batch(ASIDE, number, 4)
        for index in range(2):
            whole_step(model, *[part(each, index, 2) for each in whole])
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {name: each.detach() for name, each in model.module.named_parameters()}


@pytest.mark.parametrize(("options", "close"), [({}, 1e-6), ({"fp16": True}, 0.02)], ids=["float32", "float16"])
def test_weight_decay_leaves_alone_what_one_process_leaves_alone(options: dict[str, Any], close: float) -> None:
    plain, start = trained_plainly(), dict(build(ASIDE).named_parameters())
    away: dict[str, float] = {}
    for part_of in run_ranks(decayed, 3, options, plain, 3):
        away |= part_of
    assert set(away) == set(plain)
    for name, distance in away.items():
        is_left_alone = torch.equal(plain[name], start[name])
        assert is_left_alone == name.startswith("row")
        # Of what is trained in float16 only its own roundings may differ; the rest is rounded once.
        assert distance < (1e-3 * bool(options) + 1e-7 if is_left_alone else close), name


# --- what travels -----------------------------------------------------------------------------------------------------

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128]


class TwoRows(nn.Module):
    """Each rank has a layer of each row; one row hands on single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other_first = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)
        self.last, self.other_last = nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(self.first(x)), self.other_last(self.other_first(x))


def rows_step(factors: tuple[float, ...], model: Any, x: Tensor) -> None:
    pairs = zip(model(x), factors, strict=True)
    model.backward(sum(outcome.abs().mean() * factor for outcome, factor in pairs if factor))


@dataclass(frozen=True)
class Travelled:
    """What gradients a step has left, and what it has sent."""

    gradients: dict[str, str]
    messages: int
    num_bytes: int


def travelled(dtype: torch.dtype) -> list[Travelled]:
    found = []
    with world(Setup(1, seed=-1), 2):
        module = TwoRows().to(dtype)
        place(module, -1, 2)
        model = smp.DistributedModel(module)
        assert model.pipeline is not None
        transport = model.pipeline._transport
        for factors in [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (math.nan, math.nan)]:
            step = smp.step(functools.partial(rows_step, factors))
            for _ in range(2):  # in the first one, ranks tell each other what layers return
                model.zero_grad()
                before = transport.num_messages, transport.num_bytes
                step(model, torch.ones(1, WIDTH, dtype=dtype))
            sent = transport.num_messages - before[0], transport.num_bytes - before[1]
            found.append(Travelled({name: told(each) for name, each in model.local_named_parameters()}, *sent))
    return found


def told(parameter: Tensor) -> str:
    gradient = parameter.grad
    return "none" if gradient is None else "NaN" if gradient.isnan().all() else "numbers"


def all_travelled() -> list[list[Travelled]]:
    return [travelled(dtype) for dtype in DTYPES]


def test_messages_are_as_many_and_as_long_whatever_has_a_gradient_and_nan_is_one() -> None:
    for found in zip(*run_ranks(all_travelled, 2), strict=True):
        for used, other_used, one_used, nan in found:
            assert set(used.gradients.values()) == {"numbers"}
            assert set(nan.gradients.values()) == {"NaN"}
            for name in used.gradients:
                is_other = name.startswith("other")
                assert other_used.gradients[name] == ("numbers" if is_other else "none")
                assert one_used.gradients[name] == ("none" if is_other else "numbers")
            assert len({(each.messages, each.num_bytes) for each in (used, other_used, one_used, nan)}) == 1
