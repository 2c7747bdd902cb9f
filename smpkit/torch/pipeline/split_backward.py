"""Split a backward as zero-bubble schedules do: first input gradients, for which other ranks wait, then weights.

Some nodes of the autograd graph *reach an input*. The first half runs only those, and keeps the gradients that arrive
at the *boundary* nodes: nodes that reach an input, with an edge to a node that reaches weights alone. The second half
starts at the boundary nodes and follows those edges only. So each gradient is made once, by the same operations on
the same numbers as in one backward::

    loss -> addmm2 -> tanh -> addmm1 -> x        first half: addmm2, tanh, addmm1, each for its input alone
              |                 |
              w2                w1               second half: addmm2 for w2; addmm1 for w1

Gradients of weights that cannot be separated that way, or would gain nothing, are made in the first half: see
`_first_half_leaves`.

Some segments must not be split. Tensors that are saved for backward under hooks are computed again (activation
checkpointing) or fetched (offloading) in each half; a hook on an activation would run in both, and `retain_grad` would
add up both. The graph does not show any of this, so `watching` notices it while the forward runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

__all__ = ["WeightBackward", "backward_inputs", "watching"]

_WATCHED: Final[tuple[tuple[type, str, int], ...]] = (
    (saved_tensors_hooks, "__enter__", 1),
    (saved_tensors_hooks, "__exit__", -1),
    (torch.Tensor, "register_hook", 0),
    (torch.Tensor, "retain_grad", 0),
)
"""The calls that `watching` notices, and by how much each changes the number of enclosing hooks on saved tensors."""

_ACCUMULATE: Final = type(get_gradient_edge(torch.empty(0, device="cpu", requires_grad=True)).node)
_CUSTOM: Final[Any] = BackwardCFunction
"""The base class of the nodes of Functions written in Python."""
_REENTRANT: Final = "CheckpointFunctionBackward"
"""torch.utils.checkpoint(use_reentrant=True) raises in a backward with `inputs`."""

_NO_LEAVES: Final[frozenset[Node]] = frozenset()

Root = torch.Tensor | GradientEdge
Gradients = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class _WeightGroup:
    """Boundary nodes that share weights: they run together, so that each weight is accumulated once."""

    boundaries: tuple[Node, ...]
    weights: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class WeightBackward:
    """The second half of a backward: `run` it once, before the weights' gradients are read."""

    groups: Sequence[_WeightGroup]
    boundary_gradients: dict[Node, Gradients]

    def run(self) -> None:
        """Add to the gradients of the weights, and free the gradients kept for them group by group."""
        for group in self.groups:
            pairs = [
                (GradientEdge(boundary, output_nr), gradient)
                for boundary in group.boundaries
                for output_nr, gradient in enumerate(self.boundary_gradients.pop(boundary, ()))
                if gradient is not None
            ]
            if pairs:
                edges, gradients = zip(*pairs, strict=True)
                torch.autograd.backward(edges, gradients, inputs=group.weights)


def backward_inputs(
    roots: Sequence[Root], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> WeightBackward | None:
    """Run the half of a backward that adds to `inputs`, which are leaves; return the other half.

    Returns None where nothing can be split: then the whole backward has run.
    """
    groups, first_half = _groups_of(roots, inputs) if inputs else ((), ())
    if not groups:
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type] # tensors and edges may be mixed
        return None
    boundary_gradients: dict[Node, Gradients] = {}
    boundaries = [boundary for group in groups for boundary in group.boundaries]
    # A prehook sees the node's summed gradient; keeping a reference makes autograd sum out of place.
    handles = [boundary.register_prehook(partial(boundary_gradients.__setitem__, boundary)) for boundary in boundaries]
    try:
        torch.autograd.backward(roots, gradients, retain_graph=True, inputs=[*inputs, *first_half])  # type: ignore[arg-type]
    finally:
        for handle in handles:
            handle.remove()
    return WeightBackward(groups, boundary_gradients)


def _groups_of(roots: Sequence[Root], inputs: Sequence[torch.Tensor]) -> tuple[list[_WeightGroup], list[torch.Tensor]]:
    """Return the groups of the second half, and the weights whose gradients the first half makes."""
    graph = _Graph([_edge(root).node for root in roots], {get_gradient_edge(leaf).node for leaf in inputs})
    if not graph.can_split:
        return [], []
    first_half = graph.first_half_leaves()
    # From the roots on, as in one backward: gradients are reduced in that order.
    late = {node: graph.boundaries[node] - first_half for node in reversed(graph.boundaries)}
    groups = [
        _WeightGroup(tuple(group), tuple(graph.weights(_NO_LEAVES.union(*[late[node] for node in group]))))
        for group in _groups(late)
    ]
    return groups, graph.weights(first_half)


