"""The whole model's tensors under the names of the script's own model, though tensor parallelism replaced parts of it.

What a module became has a translation back, which makes one whole tensor after the other from whole tensors. Here these
are brought together from the ranks when the translation asks for them, so that at no time there is more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from smpkit.plan.mesh import Coordinates
from smpkit.torch.checkpoints.together import Model
from smpkit.torch.comm import recv_from, send
from smpkit.torch.sharded_tensors import full_tensor_of
from smpkit.torch.state import state
from smpkit.torch.tensor_parallel.module import global_shape
from smpkit.torch.tensor_parallel.registry import TensorOrFactory, Translation
from smpkit.torch.tensor_parallel.shards import shard_of
from smpkit.torch.tensor_parallel.whole_state import join_state, replaced_modules

__all__ = ["FullState", "TranslatedModule", "full_state_of"]


@dataclass(frozen=True)
class TranslatedModule:
    """A module that took the place of another one.

    Args:
        prefix: what the names of its state begin with.
        source: the rank that writes what is made of it.
        pp_sources: the pipeline rank that provides each tensor of its state, where that is not the source's.
    """

    prefix: str
    module: nn.Module
    translation: Translation
    source: int
    pp_sources: Mapping[str, int]

    @property
    def takes_part(self) -> bool:
        """Whether this rank holds a piece that the source needs."""
        mine, theirs = (state.mesh.coordinates(rank) for rank in (state.rank, self.source))
        # What sharded data parallelism divides, all replicas bring together, each for itself.
        together = state.cfg.sharded_data_parallel_degree > 1
        return mine.pp in {theirs.pp, *self.pp_sources.values()} and (together or mine.rdp == theirs.rdp)

    @cached_property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what the translation makes, by name; computed without data."""
        made = {name: make() for name, make in self._translated(_MetaState(self.module))}
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what the translation makes, in its order."""
        return tuple(self.tensors)

    def gathered(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Yield names with what makes each tensor; all ranks that take part make all of them, in this order.

        Only the source gets values; the others, tensors without data.
        """
        return self._translated(_GatheredState(self.module, self.pp_sources, state.mesh.coordinates(self.source).pp))

    def _translated(self, values: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, made in self.translation(values, self.module):
            yield self.prefix + name, _maker(made)


def _maker(made: TensorOrFactory) -> Callable[[], torch.Tensor]:
    return made if callable(made) else lambda: made


@dataclass(frozen=True)
class FullState:
    """What the whole model's state dict has.

    Args:
        tensors: shape and dtype by name.
        modules: where some of them come from.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    modules: tuple[TranslatedModule, ...] = field(default=())

    @cached_property
    def translated(self) -> frozenset[str]:
        """The names of what translations make."""
        return frozenset(name for module in self.modules for name in module.names)


def full_state_of(model: Model, *, translate: bool) -> FullState:
    """Return what the whole model's state dict has, the same on all ranks.

    Args:
        translate: under the script's own names, where a translation is known.
    """
    modules = tuple(_translated_modules(model)) if translate else ()
    inside = tuple(module.prefix for module in modules)
    tensors = {
        name: (tuple(global_shape(value)), value.dtype)
        for name, value in model.module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and not (inside and name.startswith(inside))
    }
    for module in modules:
        tensors |= module.tensors
    return FullState(tensors, modules)


def _translated_modules(model: Model) -> Iterator[TranslatedModule]:
    for name, module, entry in replaced_modules(model.module):
        if entry.from_distributed is not None:
            source, pp_sources = _pp_sources_of(model, module)
            rank = state.mesh.rank(Coordinates(pp=source, tp=0, rdp=0))
            yield TranslatedModule(f"{name}." if name else "", module, entry.from_distributed, rank, pp_sources)


def _pp_sources_of(model: Model, module: nn.Module) -> tuple[int, Mapping[str, int]]:
    """Return the pipeline rank that a module is put together on, and what of its state comes from which other one.

    That is the lowest rank that holds all of it; a module whose parts lie on several has none.
    """
    if model.pipeline is None or not model.partitioned:
        return 0, {}
    holders = {name: model.pipeline.holders[id(each)] for name, each in module.named_parameters(remove_duplicate=False)}
    common = frozenset.intersection(*holders.values())
    source = min(common) if common else min(map(min, holders.values()))
    return source, {name: min(ranks) for name, ranks in holders.items() if source not in ranks}


class _MetaState(Mapping[str, torch.Tensor]):
    """The whole state of a module, without data."""

    def __init__(self, module: nn.Module) -> None:
        self._values = {
            name: torch.empty(global_shape(value), dtype=value.dtype, device="meta")
            for name, value in module.state_dict(keep_vars=True).items()
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _GatheredState(_MetaState):
    """The whole state of a module on the first of the tensor-parallel ranks that ask together, without data elsewhere.

    The last tensor is kept, because the parts of a packed one are asked for one after the other.
    """

    def __init__(self, module: nn.Module, pp_sources: Mapping[str, int], source: int) -> None:
        super().__init__(module)
        self._module = module
        self._homes = pp_sources
        self._source = source
        self._own = module.state_dict(keep_vars=True)
        self._last: tuple[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self._fetched(name)
        return self._last[1]

    def _fetched(self, name: str) -> torch.Tensor:
        """Return the tensor on the first rank of the source's, wherever in the pipeline it comes from."""
        pp_source = self._homes.get(name, self._source)
        value = self._full_tensor(name) if state.pp_rank == pp_source else self._values[name]
        if pp_source == self._source or state.tp_rank > 0:
            return value
        if state.pp_rank == pp_source:
            send(value, state.mesh.rank(Coordinates(self._source, 0, state.rdp_rank)))
            return self._values[name]
        if state.pp_rank == self._source:
            whole: torch.Tensor = recv_from(state.mesh.rank(Coordinates(pp_source, 0, state.rdp_rank)))
            return whole
        return value

    def _full_tensor(self, name: str) -> torch.Tensor:
        value = full_tensor_of(self._own[name])
        shard = shard_of(self._own[name])
        if shard is not None and shard.is_distributed:
            found = join_state(self._module, {name: value.detach()}, on_first=True)
            return found[name] if state.tp_rank == 0 else self._values[name]
        return value.detach() if state.tp_rank == 0 else self._values[name]
