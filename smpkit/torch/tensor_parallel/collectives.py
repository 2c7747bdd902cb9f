"""The exchanges between tensor-parallel ranks that gradients go through, each with the one that undoes it in backward.

    forward          what this rank gets                            backward
    copy             its value, as it is                            reduce
    reduce           the sum of all ranks' values                   copy
    gather           all ranks' values, side by side on a dim       reduce_scatter
    reduce_scatter   its part of the sum of all ranks' values       gather
    gather_equal     all ranks' values, side by side on a dim       split
    split            its part of a value that all ranks have        gather_equal
    exchange         its part of every rank's value                 exchange, the other way round

After `gather` each rank goes its own way with the whole, so gradients add up; after `gather_equal` all ranks compute
the same, so each has the whole gradient already and takes its part. Backwards are made of these functions too, so they
can be differentiated again. With one tensor-parallel rank they return their argument.

While a step is tried out on one rank, to measure it or on tensors without data, values of the right shape take the
place of what the others would send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.deadline import waiting
from smpkit.torch.state import state

__all__ = [
    "begin_gather",
    "begin_reduce_scatter",
    "copy",
    "exchange",
    "exchanges_made",
    "gather",
    "gather_equal",
    "is_rehearsal",
    "note_number",
    "reduce",
    "reduce_scatter",
    "split",
    "tp_group",
]


def _named(name: str, before: str) -> Callable[..., Any]:
    """Return a collective by the name of torch 2.13, which deprecates the one from before."""
    found: Callable[..., Any] = getattr(dist, name if hasattr(dist, name) else before)
    return found


_reduce_scatter_into: Final = _named("reduce_scatter_single", "reduce_scatter_tensor")
_all_gather_into: Final = _named("all_gather_single", "all_gather_into_tensor")


def tp_group() -> dist.ProcessGroup:
    """Return this rank's tensor-parallel group."""
    return state.process_group(CommGroup.TP_GROUP)


def is_rehearsal(x: torch.Tensor) -> bool:
    """Return whether the other ranks take no part in what happens to `x`: it has no data, or a step is tried out."""
    return state.tracing or x.is_meta or isinstance(x, FakeTensor)


_made = 0


def exchanges_made(*, forget: bool = False) -> int:
    """Return a checksum of the kinds and shapes of all exchanges so far, which is the same on all ranks of a group.

    gloo accepts a message that is shorter than expected, and one of the same length and another meaning, so ranks that
    got out of step can go on with wrong values. This is compared when the next step begins, with what is sent anyway.

    Args:
        forget: begin anew afterwards.
    """
    global _made  # noqa: PLW0603 - one per process, like the groups that are exchanged over
    before = _made
    if forget:
        _made = 0
    return before


def note_number(number: int) -> None:
    """Note a random number that all ranks have without an exchange: ranks that got out of step have different ones."""
    _note_numbers(5, number)


def _note(kind: int, x: torch.Tensor) -> None:
    _note_numbers(kind, x.element_size(), *x.shape)


def _note_numbers(*numbers: int) -> None:
    global _made  # noqa: PLW0603
    if not _made:
        state.reset_hooks.append(lambda: exchanges_made(forget=True))
    _made = hash((_made, *numbers))  # numbers only: their hashes are the same in all processes


def copy(x: torch.Tensor) -> torch.Tensor:
    """Hand a value that all ranks have to computations that differ by rank: their gradients add up."""
    if has_torch_function_unary(x):
        return _overridden(copy, x)
    return _between_ranks(x, "copy", 0, 0)


