"""Float32 weights between jobs that keep them in different places.

In half precision a checkpoint has the model's rounded weights, and float32 masters beside the optimizer's moments. With
sharded data parallelism (and without half precision) the model's own weights are float32, and there are no masters.
What is float32 here comes from what is float32 there, wherever that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from smpkit.torch.checkpoints.contents import MODEL, STATES
from smpkit.torch.checkpoints.reader import PieceReader
from smpkit.torch.checkpoints.renamed import TensorFactory, key_mappings
from smpkit.torch.precision import MASTER_KEY

__all__ = ["TensorSource", "fp32_sources", "is_half"]

TensorSource: TypeAlias = str | TensorFactory
"""The name in the checkpoint, or what makes the whole tensor."""


def is_half(dtype: torch.dtype) -> bool:
    """Tell whether a dtype is one that has masters."""
    return dtype in (torch.float16, torch.bfloat16)


def fp32_sources(root: nn.Module, sources: Mapping[str, TensorSource], reader: PieceReader) -> dict[str, TensorSource]:
    """Return the masters in the checkpoint for those parameters, by name, that are not in half precision here.

    Masters that only another host has are left out: the rounded weights do.
    """
    masters = _masters_in(reader)
    wanted = {name: p for name, p in root.named_parameters(remove_duplicate=False) if not is_half(p.dtype)}
    wanted = {name: parameter for name, parameter in wanted.items() if name in sources}
    if not masters or not wanted:
        return {}
    found: dict[int, TensorSource] = {}
    for name, parameter in wanted.items():
        source = sources[name]
        if isinstance(source, str) and source.removeprefix(MODEL) in masters:
            found[id(parameter)] = masters[source.removeprefix(MODEL)]
    there = {name.removeprefix(MODEL) for name in reader.metadata.state_dict_metadata if name.startswith(MODEL)}
    for mapping in key_mappings(root, there):
        factories = mapping.factories(reader, lambda name: masters.get(name, ""))
        found |= {id(wanted[name]): factory for name, factory in factories.items() if name in wanted}
    return {name: found[id(parameter)] for name, parameter in wanted.items() if id(parameter) in found}


def _masters_in(reader: PieceReader) -> dict[str, str]:
    """Return the names of the masters in a checkpoint, by that of their parameter."""
    end = f".{MASTER_KEY}"
    items = reader.metadata.state_dict_metadata
    names = [name for name, item in items.items() if isinstance(item, TensorStorageMetadata)]
    names = [name for name in names if name.startswith(STATES) and name.endswith(end) and not reader.is_missing(name)]
    return {name.removeprefix(STATES).removesuffix(end): name for name in names}
