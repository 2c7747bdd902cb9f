from __future__ import annotations

import pytest

from smpkit.plan.partition.units import Node, cut_into_units


def leaf(name: str, kind: str = "Linear", **parameters: int) -> Node:
    return Node(name, kind, parameters=parameters)


def module(name: str, kind: str, *children: Node, **parameters: int) -> Node:
    return Node(name, kind, children=children, parameters=parameters)


def stack(name: str, *children: Node, kind: str = "ModuleList") -> Node:
    return Node(name, kind, is_stack=True, children=children)


def block(name: str, kind: str = "Block", size: int = 8) -> Node:
    weight = Node(f"{name}.fc", "Linear", parameters={f"{name}.fc.weight": size})
    return module(name, kind, weight, leaf(f"{name}.act", "GELU"))


def names(model: Node, *split: str) -> list[str]:
    return [unit.name for unit in cut_into_units(model, {*split})]


def test_a_transformer_is_cut_into_leaves_and_blocks() -> None:
    inner = module(
        "model",
        "Model",
        leaf("model.embed"),
        stack("model.layers", block("model.layers.0"), block("model.layers.1")),
        leaf("model.norm"),
    )
    model = module("", "ForCausalLM", inner, leaf("head"))
    assert names(model) == ["model.embed", "model.layers.0", "model.layers.1", "model.norm", "head"]


SMALL = stack("layers.0.mlp", leaf("layers.0.mlp.0"), leaf("layers.0.mlp.1"), kind="Sequential")
PARTS = stack("block.0.layer", block("block.0.layer.0", "SelfAttention"), block("block.0.layer.1", "FeedForward"))
BLOCKS = stack("stages.0.blocks", block("stages.0.blocks.0"), block("stages.0.blocks.1"))
ATTENTION = module("attention", "MultiheadAttention", leaf("attention.out_proj"), in_proj_weight=12)
CASES: dict[str, tuple[Node, list[str]]] = {
    "a small Sequential in a block": (
        module("", "Model", stack("layers", module("layers.0", "Block", SMALL))),
        ["layers.0"],
    ),
    "a list of different parts in a block": (
        module("", "T5Stack", stack("block", module("block.0", "T5Block", PARTS))),
        ["block.0"],
    ),
    "a stack of blocks in a stage": (
        module("", "Swin", stack("stages", module("stages.0", "Stage", BLOCKS, leaf("stages.0.downsample")))),
        ["stages.0.blocks.0", "stages.0.blocks.1", "stages.0.downsample"],
    ),
    "a Sequential": (stack("", leaf("0"), leaf("1", "ReLU"), block("2"), kind="Sequential"), ["0", "1", "2"]),
    "a Sequential in a Sequential": (
        stack("", stack("0", leaf("0.0"), leaf("0.1"), kind="Sequential"), leaf("1"), kind="Sequential"),
        ["0.0", "0.1", "1"],
    ),
    "weights of children that are read": (module("", "Model", ATTENTION, leaf("head")), ["attention", "head"]),
    "parameters of the model": (module("", "Model", leaf("one"), leaf("two"), scale=4), ["one", "two"]),
    "blocks within and beside a stack": (
        module("", "Model", leaf("embed"), stack("layers", block("layers.0"), block("layers.1")), block("pooler")),
        ["embed", "layers.0", "layers.1", "pooler.fc", "pooler.act"],
    ),
    "a single leaf": (leaf(""), [""]),
    "an empty list": (module("", "Model", stack("layers"), leaf("head")), ["head"]),
}


@pytest.mark.parametrize("case", CASES)
def test_models_are_cut_where_parts_can_lie_apart(case: str) -> None:
    model, expected = CASES[case]
    assert names(model) == expected


def test_a_module_with_a_stack_of_experts_stays_whole() -> None:
    # Values decide what each expert gets: cut apart, every such model was refused.
    def mixture(name: str) -> Node:
        experts = stack(f"{name}.experts", *[block(f"{name}.experts.{number}") for number in range(4)])
        return module(name, "Mixture", leaf(f"{name}.gate", gate=8), experts)

    def layer(name: str) -> Node:
        return module(name, "Layer", leaf(f"{name}.norm", norm=8), mixture(f"{name}.mlp"))

    model = module("", "Model", mixture("first"), stack("layers", layer("layers.0"), layer("layers.1")))
    assert names(model) == ["first", "layers.0", "layers.1"]
    assert names(model, "first", "first.experts")[:2] == ["first.gate", "first.experts.0"]


def test_parameters_are_counted_once_and_ties_are_found() -> None:
    embed, head = leaf("embed", "Embedding", wte=40), leaf("head", wte=40, bias=2)
    twice = module("mlp", "Mlp", leaf("mlp.a", w=6), leaf("mlp.b", w=6))
    units = cut_into_units(module("", "Model", embed, stack("layers", twice), head), ())
    assert [(unit.name, unit.parameters_bytes, dict(unit.shared)) for unit in units] == [
        ("embed", 40, {"wte": 40}),
        ("mlp", 6, {}),
        ("head", 42, {"wte": 40}),
    ]


def test_a_block_whose_parts_are_placed_apart_is_cut_into_them() -> None:
    model = module("", "Model", stack("layers", block("layers.0"), block("layers.1")))
    assert names(model, "layers.0") == ["layers.0.fc", "layers.0.act", "layers.1"]
