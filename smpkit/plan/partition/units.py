"""Cut a module tree into units: the smallest subtrees that we are willing to place on a pipeline rank.

A unit runs whole on one rank, at native speed. A module that is no unit *spans*: its own `forward` runs on every rank
and calls units on several. Units depend on the model alone, never on the number of ranks, because random streams and
checkpoints are keyed by them::

    model            spans                      encoder           stack of stages   spans
    ├── embed        unit (a leaf)              ├── 0             spans: it holds a stack of blocks
    ├── layers       stack, spans               │   └── blocks    stack, spans
    │   ├── 0        unit (child of a stack)    │       ├── 0     unit
    │   └── 1        unit                       │       └── 1     unit
    └── head         unit (a leaf)              └── 1 ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from smpkit.plan.partition.assignment import UnitCost


@dataclass(frozen=True)
class Node:
    """A module as the planner sees it; one that appears twice in a model is listed once, where it is first."""

    name: str
    """Full name, as in `named_modules`; empty for the model."""
    kind: str
    """Name of its class: blocks of one class make a stack worth cutting."""
    is_stack: bool = False
    """Whether it is a `Sequential`, `ModuleList` or `ModuleDict`, so that its children may be placed apart."""
    children: tuple[Node, ...] = ()
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the parameters (and buffers) of its own, not of its children, by a key that is equal for tied ones."""

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


def cut_into_units(model: Node, split: Collection[str]) -> list[UnitCost]:
    """Return the units of a model in the order of definition; what they cost beside memory is not known yet.

    From the top down, each of these is a unit:

    - a leaf;
    - a child of a stack, unless it holds a stack of blocks itself: a stack with two children of one class that have
      children of their own;
    - a module with parameters of its own and no stack below, such as `MultiheadAttention`, which reads its children's
      weights instead of calling them; but not the model itself;
    - a module with a stack of experts, for which values decide what each gets: only one rank can follow that. Such a
      stack is known by its name (`experts`), and is none of blocks.

    Args:
        split: names of modules that are cut in any case, because parts of them were placed apart by hand.
    """
    nodes = list(_cut(model, in_stack=False, split=split))
    holders = Counter(key for node in nodes for key in _parameters(node))
    return [_unit(node, holders) for node in nodes]


def _cut(node: Node, in_stack: bool, split: Collection[str]) -> Iterator[Node]:
    """Yield the units of a subtree."""
    if node.name not in split and _is_unit(node, in_stack):
        yield node
        return
    for child in node.children:
        yield from _cut(child, node.is_stack or node.name in split, split)


def _is_unit(node: Node, in_stack: bool) -> bool:
    if not node.children:
        return not node.is_stack
    if node.is_stack:
        return False
    if node.name and any(_is_stack_of_experts(child) for child in node.children):
        return True
    if in_stack:
        return not any(_is_stack_of_blocks(below) for below in node.walk())
    # The model itself is never one (its name is empty): there would be nothing left to place.
    return bool(node.name and node.parameters) and not any(below.is_stack for below in node.walk())


def _is_stack_of_blocks(node: Node) -> bool:
    blocks = Counter(child.kind for child in node.children if child.children)
    return node.is_stack and any(count > 1 for count in blocks.values()) and not _is_stack_of_experts(node)


def _is_stack_of_experts(node: Node) -> bool:
    return node.is_stack and "expert" in node.name.rpartition(".")[2].lower()


def _parameters(node: Node) -> dict[str, int]:
    return {key: num_bytes for below in node.walk() for key, num_bytes in below.parameters.items()}


def _unit(node: Node, holders: Mapping[str, int]) -> UnitCost:
    parameters = _parameters(node)
    shared = {key: num_bytes for key, num_bytes in parameters.items() if holders[key] > 1}
    return UnitCost(node.name, sum(parameters.values()), shared=shared)
