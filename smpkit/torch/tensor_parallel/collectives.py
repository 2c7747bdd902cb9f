"""The collectives between tensor-parallel ranks, each with the one that its gradient goes through.

    forward                  what this rank gets                            backward
    copy_to_tp               its value, as it is                            reduce_from_tp
    reduce_from_tp           the sum of all ranks' values                   copy_to_tp
    gather_to_tp             all ranks' values, side by side on a dim       reduce_scatter_from_tp
    reduce_scatter_from_tp   its part of the sum of all ranks' values       gather_to_tp
    gather_from_tp           all ranks' values, side by side on a dim       scatter_to_tp
    scatter_to_tp            its part of a value that all ranks have        gather_from_tp
    all_to_all               its part of every rank's value                 all_to_all, the other way round

The names are Megatron's: `to_tp` enters the region in which the ranks compute different things, `from_tp` leaves it.
(`gather_to_tp` and `reduce_scatter_from_tp` are its `gather_from_sequence_parallel_region` and
`reduce_scatter_to_sequence_parallel_region`, for any dimension.) After `gather_to_tp` each rank uses the whole for
something else, so gradients add up; after `gather_from_tp` all ranks compute the same, so each has the whole gradient
already and takes its part. Backwards are made of these functions too, so they can be differentiated again. With one
tensor-parallel rank they return their argument. Those that cut a dimension raise UsageError if the ranks do not divide
it.

In a dry run (a step that is traced or measured on one rank, or runs on fake tensors) nothing is sent: the result has
the right shape and strides, by which a pipeline receives it, and stands for what the other ranks would send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting


def copy_to_tp(x: torch.Tensor) -> torch.Tensor:
    """Return a value that all ranks have, for computations that differ by rank: their gradients add up."""
    return _run(copy_to_tp, x)


def reduce_from_tp(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' values, for the same computation on every rank."""
    return _run(reduce_from_tp, x)


def gather_to_tp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the values of all ranks, in their order along `dim`, for computations that differ by rank."""
    return _run(gather_to_tp, x, dim)


def reduce_scatter_from_tp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return this rank's part along `dim` of the sum of all ranks' values."""
    return _run(reduce_scatter_from_tp, x, dim)


def gather_from_tp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the values of all ranks, in their order along `dim`, for the same computation on every rank."""
    return _run(gather_from_tp, x, dim)


def scatter_to_tp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return this rank's part along `dim` of a value that all ranks have."""
    return _run(scatter_to_tp, x, dim)


def all_to_all(x: torch.Tensor, split_dim: int, concat_dim: int) -> torch.Tensor:
    """Return this rank's part along `split_dim` of every rank's value, in their order along `concat_dim`."""
    return _run(all_to_all, x, split_dim, concat_dim)


def is_dry_run(x: torch.Tensor) -> bool:
    """Tell whether no collective may run on `x`: it has no data, or this rank traces a step alone."""
    # A trial of the step runs on one rank alone: a collective would wait for the others until its deadline.
    return state.tracing or x.is_meta or isinstance(x, FakeTensor)


def tp_group() -> dist.ProcessGroup:
    """Return this rank's tensor-parallel group."""
    return state.process_group(CommGroup.TP_GROUP)


# --- how one runs, forward and backward -------------------------------------------------------------------------------


_BACKWARD: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "copy_to_tp": reduce_from_tp,
    "reduce_from_tp": copy_to_tp,
    "gather_to_tp": reduce_scatter_from_tp,
    "reduce_scatter_from_tp": gather_to_tp,
    "gather_from_tp": scatter_to_tp,
    "scatter_to_tp": gather_from_tp,
    "all_to_all": all_to_all,
}

_SPLITTING: Final = {"reduce_scatter_from_tp": "reduce-scatter", "scatter_to_tp": "split", "all_to_all": "exchange"}
"""The collectives that cut a dimension into equal parts, with their names in messages."""


def _run(collective: Callable[..., torch.Tensor], x: torch.Tensor, *dims: int) -> torch.Tensor:
    if has_torch_function_unary(x):  # a StageTensor: the call runs on the pipeline rank that has the value
        return handle_torch_function(collective, (x,), x, *dims)
    if state.tp_size == 1:
        return x
    if x.dim():  # resolved here, so that backward and messages name the same dimension
        dims = tuple([dim % x.dim() for dim in dims])
    kind = collective.__name__
    if kind in _SPLITTING:
        _check_divides(x, dims[0], kind)
    if is_dry_run(x):
        return _dry_run_result(x, kind, dims)
    return cast("torch.Tensor", _Collective.apply(x, kind, dims))  # type: ignore[no-untyped-call]