def reduce(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' values, with which all go on alike."""
    if has_torch_function_unary(x):
        return _overridden(reduce, x)
    return _between_ranks(x, "reduce", 0, 0)


def gather(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the values of all ranks, in their order along `dim`, for computations that differ by rank."""
    if has_torch_function_unary(x):
        return _overridden(gather, x, dim)
    return _between_ranks(x, "gather", dim, dim)


def reduce_scatter(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return this rank's part along `dim` of the sum of all ranks' values.

    Raises:
        UsageError: the ranks do not divide the dimension.
    """
    if has_torch_function_unary(x):
        return _overridden(reduce_scatter, x, dim)
    return _between_ranks(x, "reduce_scatter", dim, dim)


def gather_equal(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the values of all ranks, in their order along `dim`, with which all go on alike."""
    if has_torch_function_unary(x):
        return _overridden(gather_equal, x, dim)
    return _between_ranks(x, "gather_equal", dim, dim)


def split(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return this rank's part along `dim` of a value that all ranks have.

    Raises:
        UsageError: the ranks do not divide the dimension.
    """
    if has_torch_function_unary(x):
        return _overridden(split, x, dim)
    return _between_ranks(x, "split", dim, dim)


def exchange(x: torch.Tensor, cut: int, joined: int) -> torch.Tensor:
    """Return this rank's part along dimension `cut` of every rank's value, in their order along dimension `joined`.

    Raises:
        UsageError: the ranks do not divide the dimension that is cut.
    """
    if has_torch_function_unary(x):
        return _overridden(exchange, x, cut, joined)
    return _between_ranks(x, "exchange", cut, joined)


def _overridden(function: Callable[..., torch.Tensor], x: torch.Tensor, *dims: int) -> torch.Tensor:
    """Let a value that lies on another pipeline rank say where this happens."""
    made: torch.Tensor = handle_torch_function(function, (x,), x, *dims)
    return made


_BACKWARD: Final = {
    "copy": "reduce",
    "reduce": "copy",
    "gather": "reduce_scatter",
    "reduce_scatter": "gather",
    "gather_equal": "split",
    "split": "gather_equal",
    "exchange": "exchange",
}


def _between_ranks(x: torch.Tensor, kind: str, first: int, second: int) -> torch.Tensor:
    if state.tp_size == 1:
        return x
    if x.dim():
        first, second = first % x.dim(), second % x.dim()
    if kind in ("reduce_scatter", "split", "exchange"):
        _check_divides(x, first, kind)
    if is_rehearsal(x):
        return _rehearsed(x, kind, first, second)
    made: torch.Tensor = _Collective.apply(x, kind, first, second)  # type: ignore[no-untyped-call]
    return made


class _Collective(torch.autograd.Function):
    """One of the exchanges; its backward is another of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str, first: int, second: int) -> torch.Tensor:
        ctx.backward_kind, ctx.dims = _BACKWARD[kind], (second, first)
        return _RUN[kind](x, first, second)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _between_ranks(grad, ctx.backward_kind, *ctx.dims), None, None, None


def _check_divides(x: torch.Tensor, dim: int, kind: str) -> None:
    if x.shape[dim] % state.tp_size:
        raise UsageError(
            f"{kind.replace('_', '-')} of a {list(x.shape)} tensor: dimension {dim} is {x.shape[dim]}, which the"
            f" {state.tp_size} tensor-parallel ranks do not divide",
            hint=f"pad it to a multiple of {state.tp_size}",
        )


def _copy(x: torch.Tensor, _first: int, _second: int) -> torch.Tensor:
    return x


def _reduce(x: torch.Tensor, _first: int, _second: int) -> torch.Tensor:
    summed = x.clone(memory_format=torch.contiguous_format)
    group = tp_group()
    _note(1, x)
    with waiting(f"all-reduce of {list(x.shape)} between tensor-parallel ranks", group):
        dist.all_reduce(summed, group=group)
    return summed


def begin_gather(x: torch.Tensor, dim: int) -> Callable[[], torch.Tensor]:
    """Begin to gather, outside of autograd; what is returned waits and gives the result."""
    group, mine = tp_group(), x.contiguous()
    gathered = x.new_empty((state.tp_size, *x.shape))
    what = f"all-gather of {list(x.shape)} between tensor-parallel ranks"
    _note(2, x)
    with waiting(what, group):
        work = _all_gather_into(gathered.view(-1), mine.view(-1), group=group, async_op=True)

    def finish() -> torch.Tensor:
        with waiting(what, group):
            work.wait()
        return _side_by_side(gathered, dim)

    return finish


def begin_reduce_scatter(x: torch.Tensor, dim: int) -> Callable[[], torch.Tensor]:
    """Begin to reduce and scatter, outside of autograd; what is returned waits and gives the result."""
    group, parts = tp_group(), _stacked(x, dim)
    part = x.new_empty(parts.shape[1:])
    what = f"reduce-scatter of {list(x.shape)} between tensor-parallel ranks"
    _note(3, x)
    with waiting(what, group):
        work = _reduce_scatter_into(part.view(-1), parts.view(-1), group=group, async_op=True)

    def finish() -> torch.Tensor:
        with waiting(what, group):
            work.wait()
        return part

    return finish


def _gather(x: torch.Tensor, dim: int, _second: int) -> torch.Tensor:
    return begin_gather(x, dim)()


def _reduce_scatter(x: torch.Tensor, dim: int, _second: int) -> torch.Tensor:
    return begin_reduce_scatter(x, dim)()


def _split(x: torch.Tensor, dim: int, _second: int) -> torch.Tensor:
    length = x.shape[dim] // state.tp_size
    # A copy, so that the whole value can be freed.
    return x.narrow(dim, length * state.tp_rank, length).clone(memory_format=torch.contiguous_format)


def _exchange(x: torch.Tensor, cut: int, joined: int) -> torch.Tensor:
    group, parts = tp_group(), _stacked(x, cut)
    received = torch.empty_like(parts)
    _note(4, x)
    with waiting(f"all-to-all of {list(x.shape)} between tensor-parallel ranks", group):
        dist.all_to_all_single(received.view(-1), parts.view(-1), group=group)
    return _side_by_side(received, joined)


_RUN: Final[dict[str, Callable[[torch.Tensor, int, int], torch.Tensor]]] = {
    "copy": _copy,
    "reduce": _reduce,
    "gather": _gather,
    "reduce_scatter": _reduce_scatter,
    "gather_equal": _gather,
    "split": _split,
    "exchange": _exchange,
}


def _stacked(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the parts of `x` along `dim`, one per rank, as the rows of a contiguous tensor."""
    size = state.tp_size
    apart = x.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return apart.movedim(dim, 0).contiguous()


def _side_by_side(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the rows of a tensor, one per rank, next to each other along `dim`: the reverse of `_stacked`."""
    return rows.movedim(0, dim).flatten(dim, dim + 1)


def _rehearsed(x: torch.Tensor, kind: str, first: int, second: int) -> torch.Tensor:
    if kind in ("gather", "gather_equal"):
        return torch.cat([x] * state.tp_size, first)
    if kind in ("reduce_scatter", "split"):
        return x.narrow(first, 0, x.shape[first] // state.tp_size)
    if kind == "exchange":
        return torch.cat([x.narrow(first, 0, x.shape[first] // state.tp_size)] * state.tp_size, second)
    return x
