"""What may be asked for, what is said to what may not, and that the user's modules stay the user's."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.recompute.api import cut_groups
from tests.models import WIDTH, Does, block
from tests.torch.steps import wrap


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def saved(call: Any) -> int:
    """Return how many tensors a call keeps for backward."""
    count = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal count
        count += tensor.numel() > 0  # until 2.12, torch's checkpoint keeps an empty tensor of its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return count


X = torch.randn(3, WIDTH)


@pytest.mark.parametrize(
    ("places", "size", "groups"),
    [
        ("0011", None, ["00", "11"]),  # the examples of SMP v1's documentation
        ("00111", 3, ["00", "111"]),
        ("00000", 2, ["00", "00", "0"]),
        ("0101", None, ["0", "1", "0", "1"]),
        ("-0-1-", None, ["-0-", "1-"]),
        ("---", None, ["---"]),
        ("0x00", None, ["0", "x", "00"]),
        ("x", 2, ["x"]),
        ("01", 1, ["0", "1"]),
        ("", None, []),
    ],
)
def test_groups_are_cut_at_the_borders_of_partitions(places: str, size: int | None, groups: list[str]) -> None:
    known: dict[str, frozenset[int] | None] = {"x": None, "-": frozenset()}
    cut = cut_groups([known[each] if each in known else frozenset({int(each)}) for each in places], size)
    assert ["".join(places[index] for index in group) for group in cut] == groups


def test_a_strategy_keeps_what_enters_its_groups_until_another_is_set() -> None:
    stack = nn.Sequential(*[Block() for _ in range(5)])
    for strategy, kept in (("each", 5), ("contiguous", 1), ("group_1", 5), ("group_2", 3), ("each", 5)):
        assert saved(lambda strategy=strategy: smp.checkpoint_sequential(stack, X, strategy)) == kept
        smp.set_activation_checkpointing(stack, strategy=strategy)
        assert saved(lambda: stack(X)) == kept


def test_another_microbatch_may_call_a_sequential_while_a_layer_of_it_is_suspended() -> None:
    """With layers on ranks 0, 1, 0, each microbatch of rank 0 waits in the middle, while the next one begins."""
    others: list[Callable[[], Any]] = []

    class Suspended(Block):
        def forward(self, x: Tensor) -> Tensor:
            if others:
                thread = ThreadPoolExecutor(1)
                assert thread.submit(others.pop()).result().requires_grad
            return super().forward(x)

    stack = nn.Sequential(Block(), Suspended(), Block())
    others.append(lambda: smp.checkpoint_sequential(stack, X, "group_2"))
    smp.checkpoint_sequential(stack, X, "group_2")
    assert "forward" not in vars(stack)


@pytest.mark.parametrize(
    "container", [nn.ModuleList, lambda blocks: nn.ModuleDict(dict(zip("ab", blocks, strict=True)))]
)
def test_the_children_of_a_container_are_checkpointed_each(container: Any) -> None:
    blocks = [Block(), Block()]
    smp.set_activation_checkpointing(container(blocks))
    assert saved(lambda: blocks[1](blocks[0](X))) == 2


def test_a_call_in_a_checkpointed_module_is_not_checkpointed_twice() -> None:
    block = Block()
    smp.set_activation_checkpointing(block)
    runs = []
    block.inner.register_forward_hook(lambda *_: runs.append(0))
    smp.checkpoint(block, X).sum().backward()
    assert len(runs) == 1  # and half a one, which early stopping cut off before the hook


def test_the_module_stays_what_it_was() -> None:
    model = nn.ModuleDict({"stack": nn.Sequential(Block(), Block()), "block": Block()})
    names, kinds = list(model.state_dict()), [type(each) for each in model.modules()]
    smp.set_activation_checkpointing(model["stack"], strategy="contiguous")
    smp.set_activation_checkpointing(model["block"])
    model["block"](model["stack"](X))
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == [name for name, _ in copy.deepcopy(model).named_modules()]
    assert [type(each) for each in model.modules()] == kinds
    assert isinstance(model["block"], Block)
    assert "forward" not in vars(model["stack"])


def test_copies_are_plain_modules() -> None:
    block = Block()
    smp.set_activation_checkpointing(block)
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    for made in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), torch.load(file, weights_only=False)):
        assert b"smpkit" not in pickle.dumps(made)
        assert torch.equal(made(X), block(X))
        assert saved(lambda made=made: made(X)) > 1


def test_hooks_on_a_sequential_and_its_layers_run() -> None:
    stack, seen = nn.Sequential(Block(), Block()), []
    stack.register_forward_pre_hook(lambda *_: seen.append("before"))
    stack.register_forward_hook(lambda *_: seen.append("after"))
    stack[1].register_forward_hook(lambda *_: seen.append("layer"))
    smp.set_activation_checkpointing(stack, strategy="contiguous")
    with torch.no_grad():
        stack(X)
    assert seen == ["before", "layer", "after"]


class Loop(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        for each in self:
            input = input + each(input)  # noqa: A001
        return input


def test_a_sequential_with_a_forward_of_its_own_is_checkpointed_layer_by_layer() -> None:
    loop = Loop(block(), block())
    smp.set_activation_checkpointing(loop)
    assert saved(lambda: loop(X)) == 2
    with pytest.raises(UsageError, match=r"(?s)`Loop` has a forward of its own, so its layers cannot be.*hint: .*each"):
        smp.set_activation_checkpointing(loop, strategy="contiguous")
    with pytest.raises(UsageError, match="has a forward of its own"):
        smp.checkpoint_sequential(loop, X)


BAD: list[tuple[Any, str]] = [
    (lambda: smp.checkpoint(torch.tanh, X), r"takes a torch.nn.Module, got tanh"),  # type: ignore[arg-type]
    (lambda: smp.checkpoint(Block, X), r"takes a module, not the class Block"),  # type: ignore[arg-type]
    (lambda: smp.checkpoint(nn.ModuleList([Block()]), X), "a ModuleList cannot be called"),
    (lambda: smp.checkpoint(Block(), X, preserve_rng_state=1), "preserve_rng_state is 1; it must be True or False"),  # type: ignore[arg-type]
    (lambda: smp.checkpoint_sequential(Block(), X), "takes a torch.nn.Sequential, not an object of type `Block`"),  # type: ignore[arg-type]
    (lambda: smp.checkpoint_sequential(nn.Sequential(), X, "all"), r"(?s)strategy is 'all'.*`each`.*`contiguous`"),
    (lambda: smp.checkpoint_sequential(nn.Sequential(), X, "group_0"), "strategy is 'group_0'"),
    (lambda: smp.checkpoint_sequential(nn.Sequential(), X, "group_"), "strategy is 'group_'"),
    (lambda: smp.checkpoint_sequential(nn.Sequential(), X, 2), "strategy is 2"),  # type: ignore[arg-type]
    (lambda: smp.checkpoint_sequential(nn.Sequential(), X, pack_args_as_tuple=None), "pack_args_as_tuple is None"),  # type: ignore[arg-type]
    (lambda: smp.set_activation_checkpointing(torch.tanh), "set_activation_checkpointing takes a torch.nn.Module"),  # type: ignore[arg-type]
    (lambda: smp.set_activation_checkpointing(Block(), strategy="contiguous"), "strategy can be set for a torch.nn.S"),
    (lambda: smp.set_activation_checkpointing(Block(), True, True), "pack_args_as_tuple can be set for a torch.nn.S"),
    (
        lambda: smp.set_activation_checkpointing(nn.ModuleList([Block()]), True, True, "group_2"),
        "pack_args_as_tuple and strategy can be set for a torch.nn.Sequential only, not for an object of type `Modul",
    ),
    (lambda: smp.set_activation_checkpointing(nn.Sequential(), strategy="Each"), "strategy is 'Each'"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_rejects_wrong_arguments(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.usefixtures("world")
def test_the_whole_distributed_model_is_refused() -> None:
    model = wrap(Block())
    with pytest.raises(UsageError, match="takes a layer, not the whole"):
        smp.set_activation_checkpointing(model)


@pytest.mark.parametrize("pack", [False, True])
def test_a_tuple_reaches_layers_as_a_tuple(pack: bool) -> None:
    def act(own: Any, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = pair
        return own.linear(x) * mask, mask

    stack = nn.Sequential(*[Does(act, linear=nn.Linear(WIDTH, WIDTH)) for _ in range(3)])
    mask = torch.rand(3, WIDTH)
    plain = stack((X, mask))[0]
    assert torch.equal(smp.checkpoint_sequential(stack, (X, mask), "group_2", pack_args_as_tuple=pack)[0], plain)
    smp.set_activation_checkpointing(stack, pack_args_as_tuple=pack)
    assert torch.equal(stack((X, mask))[0], plain)