class _Graph:
    """The autograd graph below some roots.

    Args:
        inputs: the nodes of inputs.
    """

    def __init__(self, roots: Sequence[Node], inputs: Collection[Node]) -> None:
        self._roots = roots
        self._leaves: dict[Node, int] = {}
        """Their numbers, in an order that is the same in every run."""
        self._leaves_below: dict[Node, frozenset[Node]] = {}
        """For nodes that reach no input, the leaves that they lead to."""
        self.boundaries: dict[Node, frozenset[Node]] = {}
        """For nodes that reach an input, the leaves that they lead to by edges that reach none, if there are any."""
        self.can_split = True
        for node, after in _post_order(roots):
            kind = type(node)
            if kind is _ACCUMULATE:
                if node not in inputs:
                    self._leaves[node], self._leaves_below[node] = len(self._leaves), frozenset((node,))
                continue
            if kind.__name__ == _REENTRANT:
                self.can_split = False
            below = [self._leaves_below[each] for each in after if each in self._leaves_below]
            leaves = below[0] if len(below) == 1 else _NO_LEAVES.union(*below)
            if len(below) == len(after):
                self._leaves_below[node] = leaves
            elif leaves:
                self.boundaries[node] = leaves

    def weights(self, leaves: Collection[Node]) -> list[torch.Tensor]:
        """Return the weights of some leaves, in an order that is the same in every run."""
        return [_variable(leaf) for leaf in sorted(leaves, key=self._leaves.__getitem__)]

    def first_half_leaves(self) -> frozenset[Node]:
        """Return the leaves whose gradients the first half makes."""
        # A root that reaches no input is not a boundary node: nothing of it runs in the first half otherwise.
        first_half = {leaf for root in self._roots for leaf in self._leaves_below.get(root, ())}
        users: defaultdict[Node, set[Node]] = defaultdict(set)
        for boundary, leaves in self.boundaries.items():
            # A custom Function would run twice, with its side effects. Biases and norms alone are cheaper than another
            # start of the engine.
            if isinstance(boundary, _CUSTOM) or all(_variable(leaf).dim() < 2 for leaf in leaves):
                first_half |= leaves
            for leaf in leaves:
                users[leaf].add(boundary)
        # Where one boundary node of a weight leads to another, a backward from the former to the weight would run the
        # latter again.
        shared = [leaf for leaf, found in users.items() if len(found) > 1 and leaf not in first_half]
        return frozenset(first_half.union(leaf for leaf in shared if self._are_chained(users[leaf])))

    def _are_chained(self, boundaries: set[Node]) -> bool:
        """Return whether one of the boundary nodes leads to another."""
        starts = [node for boundary in boundaries for node, _ in boundary.next_functions if node is not None]
        return any(node in boundaries for node, _ in _post_order(starts, self._leaves_below))


def _post_order(roots: Sequence[Node], without: Collection[Node] = ()) -> Iterator[tuple[Node, list[Node]]]:
    """Yield every node once, after all that it leads to, with these; in a loop: graphs are deeper than Python's stack.

    Args:
        without: nodes to leave out.
    """
    stack: list[tuple[Node, list[Node] | None]] = [(root, None) for root in roots]
    seen: set[Node] = set(without)
    while stack:
        node, after = stack.pop()
        if after is not None:
            yield node, after
        elif node not in seen:
            seen.add(node)
            after = [each for each, _ in node.next_functions if each is not None]
            stack.append((node, after))
            stack += [(each, None) for each in after]


def _groups(leaves_of: dict[Node, frozenset[Node]]) -> Iterator[list[Node]]:
    """Yield groups of boundary nodes that share leaves (union-find); nodes without leaves are in none."""
    group_of: dict[Node, list[Node]] = {}
    by_leaf: dict[Node, Node] = {}
    for boundary, leaves in leaves_of.items():
        group_of[boundary] = [boundary]
        for leaf in leaves:
            mine, other = group_of[boundary], group_of[by_leaf.setdefault(leaf, boundary)]
            if mine is not other:
                other += mine
                group_of.update(dict.fromkeys(mine, other))
    unique = {id(group): group for boundary, group in group_of.items() if leaves_of[boundary]}
    yield from unique.values()


def _edge(root: Root) -> GradientEdge:
    return root if isinstance(root, GradientEdge) else get_gradient_edge(root)


def _variable(leaf: Node) -> torch.Tensor:
    variable = leaf.variable  # type: ignore[attr-defined]
    assert isinstance(variable, torch.Tensor)
    return variable


@contextlib.contextmanager
def watching(note: Callable[[int], object]) -> Iterator[None]:
    """Call `note` where code inside uses hooks: 1 and -1 around those on saved tensors, 0 for one on an activation."""
    with contextlib.ExitStack() as stack:
        for owner, name, change in _WATCHED:
            stack.enter_context(_replaced(owner, name, _noted(getattr(owner, name), note, change)))
        yield


def _noted(plain: Callable[..., Any], note: Callable[[int], object], change: int) -> Callable[..., Any]:
    @functools.wraps(plain)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(change)
        return plain(self, *args, **kwargs)

    return noted


@contextlib.contextmanager
def _replaced(owner: type, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Replace a method, and afterwards restore it, or delete the override of an inherited one."""
    inherited = name not in vars(owner)
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, old)
