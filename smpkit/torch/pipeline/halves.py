"""Run a backward in two halves: the gradients of inputs, for which other ranks wait, and later those of weights.

A node of the autograd graph is *on the way* if an input can be reached from it. The first half runs only those, and
keeps the gradients that reach the *joints*: nodes on the way from which an edge leads off it, to weights alone. The
second half starts at the joints and follows those edges only. So each gradient is made once, by the same operations on
the same numbers as in one backward::

    loss -> addmm2 -> tanh -> addmm1 -> x        first half: addmm2, tanh, addmm1, each for its input alone
              |                 |
              w2                w1               second half: addmm2 for w2; addmm1 for w1

Weights whose gradients cannot be told apart that way, or would win nothing, are made in the first half: see `_early`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["WeightHalf", "backward_inputs"]

_ACCUMULATE: Final = type(get_gradient_edge(torch.empty(0, device="cpu", requires_grad=True)).node)
_CUSTOM: Final[Any] = BackwardCFunction
"""What nodes of Functions written in Python are."""
_REENTRANT: Final = "CheckpointFunctionBackward"
"""torch.utils.checkpoint's old form refuses a backward towards chosen tensors."""

Root = torch.Tensor | GradientEdge
Gradients = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class _Part:
    """Joints that share weights, which are made together so that each is added to once."""

    joints: tuple[Node, ...]
    weights: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class WeightHalf:
    """What is left of a backward: `run` it once, before the weights' gradients are read."""

    parts: Sequence[_Part]
    arrived: dict[Node, Gradients]

    def run(self) -> None:
        """Add to the gradients of the weights; frees what was kept for them as it goes."""
        for part in self.parts:
            pairs = [
                (GradientEdge(joint, place), gradient)
                for joint in part.joints
                for place, gradient in enumerate(self.arrived.pop(joint, ()))
                if gradient is not None
            ]
            if pairs:
                edges, gradients = zip(*pairs, strict=True)
                torch.autograd.backward(edges, gradients, inputs=part.weights)


def backward_inputs(
    roots: Sequence[Root], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> WeightHalf | None:
    """Run the half of a backward that adds to `inputs`, which are leaves; return the other half.

    None: there is no other half, and everything has run.
    """
    parts, early = _Graph(roots, inputs).parts() if inputs else ((), ())
    if not parts:
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type] # tensors and edges may be mixed
        return None
    arrived: dict[Node, Gradients] = {}
    joints = [joint for part in parts for joint in part.joints]
    # Hooks see what reaches the node: keeping it makes autograd sum further gradients elsewhere, not in place.
    handles = [joint.register_prehook(partial(arrived.__setitem__, joint)) for joint in joints]
    try:
        torch.autograd.backward(roots, gradients, retain_graph=True, inputs=[*inputs, *early])  # type: ignore[arg-type]
    finally:
        for handle in handles:
            handle.remove()
    return WeightHalf(parts, arrived)


