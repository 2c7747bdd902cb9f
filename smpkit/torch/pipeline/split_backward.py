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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

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

    Returns None where the backward cannot be split and has run as a whole.
    """
    groups, first_half = _split(roots, inputs) if inputs else ((), ())
    if not groups:
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type] # tensors and edges may be mixed
        return None
    boundary_gradients: dict[Node, Gradients] = {}
    boundaries = [boundary for group in groups for boundary in group.boundaries]
    # A prehook sees the node's summed gradient; keeping a reference makes autograd sum out of place.
    keep = boundary_gradients.__setitem__
    handles = [node.register_prehook(functools.partial(keep, node)) for node in boundaries]
    try:
        torch.autograd.backward(roots, gradients, retain_graph=True, inputs=[*inputs, *first_half])  # type: ignore[arg-type]
    finally:
        for handle in handles:
            handle.remove()
    return WeightBackward(groups, boundary_gradients)


class _NodeShape(NamedTuple):
    """What decides how a graph splits at a node."""

    kind: type
    num_dims: int
    """Of the variable of a leaf; -1 for other nodes."""
    after: tuple[int, ...]
    """The numbers of the nodes that it leads to."""


def _split(roots: Sequence[Root], inputs: Sequence[torch.Tensor]) -> tuple[list[_WeightGroup], list[torch.Tensor]]:
    """Return the groups of the second half, and the weights whose gradients the first half makes."""
    edges = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
    nodes = list(dict.fromkeys(edge.node for edge in edges))
    num_roots, numbers, shape = len(nodes), {node: number for number, node in enumerate(nodes)}, []
    for node in nodes:  # the loop appends to them: breadth first
        kind, after = type(node), []
        for successor, _ in node.next_functions:
            if successor is not None:
                number = numbers.setdefault(successor, len(nodes))
                if number == len(nodes):
                    nodes.append(successor)
                after.append(number)
        shape.append(_NodeShape(kind, _variable(node).dim() if kind is _ACCUMULATE else -1, tuple(after)))
    ends = frozenset([numbers[node] for leaf in inputs if (node := get_gradient_edge(leaf).node) in numbers])
    groups, first_half = _split_shape(tuple(shape), num_roots, ends)
    weight_groups = [
        _WeightGroup(tuple([nodes[name] for name in boundaries]), tuple([_variable(nodes[name]) for name in leaves]))
        for boundaries, leaves in groups
    ]
    return weight_groups, [_variable(nodes[name]) for name in first_half]


@functools.lru_cache(maxsize=256)
def _split_shape(
    shape: tuple[_NodeShape, ...], num_roots: int, inputs: frozenset[int]
) -> tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], tuple[int, ...]]:
    """Return the groups of a graph, each as boundary nodes and leaves, and the leaves of the first half.

    Cached: microbatches of a kind have graphs of one shape.

    Args:
        shape: that of each node, by its number; the first `num_roots` are roots.
        inputs: the numbers of the nodes of inputs.
    """
    if any(node.kind.__name__ == _REENTRANT for node in shape):
        return (), ()
    reaches_input, leaves_below = _classified(shape, inputs)
    boundaries: dict[int, frozenset[int]] = {}
    for node in sorted(reaches_input):
        off_path = [leaves_below[successor] for successor in shape[node].after if successor not in reaches_input]
        if leaves := frozenset[int]().union(*off_path):
            boundaries[node] = leaves
    # A root that reaches no input is no boundary node, and would run in neither half: the first takes its leaves.
    first_half = {leaf for root in range(num_roots) if root not in reaches_input for leaf in leaves_below[root]}
    users: defaultdict[int, set[int]] = defaultdict(set)
    for boundary, leaves in boundaries.items():
        # A custom Function would run twice, with its side effects. Biases and norms alone are cheaper than another
        # start of the engine.
        if issubclass(shape[boundary].kind, _CUSTOM) or all(shape[leaf].num_dims < 2 for leaf in leaves):
            first_half |= leaves
        for leaf in leaves:
            users[leaf].add(boundary)
    # Where one boundary node of a weight leads to another, a backward from the former to the weight would run the
    # latter again.
    shared = [(leaf, nodes) for leaf, nodes in users.items() if len(nodes) > 1 and leaf not in first_half]
    first_half |= {leaf for leaf, nodes in shared if _are_chained(shape, nodes, reaches_input)}
    groups = []
    for group in _group_by_leaves({boundary: leaves - first_half for boundary, leaves in boundaries.items()}):
        late = {leaf for boundary in group for leaf in boundaries[boundary]} - first_half
        groups.append((tuple(group), tuple(sorted(late))))
    return tuple(groups), tuple(sorted(first_half))


def _classified(shape: Sequence[_NodeShape], inputs: frozenset[int]) -> tuple[set[int], dict[int, frozenset[int]]]:
    """Return the nodes that reach an input, and of all others the leaves that they lead to."""
    reaches_input: set[int] = set()
    leaves_below: dict[int, frozenset[int]] = {}
    for node in TopologicalSorter({node: after for node, (_, _, after) in enumerate(shape)}).static_order():
        kind, _, after = shape[node]
        if node in inputs or any(successor in reaches_input for successor in after):
            reaches_input.add(node)
        elif kind is _ACCUMULATE:
            leaves_below[node] = frozenset((node,))
        elif len(after) == 1:
            leaves_below[node] = leaves_below[after[0]]
        else:
            leaves_below[node] = frozenset[int]().union(*(leaves_below[successor] for successor in after))
    return reaches_input, leaves_below


def _are_chained(shape: Sequence[_NodeShape], boundaries: set[int], reaches_input: set[int]) -> bool:
    """Return whether one of the boundary nodes leads to another."""
    seen: set[int] = set()
    stack = [successor for boundary in boundaries for successor in shape[boundary].after]
    while stack:
        node = stack.pop()
        if node in boundaries:
            return True
        if node in reaches_input and node not in seen:
            seen.add(node)
            stack += shape[node].after
    return False


def _group_by_leaves(leaves_of: dict[int, frozenset[int]]) -> Iterator[list[int]]:
    """Yield groups of boundary nodes that share leaves (union-find); nodes without leaves are in none."""
    group_of: dict[int, list[int]] = {}
    by_leaf: dict[int, int] = {}
    for boundary, leaves in leaves_of.items():
        group_of[boundary] = [boundary]
        for leaf in leaves:
            mine, other = group_of[boundary], group_of[by_leaf.setdefault(leaf, boundary)]
            if mine is not other:
                other += mine
                group_of.update(dict.fromkeys(mine, other))
    unique = {id(group): group for boundary, group in group_of.items() if leaves_of[boundary]}
    yield from unique.values()


def _variable(leaf: Node) -> torch.Tensor:
    variable = leaf.variable  # type: ignore[attr-defined]
    assert isinstance(variable, torch.Tensor)
    return variable


@contextlib.contextmanager
def watching(note: Callable[[int], object]) -> Iterator[None]:
    """Call `note` where code inside uses hooks: 1 and -1 around those on saved tensors, 0 for one on an activation."""
    with contextlib.ExitStack() as stack:
        for owner, name, change in _WATCHED:
            plain = getattr(owner, name)
            stack.callback(setattr, owner, name, plain)
            setattr(owner, name, _noted(plain, note, change))
        yield


def _noted(plain: Callable[..., Any], note: Callable[[int], object], change: int) -> Callable[..., Any]:
    @functools.wraps(plain)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(change)
        return plain(self, *args, **kwargs)

    return noted
