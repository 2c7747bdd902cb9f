from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch import nn

from smpkit.torch.placement.units import units_of


def leaf(size: int = 4) -> nn.Module:
    return nn.Linear(1, size, bias=False)


def module(kind: str, *, size: int = 0, **children: nn.Module) -> nn.Module:
    """Return a module of a class of this name, with a parameter of its own if it has a size."""
    made: nn.Module = type(kind, (nn.Module,), {})()
    if size:
        made.register_parameter("own", nn.Parameter(torch.zeros(size)))
    for name, child in children.items():
        made.add_module(name, child)
    return made


def block(kind: str = "Block") -> nn.Module:
    return module(kind, fc=leaf(), act=nn.GELU())


def names(model: nn.Module, split: Collection[str] = ()) -> list[str]:
    return [unit.name for unit in units_of(model, split)]


def test_a_transformer_is_cut_into_leaves_and_blocks() -> None:
    inner = module("Model", embed=leaf(), layers=nn.ModuleList([block(), block()]), norm=leaf())
    model = module("ForCausalLM", model=inner, head=leaf())
    assert names(model) == ["model.embed", "model.layers.0", "model.layers.1", "model.norm", "head"]


PARTS = nn.ModuleList([block("SelfAttention"), block("FeedForward")])
STAGE = module("Stage", blocks=nn.ModuleList([block(), block()]), downsample=leaf())
ATTENTION = module("MultiheadAttention", size=12, out_proj=leaf())
CASES: dict[str, tuple[nn.Module, list[str]]] = {
    "a small Sequential in a block": (
        module("Model", layers=nn.ModuleList([module("Block", mlp=nn.Sequential(leaf(), leaf()))])),
        ["layers.0"],
    ),
    "a list of different parts in a block": (
        module("T5Stack", block=nn.ModuleList([module("T5Block", layer=PARTS)])),
        ["block.0"],
    ),
    "a stack of blocks in a stage": (
        module("Swin", stages=nn.ModuleList([STAGE])),
        ["stages.0.blocks.0", "stages.0.blocks.1", "stages.0.downsample"],
    ),
    "a Sequential": (nn.Sequential(leaf(), nn.BatchNorm1d(1, affine=False), nn.ReLU(), block()), ["0", "1", "3"]),
    "a Sequential in a Sequential": (nn.Sequential(nn.Sequential(leaf(), leaf()), leaf()), ["0.0", "0.1", "1"]),
    "weights of children that are read": (module("Model", attention=ATTENTION, head=leaf()), ["attention", "head"]),
    "parameters of the model": (module("Model", size=4, one=leaf(), two=leaf()), ["one", "two"]),
    "a single leaf": (leaf(), [""]),
    "an empty list": (module("Model", layers=nn.ModuleList(), head=leaf()), ["head"]),
    "a loss that values cut": (module("Model", loss=nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2])), ["loss"]),
}


@pytest.mark.parametrize("case", CASES)
def test_models_are_cut_where_parts_can_lie_apart(case: str) -> None:
    model, expected = CASES[case]
    assert names(model) == expected


def test_a_module_with_a_stack_of_experts_stays_whole() -> None:
    # Values decide what each expert gets: cut apart, every such model was refused.
    def mixture() -> nn.Module:
        return module("Mixture", gate=leaf(), experts=nn.ModuleList([block() for _ in range(4)]))

    def layer() -> nn.Module:
        return module("Layer", norm=leaf(), mlp=mixture())

    model = module("Model", first=mixture(), layers=nn.ModuleList([layer(), layer()]))
    assert names(model) == ["first", "layers.0", "layers.1"]
    assert names(model, split={"first", "first.experts"})[:2] == ["first.gate", "first.experts.0"]


def test_parameters_are_counted_once_and_ties_are_found() -> None:
    embed, head, one, two = nn.Embedding(10, 1), nn.Linear(1, 10), leaf(), leaf()
    head.weight, two.weight = embed.weight, one.weight
    mlp = module("Mlp", a=one, b=two)
    units = units_of(module("Model", embed=embed, layers=nn.ModuleList([mlp]), again=mlp, head=head))
    assert [(unit.name, unit.parameters_bytes, [*unit.shared.values()]) for unit in units] == [
        ("embed", 40, [40]),
        ("layers.0", 16, []),
        ("head", 80, [40]),
    ]
    assert units[0].shared.keys() == units[2].shared.keys()


def test_units_do_not_overlap_and_cover_every_leaf() -> None:
    model = module("Model", embed=leaf(), layers=nn.ModuleList([block(), block()]), pooler=module("Pooler", fc=leaf()))
    found = names(model)
    leaves = [name for name, each in model.named_modules() if not [*each.children()]]
    covering = [
        [name for name in found if leaf_name == name or leaf_name.startswith(f"{name}.")] for leaf_name in leaves
    ]
    assert all(len(each) == 1 for each in covering)


def test_a_block_whose_parts_are_placed_apart_is_cut_into_them() -> None:
    model = module("Model", layers=nn.ModuleList([block(), module("Block", one=leaf(), two=leaf())]))
    assert names(model, split={"layers.1"}) == ["layers.0", "layers.1.one", "layers.1.two"]