class _Graph:
    """The autograd graph below some tensors, and which of its nodes are on the way to inputs."""

    def __init__(self, roots: Sequence[Root], inputs: Sequence[torch.Tensor]) -> None:
        self._roots = [_edge(root).node for root in roots]
        ends = {get_gradient_edge(leaf).node for leaf in inputs}
        self._next: dict[Node, list[Node]] = {}
        self._on_way: set[Node] = set()
        self._below: dict[Node, frozenset[Node]] = {}
        """For nodes off the way, the leaves that they lead to."""
        self._can_split = True
        for node in self._bottom_up():
            self._place(node, ends)

    def parts(self) -> tuple[tuple[_Part, ...], tuple[torch.Tensor, ...]]:
        """Return what the second half does, and the weights whose gradients are made in the first one."""
        if not self._can_split:
            return (), ()
        joints = {node: off for node in self._next if node in self._on_way and (off := self._leaves_off(node))}
        early = self._early(joints)
        parts = []
        for group in _groups({joint: leaves - early for joint, leaves in joints.items()}):
            leaves = {leaf for joint in group for leaf in joints[joint]} - early
            parts.append(_Part(tuple(group), tuple(_variable(leaf) for leaf in leaves)))
        return tuple(parts), tuple(_variable(leaf) for leaf in early)

    def _bottom_up(self) -> Iterator[Node]:
        """Yield every node once, after all that it leads to."""
        stack = [(root, False) for root in self._roots]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                yield node
            elif node not in self._next:
                self._next[node] = [each for each, _ in node.next_functions if each is not None]
                stack.append((node, True))
                stack += [(each, False) for each in self._next[node]]

    def _place(self, node: Node, ends: set[Node]) -> None:
        after = self._next[node]
        self._can_split = self._can_split and type(node).__name__ != _REENTRANT
        if node in ends or any(each in self._on_way for each in after):
            self._on_way.add(node)
        elif type(node) is _ACCUMULATE:
            self._below[node] = frozenset((node,))
        elif len(after) == 1:
            self._below[node] = self._below[after[0]]
        else:
            self._below[node] = frozenset().union(*(self._below[each] for each in after))

    def _leaves_off(self, node: Node) -> frozenset[Node]:
        """Return the leaves that the edges from a node on the way lead to, off the way."""
        off = [self._below[each] for each in self._next[node] if each not in self._on_way]
        return frozenset().union(*off) if off else frozenset()

    def _early(self, joints: dict[Node, frozenset[Node]]) -> frozenset[Node]:
        """Return the leaves whose gradients the first half makes.

        A root off the way is no joint. A custom Function would run twice, with all that it does besides. Biases and
        norms alone are cheap, and would cost a start of the engine. And where one joint of a weight is on the way from
        another one, a backward from the latter to the weight would pass the former again.
        """
        early = {leaf for root in self._roots if root not in self._on_way for leaf in self._below[root]}
        users: defaultdict[Node, list[Node]] = defaultdict(list)
        for joint, leaves in joints.items():
            if isinstance(joint, _CUSTOM) or all(_variable(leaf).dim() < 2 for leaf in leaves):
                early |= leaves
            for leaf in leaves:
                users[leaf].append(joint)
        shared = ((leaf, found) for leaf, found in users.items() if len(found) > 1 and leaf not in early)
        return frozenset(early | {leaf for leaf, found in shared if self._in_a_row(set(found))})

    def _in_a_row(self, joints: set[Node]) -> bool:
        """Return whether one of the joints is on the way from another one."""
        seen: set[Node] = set()
        for joint in joints:
            stack = [each for each in self._next[joint] if each in self._on_way]
            while stack:
                node = stack.pop()
                if node in joints:
                    return True
                if node not in seen:
                    seen.add(node)
                    stack += [each for each in self._next[node] if each in self._on_way]
        return False


def _groups(leaves_of: dict[Node, frozenset[Node]]) -> Iterator[list[Node]]:
    """Yield the joints that share leaves together; those without any are left out."""
    group_of: dict[Node, list[Node]] = {}
    by_leaf: dict[Node, Node] = {}
    for joint, leaves in leaves_of.items():
        group_of[joint] = [joint]
        for leaf in leaves:
            mine, other = group_of[joint], group_of[by_leaf.setdefault(leaf, joint)]
            if mine is not other:
                other += mine
                group_of.update(dict.fromkeys(mine, other))
    unique = {id(group): group for joint, group in group_of.items() if leaves_of[joint]}
    yield from unique.values()


def _edge(root: Root) -> GradientEdge:
    return root if isinstance(root, GradientEdge) else get_gradient_edge(root)


def _variable(leaf: Node) -> torch.Tensor:
    variable = leaf.variable  # type: ignore[attr-defined]
    assert isinstance(variable, torch.Tensor)
    return variable
