"""State dicts under tensor parallelism: pieces joined to whole tensors and back, and the names of either model.

::

    pieces, distributed names ──join_state──► wholes ──with_original_names──► wholes, original names
    pieces, distributed names ◄──shard_state── wholes ◄──with_distributed_names── wholes, original names

Tensors are joined, translated and taken apart one at a time, so memory holds one whole tensor beside the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import as_bytes
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.placement.shards import TpShard, join_shards, shard_of, take_shard
from smpkit.torch.tensor_parallel.registry import ReplacementRule, Translation, tensor_of
from smpkit.torch.tensor_parallel.replace import applied_rule_of


def shards_in(root: nn.Module) -> dict[str, TpShard]:
    """Return the marks of the divided parameters and buffers of a model, by their names in its state dict."""
    return {name: shard for name, (_, shard) in _sharded_tensors(root).items()}


def _sharded_tensors(root: nn.Module) -> dict[str, tuple[torch.Tensor, TpShard]]:
    """Return the divided parameters and buffers of a model by name, tied ones under all of theirs."""
    named = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    marked = ((name, tensor, shard_of(tensor)) for name, tensor in named)
    return {name: (tensor, shard) for name, tensor, shard in marked if shard is not None and shard.is_distributed}


def replaced_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module, ReplacementRule]]:
    """Yield the modules that replaced others: name, module, and the rule by which it did."""
    for name, module in root.named_modules():
        rule = applied_rule_of(module)
        if rule is not None:
            yield name, module, rule


# --- pieces -----------------------------------------------------------------------------------------------------------


def join_state(root: nn.Module, values: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Return a part of a state dict of `root` with whole tensors; all ranks of a tensor-parallel group call this.

    Joined tensors are on the CPU. Tied ones stay one.

    Args:
        prefix: what the names in `values` begin with.
    """
    divided = _sharded_tensors(root)
    result: dict[str, Any] = {}
    joined: dict[int, torch.Tensor | None] = {}  # by the id of the piece: tied ones are gathered once
    for name, value in values.items():
        tensor, shard = divided.get(name.removeprefix(prefix), (None, None))
        if tensor is None or shard is None:
            result[name] = value
            continue
        if id(tensor) not in joined:
            joined[id(tensor)] = join_pieces(value, shard, on_first=False)
        result[name] = joined[id(tensor)]
    return result


def join_pieces(piece: torch.Tensor, shard: TpShard, *, on_first: bool) -> torch.Tensor | None:
    """Return the whole tensor from the pieces of all ranks, on the CPU; with `on_first`, None on the others."""
    group = state.process_group(CommGroup.TP_GROUP)
    shapes = shard.local_shapes
    # Collectives take equal pieces, and the last ones may be smaller: send bytes, padded to the largest piece.
    room = max(shape.numel() for shape in shapes) * piece.element_size()
    raw = as_bytes(piece.detach().contiguous())
    packed = torch.zeros(room, dtype=torch.uint8, device=piece.device)
    packed[: len(raw)] = raw
    wanted = not on_first or state.tp_rank == 0
    by_rank = [torch.empty_like(packed) for _ in shapes] if wanted else None
    with waiting("the pieces of a state dict from tensor-parallel ranks", group):
        if on_first:
            dist.gather(packed, by_rank, group=group, group_dst=0)
        else:
            dist.all_gather(by_rank, packed, group=group)
    if by_rank is None:
        return None
    sizes = [shape.numel() * piece.element_size() for shape in shapes]
    pieces = [data[:size].cpu().view(piece.dtype) for data, size in zip(by_rank, sizes, strict=True)]
    return join_shards([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], shard)


def shard_state(root: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of `root` with this rank's pieces of whole tensors; what is a piece already stays one."""
    shards = shards_in(root)
    return {name: shard_value(value, shards.get(name)) for name, value in values.items()}


def shard_value(value: Any, shard: TpShard | None) -> Any:
    """Return this rank's piece of a whole tensor, as a copy; anything else as it is."""
    if shard is None or not isinstance(value, torch.Tensor):
        return value
    is_whole = tuple(value.shape) == shard.shape != shard.local_shape
    return take_shard(value, shard) if is_whole else value


# --- names ------------------------------------------------------------------------------------------------------------


def with_distributed_names(root: nn.Module, values: Mapping[str, Any], held: Collection[str]) -> dict[str, Any]:
    """Return a whole state dict of the original model as one of the distributed model, in this rank's pieces.

    Parts that have the distributed names already stay as they are.

    Args:
        held: the names that this rank holds; the values of others are not translated, but None.
    """
    shards = shards_in(root)
    result = dict(values)
    for prefix, module, inside, translation in _modules_to_translate(root, result, to_original=False):
        for name, value in translation(inside, module):
            full = prefix + name
            result[full] = shard_value(tensor_of(value), shards.get(full)) if full in held else None
    return result


def with_original_names(root: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole state dict of the distributed model as one of the original model, where a translation is known."""
    result = dict(values)
    for prefix, module, inside, translation in _modules_to_translate(root, result, to_original=True):
        result.update({prefix + name: tensor_of(value) for name, value in translation(inside, module)})
    return result


def _modules_to_translate(
    root: nn.Module, values: dict[str, Any], *, to_original: bool
) -> Iterator[tuple[str, nn.Module, dict[str, Any], Translation]]:
    """Yield replaced modules whose part of `values` has the names to translate, and take that part out of `values`.

    Each comes as (prefix of its names, module, its part of `values`, translation).
    """
    for name, module, rule in replaced_modules(root):
        prefix = f"{name}." if name else ""
        translation = rule.from_distributed if to_original else rule.to_distributed
        inside = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        ours = module.state_dict().keys()
        has_our_names = bool(inside) and inside.keys() <= ours
        if translation is None or not inside or has_our_names != to_original:
            continue
        for key in inside:
            del values[prefix + key]
        yield prefix, module, inside, translation
