"""One microbatch on its way through the step: what it computes here, what it sends, receives and leaves for backward.

All ranks run the same code on the same microbatch, so all see the same calls and moves in the same order and give them
the same numbers. What differs is who holds data: the home of a call runs it, everyone else makes ghosts.

[Note: segments] A rank's work for one microbatch is cut where it receives after it has sent: what it then receives may
depend on what it sent, so it may have to wait, and its backward runs in as many parts. A value made in one segment and
used in a later one is cut off its graph there (a detached leaf whose gradient becomes a root of the segment that made
it), so no graph is walked twice and no autograd node ever waits for another rank.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.containers import children, rebuild
from smpkit.torch.pipeline.located import Located
from smpkit.torch.pipeline.specs import Call, TensorSpec, map_tensors, signature, spec_of, template_of

if TYPE_CHECKING:
    from smpkit.torch.pipeline.stage import Stage

__all__ = ["Microbatch", "Move"]

_DYNAMIC: Final = frozenset(
    {torch.Tensor.__bool__, torch.Tensor.__index__, torch.Tensor.__int__, torch.Tensor.__contains__, torch.equal}
)
"""Questions whose answer is most often a branch, so that another microbatch may take another path."""


@dataclass(frozen=True)
class Move:
    """A value that one rank sends to another, once; `number` counts the moves of a microbatch, alike on all ranks."""

    number: int
    source: int
    target: int
    source_segment: int
    target_segment: int
    spec: TensorSpec


class Microbatch:
    """The run of a step function for one microbatch on this rank.

    Args:
        stage: what this rank is and holds.
        index: which microbatch of the step.
    """

    def __init__(self, stage: Stage, index: int) -> None:
        self.stage = stage
        self.index = index
        self.moves: list[Move] = []
        self.path: list[str] = []
        """The names of all calls in order: the same on every rank, or the ranks run different programs."""
        self.dynamic = False
        """Whether Python asked for a value that a branch may hang on."""
        self.has_backward = False
        self.before_wait: Callable[[], None] | None = None
        """Called where a new segment begins: lets other work of this rank go first."""
        self._segments = [0] * stage.size
        self._sent = [False] * stage.size
        self._losses: defaultdict[int, list[tuple[torch.Tensor, torch.Tensor | None]]] = defaultdict(list)
        self._departures: defaultdict[int, list[tuple[torch.Tensor, Move]]] = defaultdict(list)
        self._arrivals: defaultdict[int, list[tuple[torch.Tensor, Move]]] = defaultdict(list)
        self._cuts: defaultdict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        self._cut_leaves: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.backward_done: set[int] = set()
        """Segments whose backward has run."""

    @property
    def num_segments(self) -> tuple[int, ...]:
        """How many segments each rank has had so far."""
        return tuple(segment + 1 for segment in self._segments)

    @property
    def _segment(self) -> int:
        return self._segments[self.stage.rank]

    # --- calls ---------------------------------------------------------------------------------------------------

    def operate(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one torch operation where its data is."""
        target = args[0] if args and _changes_in_place(func, name) else None
        if target is not None and not isinstance(target, Located):
            raise UsageError(
                f"`{name}` changes a tensor that every rank holds by a value that only one pipeline rank holds",
                hint="write `x = x + y` instead of `x += y`",
            )
        home = target.home if target is not None else self._home_of((args, kwargs))
        result = self.run_at(home, func, name, func, args, kwargs)
        return result if target is None else self._changed(target, result)

    def run_at(
        self,
        home: int,
        target: Any,
        name: str,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        modes: Any = (),
        *,
        stream: bool | None = None,
    ) -> Any:
        """Run `function` on rank `home` and make ghosts of its result everywhere else.

        Args:
            target: what the cache knows the call by.
            name: the module or operation, for messages and for its stream of random numbers.
            modes: what else decides the result, such as a module's `training`.
            stream: whether its stream of random numbers is a closed one; None if it has none of its own.
        """
        stage = self.stage
        args, kwargs = map_tensors(lambda tensor: self._bring(tensor, home), (args, kwargs))
        call = Call(target, (*_modes(stage.device), *modes), signature((args, kwargs)))
        self.path.append(name)
        if home != stage.rank:
            if stream is not None:
                stage.random.skip()
            template = stage.specs.get(call)
            if template is None:
                template = stage.transport.receive_object(home, f"the first result of `{name}`")
                stage.specs[call] = template
            return _ghosts(template, stage.device, home)
        args, kwargs = map_tensors(self._real, (args, kwargs))
        with contextlib.nullcontext() if stream is None else stage.random.stream(name, closed=stream):
            output = function(*args, **kwargs)
        self._announce(call, name, output)
        segment = self._segment
        return map_tensors(lambda tensor: Located(spec_of(tensor), stage.device, home, tensor, segment), output)

    def value_for_python(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give every rank the value, because Python needs it (`.item()`, `if tensor:`)."""
        self.dynamic = self.dynamic or func in _DYNAMIC
        self.stage.count_python_value(func)
        args, kwargs = map_tensors(self._everywhere, (args, kwargs))
        return func(*args, **kwargs)

    def backward(self, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], scale: float = 1.0) -> None:
        """Note where backward starts, and with which gradients times `scale`; the schedule decides when it runs."""
        self.has_backward = True
        for root, grad in zip(roots, grads, strict=True):
            # A loss that no unit took part in is known to all ranks; it must count once.
            home = root.home if isinstance(root, Located) else 0
            self._bring(root, home)
            start = None if grad is None else self._bring(grad, home)
            if home == self.stage.rank:
                value = self._real(root)
                self._losses[self._segment].append((value, _start(value, start, scale, self._real)))

    def _announce(self, call: Call, name: str, output: Any) -> None:
        """Tell the other ranks, once per kind of call, what it returns; afterwards hold it to that."""
        template = template_of(output)
        known = self.stage.specs.get(call)
        if known is None:
            self.stage.specs[call] = template
            self.stage.transport.broadcast_object(template)
        elif known != template and not _same(known, template):
            raise UsageError(
                f"`{name}` returned {_difference(known, template)} for arguments of the same shapes",
                hint="shapes that depend on values cannot cross pipeline ranks; put the code that makes and the code"
                " that uses them into one torch.nn.Module, which is placed as a whole",
            )

    def _home_of(self, arguments: Any) -> int:
        """Return where an operation runs: with its parameter, else where most bytes are, and then on the later rank."""
        weights: dict[int, int] = {}
        owner: list[int] = []

        def weigh(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, Located):
                weights[tensor.home] = weights.get(tensor.home, 0) + spec_of(tensor).num_bytes
            elif isinstance(tensor, nn.Parameter) and (home := self.stage.owner_of(tensor)) is not None:
                owner.append(home)
            return tensor

        map_tensors(weigh, arguments)
        return owner[0] if owner else max(weights, key=lambda home: (weights[home], home))

    def _changed(self, target: Located, result: Any) -> Any:
        """Bring the ghost up to date with a change in place, and forget copies of what it was."""
        target.copies.clear()
        if isinstance(result, Located):
            target.value = result.value
            target.segment = result.segment
            with torch._C.DisableTorchFunctionSubclass():
                target.requires_grad_(result.requires_grad)
            return target
        return result

    # --- moves ---------------------------------------------------------------------------------------------------

    def _bring(self, tensor: torch.Tensor, home: int) -> torch.Tensor:
        """Return the value as rank `home` has it, moving it there the first time."""
        if not isinstance(tensor, Located):
            return tensor
        _refuse_foreign_graph(tensor)
        if tensor.home == home:
            return tensor
        copy = tensor.copies.get(home)
        if copy is None:
            copy = tensor.copies[home] = self._move(tensor, home, spec_of(tensor))
        return copy

    def _everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the data of a value on every rank, without its graph."""
        if not isinstance(tensor, Located):
            return tensor
        spec = spec_of(tensor)
        spec = TensorSpec(spec.shape, spec.stride, spec.dtype, requires_grad=False)
        copies = [self._move(tensor, rank, spec) for rank in range(self.stage.size) if rank != tensor.home]
        mine = tensor if tensor.home == self.stage.rank else next(c for c in copies if c.home == self.stage.rank)
        return self._real(mine).detach()

    def _move(self, tensor: Located, target: int, spec: TensorSpec) -> Located:
        stage, source = self.stage, tensor.home
        begins = self._sent[target]
        if begins:
            self._segments[target] += 1
            self._sent[target] = False
        self._sent[source] = True
        number = len(self.moves)
        move = Move(number, source, target, self._segments[source], self._segments[target], spec)
        self.moves.append(move)
        value = None
        if source == stage.rank:
            sent = self._real(tensor)
            stage.transport.send(sent.detach(), self.index, move)
            if spec.requires_grad:
                self._departures[self._segment].append((sent, move))
        elif target == stage.rank:
            if begins and self.before_wait is not None:
                self.before_wait()
            value = stage.transport.receive(self.index, move)
            if spec.requires_grad:
                leaf = value.requires_grad_()
                self._arrivals[self._segment].append((leaf, move))
                value = leaf.view_as(leaf)  # a leaf must not be changed in place, and modules change their inputs
        return Located(spec, stage.device, target, value, self._segments[target])

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the data of a value whose home this is, cut off its graph if that belongs to an earlier segment."""
        if not isinstance(tensor, Located):
            outside = self._segment > 0 and tensor.requires_grad and not tensor.is_leaf
            return self._cut(tensor, 0) if outside else tensor
        assert tensor.value is not None, f"{tensor!r} has no data on pp_rank {self.stage.rank}"
        made_earlier = tensor.segment != self._segment and tensor.value.requires_grad
        return self._cut(tensor.value, tensor.segment) if made_earlier else tensor.value

    def _cut(self, source: torch.Tensor, segment: int) -> torch.Tensor:
        key = (id(source), self._segment)
        if key not in self._cut_leaves:
            leaf = source.detach().requires_grad_()
            self._cut_leaves[key] = (source, leaf)  # holds the source, so that its id is not given away
            self._cuts[segment].append((source, leaf))
        leaf = self._cut_leaves[key][1]
        return leaf.view_as(leaf)

    # --- backward ------------------------------------------------------------------------------------------------

    def backward_segment(self, segment: int) -> None:
        """Run backward through one segment: receive the gradients of what left it, send those of what came in."""
        self.backward_done.add(segment)
        roots = self._losses.pop(segment, [])
        for sent, move in self._departures.pop(segment, ()):
            roots.append((sent, self.stage.transport.receive_gradient(self.index, move)))
        roots += [(source, leaf.grad) for source, leaf in self._cuts.pop(segment, ()) if leaf.grad is not None]
        roots = [(root, grad) for root, grad in roots if root.requires_grad]
        if roots:
            torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])
        for leaf, move in self._arrivals.pop(segment, ()):
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            self.stage.transport.send_gradient(gradient, self.index, move)

    def release(self) -> None:
        """Let go of everything that is kept for backward."""
        for kept in (self._losses, self._departures, self._arrivals, self._cuts):
            kept.clear()
        self._cut_leaves.clear()


def _start(
    root: torch.Tensor, grad: torch.Tensor | None, scale: float, real: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    """Return the gradient that backward starts with; None leaves it to torch, which knows what is wrong with it."""
    if grad is None:
        return None if scale == 1.0 or root.numel() != 1 else torch.full_like(root, scale)
    return real(grad) * scale


def _refuse_foreign_graph(tensor: Located) -> None:
    """Raise if torch has put a graph of its own on a ghost: its backward would end there, and nobody would notice."""
    with torch._C.DisableTorchFunctionSubclass():
        grad_fn = tensor.grad_fn
    if grad_fn is not None:
        raise UsageError(
            f"`{grad_fn.name().removesuffix('Backward')}`, a custom autograd.Function, was applied to a value that"
            " another pipeline rank may hold",
            hint="put the code that calls it into a torch.nn.Module, which is placed as a whole",
        )


def _changes_in_place(func: Callable[..., Any], name: str) -> bool:
    return func is torch.Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__"))


def _modes(device: torch.device) -> tuple[Any, ...]:
    enabled = torch.is_autocast_enabled(device.type)
    return torch.is_grad_enabled(), torch.get_autocast_dtype(device.type) if enabled else None


def _ghosts(template: Any, device: torch.device, home: int) -> Any:
    if type(template) is TensorSpec:
        return Located(template, device, home)
    if type(template) is tuple:
        return tuple([_ghosts(part, device, home) for part in template])
    inside = children(template)
    if inside is None:
        return template
    return rebuild(template, {key: _ghosts(part, device, home) for key, part in inside.items()})


def _same(left: Any, right: Any) -> bool:
    """Compare templates by their tensors; other leaves are the user's objects, which may have no equality."""
    if isinstance(left, TensorSpec) or isinstance(right, TensorSpec):
        return bool(left == right)
    parts, others = children(left), children(right)
    if parts is None or others is None:
        return type(left) is type(right)
    return parts.keys() == others.keys() and all(_same(part, others[key]) for key, part in parts.items())


def _difference(left: Any, right: Any) -> str:
    return f"{left} the first time and {right} now" if isinstance(left, TensorSpec) else "another structure than before"