class _Collective(torch.autograd.Function):
    """One of the collectives; its backward is another of them (of `all_to_all`, with the dimensions swapped)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str, dims: tuple[int, ...]) -> torch.Tensor:
        ctx.kind, ctx.dims = kind, dims
        return _FORWARD[kind](x, *dims)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # Through autograd again, so that gradients of gradients exist.
        return _run(_BACKWARD[ctx.kind], grad, *ctx.dims[::-1]), None, None


def _check_divides(x: torch.Tensor, dim: int, kind: str) -> None:
    if x.shape[dim] % state.tp_size:
        raise UsageError(
            f"{_SPLITTING[kind]} of a {list(x.shape)} tensor: dimension {dim} is {x.shape[dim]}, which the"
            f" {state.tp_size} tensor-parallel ranks do not divide",
            hint=f"pad it to a multiple of {state.tp_size}",
        )


def _dry_run_result(x: torch.Tensor, kind: str, dims: tuple[int, ...]) -> torch.Tensor:
    if kind in ("gather_to_tp", "gather_from_tp"):
        return torch.cat([x] * state.tp_size, dims[0])
    if kind in _SPLITTING:
        part = _own_part(x, dims[0])
        return torch.cat([part] * state.tp_size, dims[1]) if kind == "all_to_all" else part
    return x if kind == "copy_to_tp" else x.clone(memory_format=torch.contiguous_format)


# --- what is sent -----------------------------------------------------------------------------------------------------


# The names of torch 2.13, which deprecates the older ones.
_reduce_scatter_single: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def start_all_gather(x: torch.Tensor, dim: int) -> Callable[[], torch.Tensor]:
    """Start an all-gather, outside of autograd; the function that is returned waits for it and returns the result."""
    gathered, mine = x.new_empty((state.tp_size, *x.shape)), x.contiguous()
    return _start(
        ("all-gather", x),
        lambda group: _all_gather_single(gathered.view(-1), mine.view(-1), group=group, async_op=True),
        lambda: _concat_rows(gathered, dim),
    )


def start_reduce_scatter(x: torch.Tensor, dim: int) -> Callable[[], torch.Tensor]:
    """Start a reduce-scatter, outside of autograd; the returned function waits for it and returns the result."""
    parts = _parts_as_rows(x, dim)
    part = x.new_empty(parts.shape[1:])
    return _start(
        ("reduce-scatter", x),
        lambda group: _reduce_scatter_single(part.view(-1), parts.view(-1), group=group, async_op=True),
        lambda: part,
    )


def _start(
    what: tuple[str, torch.Tensor], send: Callable[[dist.ProcessGroup], Any], result: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    kind, x = what
    _compare_shape(kind, x)
    group, text = tp_group(), f"{kind} of {list(x.shape)} between tensor-parallel ranks"
    with waiting(text, group):
        work = send(group)

    def finish() -> torch.Tensor:
        with waiting(text, group):
            work.wait()
        return result()

    return finish


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    summed = x.clone(memory_format=torch.contiguous_format)  # the reduction is in place, and x may be kept for backward
    return _start(
        ("all-reduce", x), lambda group: dist.all_reduce(summed, group=group, async_op=True), lambda: summed
    )()


def _own_part(x: torch.Tensor, dim: int) -> torch.Tensor:
    length = x.shape[dim] // state.tp_size
    # A copy, so that the whole value can be freed.
    return x.narrow(dim, length * state.tp_rank, length).clone(memory_format=torch.contiguous_format)


def _all_to_all(x: torch.Tensor, split_dim: int, concat_dim: int) -> torch.Tensor:
    parts = _parts_as_rows(x, split_dim)
    received = torch.empty_like(parts)
    return _start(
        ("all-to-all", x),
        lambda group: dist.all_to_all_single(received.view(-1), parts.view(-1), group=group, async_op=True),
        lambda: _concat_rows(received, concat_dim),
    )()


_FORWARD: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "copy_to_tp": lambda x: x,
    "reduce_from_tp": _all_reduce,
    "gather_to_tp": lambda x, dim: start_all_gather(x, dim)(),
    "reduce_scatter_from_tp": lambda x, dim: start_reduce_scatter(x, dim)(),
    "gather_from_tp": lambda x, dim: start_all_gather(x, dim)(),
    "scatter_to_tp": _own_part,
    "all_to_all": _all_to_all,
}


def _parts_as_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the parts of `x` along `dim`, one per rank, as the rows of a contiguous tensor."""
    size = state.tp_size
    with_rank_dim = x.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return with_rank_dim.movedim(dim, 0).contiguous()


def _concat_rows(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the rows of a tensor, one per rank, next to each other along `dim`: the reverse of `_parts_as_rows`."""
    return rows.movedim(0, dim).flatten(dim, dim + 1)


# --- what is compared before it is sent -------------------------------------------------------------------------------


_compared: Final[set[tuple[str, torch.Size, torch.dtype]]] = set()


def _compare_shape(kind: str, x: torch.Tensor) -> None:
    """Compare what is sent between the ranks, the first time that a shape is sent so.

    gloo accepts a message that is shorter than expected. A rank that has sent its shape before does not compare it; the
    collective that the others wait in then fails, and the error of each rank names the call and its shape.
    """
    key = (kind, x.shape, x.dtype)
    if key in _compared:
        return
    if not _compared:  # after smp.shutdown() the same process may join other ranks
        state.reset_hooks.append(_compared.clear)
    group = tp_group()
    # A message of one size, whatever the rank of the tensor: at most 12 dimensions, the rest is -1.
    own = torch.full((12,), -1, dtype=torch.int64, device=x.device)
    own[: min(x.dim(), 12)] = torch.tensor(x.shape[:12], device=x.device)
    by_rank = [torch.empty_like(own) for _ in range(state.tp_size)]
    with waiting(f"comparison of shapes ({list(x.shape)} here) between tensor-parallel ranks", group):
        dist.all_gather(by_rank, own, group=group)
    shapes = [[size for size in shape.tolist() if size >= 0] for shape in by_rank]
    if any(shape != shapes[0] for shape in shapes):
        ranks = dist.get_process_group_ranks(group)
        listed = ", ".join(f"{shape} on rank {rank}" for rank, shape in zip(ranks, shapes, strict=True))
        raise UsageError(
            f"the tensor-parallel ranks brought batches of different shapes: {listed}",
            hint="give every rank as many samples of the same length: `drop_last=True`, padding to a fixed length",
        )
    _compared.add(key)
