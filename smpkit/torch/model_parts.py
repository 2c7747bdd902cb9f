"""The parts of `smp.DistributedModel`: iterators over all of them and over those that this rank holds, and state dicts.

The state dict of the whole model is put together from what ranks hold, and divided again (see state_dict.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final, Self

import torch
from torch import nn

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.core.warn import warn_user
from smpkit.torch.pipeline.pipeline import Pipeline
from smpkit.torch.placement.delayed import is_delayed, run_deferred_loads, set_delayed_value
from smpkit.torch.placement.dtensor import distribute_state, full_tensor_of, local_tensor_of
from smpkit.torch.placement.placement import Placement
from smpkit.torch.placement.shards import assignment_refusal, is_tp_shard, sees_scaled_batch
from smpkit.torch.state_dict import (
    PARTIAL_KEY,
    marked,
    merge_on_all_ranks,
    tie_of,
    unmarked,
    whole_value,
    with_versions,
)
from smpkit.torch.tensor_parallel.module import DistributedModule
from smpkit.torch.tensor_parallel.state_dict import (
    join_state,
    shard_state,
    with_distributed_names,
    with_original_names,
)

NamedParameters = Iterator[tuple[str, nn.Parameter]]

_INSTEAD: Final = {
    "no_sync": "smp.DistributedModel(model, backward_passes_per_step=count)",
    "save_pretrained": "smp.save_pretrained(folder)",
}
"""What scripts call on a model, and how to write it here."""


class ModelParts(nn.Module):
    """A wrapped module, and which of its parts are here. Names are those of the wrapped module."""

    module: nn.Module
    placement: Placement
    """Which ranks hold each parameter and what they do with it; all of a pipeline hold all until the first step."""
    pipeline: Pipeline | None
    partitioned: bool
    """Whether this rank has its part: at once without a pipeline, else from the first step on."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or not (name in _INSTEAD or hasattr(self.module, name)):
                raise
            there = _INSTEAD.get(name, f"model.get_module().{name}")
            raise AttributeError(f"a DistributedModel has no `{name}`: write `{there}`", name=name, obj=self) from None

    def named_parameters(self, *args: Any, **kwargs: Any) -> NamedParameters:
        """Iterate over all parameters with their names, those of other ranks included."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all buffers with their names, those of other ranks included."""
        return self.module.named_buffers(*args, **kwargs)

    def get_module(self) -> nn.Module:
        """Return the user's model, under all wrappers."""
        return self.module

    def cpu(self) -> Self:
        """Move the model to the host's memory.

        Raises:
            UnsupportedError: this rank holds a part of it, of which SMP v1 made the whole.
        """
        if _holds_parts():
            raise UnsupportedError(
                "model.cpu() would move this rank's part of the weights only, where SMP v1 made the model whole",
                hint="let all ranks call `model.original_state_dict()`, and load what it returns into a plain model",
            )
        return super().cpu()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Without the buffers of other ranks: they have no data, and torch refuses to move such.
        is_divided = self.pipeline is not None and self.partitioned
        super()._apply(lambda tensor: tensor if is_divided and tensor.is_meta else fn(tensor), recurse)  # type: ignore[no-untyped-call]
        return self

    # --- what this rank holds ----------------------------------------------------------------------------------

    def holds(self, parameter: torch.Tensor) -> bool:
        """Tell whether this rank holds the data of a parameter."""
        return self.placement.of(parameter).is_here

    def owns(self, parameter: torch.Tensor) -> bool:
        """Tell whether this rank keeps the optimizer's state of a parameter, or would."""
        return self.placement.of(parameter).is_owned_here

    def local_named_parameters(self) -> NamedParameters:
        """Iterate over the parameters that this rank holds, with their names."""
        return (pair for pair in self.module.named_parameters() if self.holds(pair[1]))

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters that this rank holds; before a pipeline's first step, which divides, over all."""
        if self.pipeline is not None and not self.partitioned:
            warn_user(
                "model.local_parameters() was called before the first step, in which a pipeline divides the model: they"
                " are all parameters now, and fewer afterwards. Make averages of weights after that step"
            )
        return (parameter for _, parameter in self.local_named_parameters())

    def virtual_named_parameters(self) -> NamedParameters:
        """Iterate over the parameters whose optimizer state this rank keeps.

        With `shard_optimizer_state` these are the parameters that this rank owns, whole; else all that it holds.
        """
        return (pair for pair in self.local_named_parameters() if self.owns(pair[1]))

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the buffers of the modules that this rank runs, with their names."""
        return (pair for pair in self.module.named_buffers() if self._runs_here(*pair))

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Iterate over the buffers of the modules that this rank runs."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the modules that this rank holds, and those above them, with their names."""
        here = (None, state.pp_rank)
        return (pair for pair in self.module.named_modules() if self.placement.pp_rank_of(pair[0]) in here)

    def local_modules(self) -> Iterator[nn.Module]:
        """Iterate over the modules that this rank holds, and those above them."""
        return (module for _, module in self.local_named_modules())

    # --- tensor parallelism ------------------------------------------------------------------------------------

    is_distributed_parameter = is_distributed_buffer = staticmethod(is_tp_shard)
    """Tell whether a parameter or buffer is this rank's piece of a larger one."""
    is_scaled_batch_parameter = is_scaled_batch_buffer = staticmethod(sees_scaled_batch)
    """Tell whether a parameter or buffer gets the samples of all tensor-parallel ranks in one backward."""

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Iterate over the tensor-parallel modules."""
        return (module for module in self.module.modules() if isinstance(module, DistributedModule))

    def default_reducer_named_parameters(self) -> NamedParameters:
        """Iterate over the parameters whose gradients are reduced over DP_GROUP."""
        return (pair for pair in self.module.named_parameters() if not sees_scaled_batch(pair[1]))

    def scaled_batch_reducer_named_parameters(self) -> NamedParameters:
        """Iterate over the parameters whose gradients are reduced over RDP_GROUP."""
        return (pair for pair in self.module.named_parameters() if sees_scaled_batch(pair[1]))

    # --- state dicts -------------------------------------------------------------------------------------------

    def state_dict(  # type: ignore[override]
        self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the whole model's state under the names of its modules; all ranks that hold a model call this.

        Modules that tensor parallelism has replaced have names of their own: `original_state_dict` gives the user's.

        Args:
            gather_to_rank0: give every rank of the model but the first an empty dict, to save memory.
        """
        run_deferred_loads()
        local: Any = self.module.state_dict(*args, **kwargs)
        prefix: str = kwargs.get("prefix", "")
        if gather_to_rank0:
            return self._gather_on_first_rank(local, prefix)
        whole = local
        if state.cfg.sharded_data_parallel_degree > 1:
            own = self.module.state_dict(prefix=prefix, keep_vars=True)
            ties = {name: tie_of(name, own.get(name)) for name in local}
            names = {tie: name for name, tie in ties.items()}  # a tied weight is gathered once, and stays one
            gathered = {tie: full_tensor_of(local[name]) for tie, name in names.items()}
            whole = {name: gathered[tie] for name, tie in ties.items()}
        held = self._held_names()
        if held is not None:
            whole = {name: value for name, value in whole.items() if name.removeprefix(prefix) in held}
        # Tensor-parallel pieces first: their group lies on one pipeline rank, which alone knows how to join them.
        if state.tp_size > 1:
            whole = join_state(self.module, whole, prefix=prefix)
        if held is not None:
            whole = merge_on_all_ranks(whole)
        return with_versions(local, {name: whole[name] for name in local if name in whole})

    def _gather_on_first_rank(self, local: Any, prefix: str) -> dict[str, Any]:
        """Gather the whole model's state on its first rank, entry by entry; return an empty dict on the others."""
        own = self.module.state_dict(keep_vars=True)
        keeps = state.mp_rank == 0 and (state.cfg.sharded_data_parallel_degree == 1 or state.rdp_rank == 0)
        whole: dict[str, Any] = {}
        first: dict[object, str] = {}
        for name in local:
            value = own[name.removeprefix(prefix)]
            known = first.setdefault(tie_of(name, value), name)  # tied weights come once, and stay one
            entry = whole.get(known) if known != name else whole_value(name.removeprefix(prefix), value, self.placement)
            if keeps and not (isinstance(entry, torch.Tensor) and entry.device.type == "meta"):
                whole[name] = local[name] if entry is value else entry
        return with_versions(local, whole)

    def original_state_dict(self, *, gather_to_rank0: bool = False) -> dict[str, Any]:
        """Return the whole model's state under the names it had before tensor parallelism replaced modules.

        Parts whose translation is not known keep the names of `state_dict()`. All ranks that hold a model call this.

        Args:
            gather_to_rank0: as for `state_dict`.
        """
        return with_original_names(self.module, self.state_dict(gather_to_rank0=gather_to_rank0))

    def local_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, plus `_smp_is_partial` = True."""
        run_deferred_loads()
        held = self._names_here()
        own = {name: local_tensor_of(value) for name, value in self.module.state_dict().items() if name in held}
        return marked(own)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False, **kwargs: Any
    ) -> Any:
        """Load a full or partial state dict; for a partial one all ranks of a pipeline call this.

        Of whole tensors each rank takes its piece. A full dict under the names that modules had before tensor
        parallelism replaced them is translated, unless it has the key `_smp_is_partial`. The optimizer's master
        weights follow.

        Args:
            strict: raise if names do not match, as `nn.Module.load_state_dict` does.
            same_partition_load: promise that a partial dict comes from this very partition, so it needs no merging.

        Raises:
            UsageError: with `strict`, names of a partitioned model do not match; or it has the parts of weights that
                another rank of sharded data parallelism has.
            UnsupportedError: with `assign=True`, which would put tensors in the place of parameters that the optimizer
                and data parallelism know.
        """
        if kwargs.get("assign"):
            raise assignment_refusal()
        run_deferred_loads()
        held, own = self._held_names(), self.module.state_dict()
        names, is_partial = own.keys(), bool(state_dict.get(PARTIAL_KEY))
        values = unmarked(state_dict)
        if PARTIAL_KEY not in state_dict:  # what `state_dict()` returned has the distributed names already
            values = with_distributed_names(self.module, values, set(names if held is None else held))
        if self.pipeline is not None and is_partial and not same_partition_load:
            values = merge_on_all_ranks(values)
        loaded, expected = values.keys(), held if held is not None and is_partial and same_partition_load else names
        if held is not None:
            if strict:
                _check_names(loaded, expected)
            # Also another rank's buffers that are here: in a module that is not called, code between units uses them.
            buffers = self.module.named_buffers(remove_duplicate=False)
            wanted = held | {name for name, buffer in buffers if buffer.device.type != "meta"}
            values = {name: value for name, value in values.items() if name in wanted}
        # What is left are wholes, or this rank's own pieces: tensor parallelism takes its piece, then delayed
        # parameters get their memory, then sharded data parallelism takes its slice of tensors that must exist.
        values = shard_state(self.module, values)
        for name, parameter in self.module.named_parameters():
            if is_delayed(parameter) and name in values:
                set_delayed_value(parameter, values[name])
        values = with_versions(own if is_partial else state_dict, distribute_state(values, self.module))
        # Torch would miss the entries of other ranks; where that is so, names have been checked above, or cannot be.
        lacks_entries = held is not None or (self.pipeline is not None and is_partial and same_partition_load)
        result = self.module.load_state_dict(values, strict=strict and not lacks_entries, **kwargs)
        if held is not None:  # report what one process would
            result.missing_keys[:] = [name for name in result.missing_keys if name in expected and name not in loaded]
            result.unexpected_keys[:] = [name for name in loaded if name not in expected]
        # Else the optimizer's next step would overwrite what was loaded, from masters of the old weights.
        if state.optimizer is not None:
            state.optimizer.refresh_masters()
        return result

    def _held_names(self) -> set[str] | None:
        """Return the names of the entries of `state_dict()` that this rank holds; None if those are all."""
        return self._names_here() if self.pipeline is not None and self.partitioned else None

    def _names_here(self) -> set[str]:
        holds = {name: self.holds(param) for name, param in self.module.named_parameters(remove_duplicate=False)}
        entries = self.module.state_dict().items()
        return {name for name, value in entries if (holds[name] if name in holds else self._runs_here(name, value))}

    def _runs_here(self, name: str, value: Any) -> bool:
        """Tell whether a buffer (or extra state) is this rank's: its data are here, and its module runs here."""
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            return False
        return self.placement.running_pp_rank_of(name.rpartition(".")[0]) in (None, state.pp_rank)


def _check_names(names: AbstractSet[str], expected: AbstractSet[str]) -> None:
    missing, surplus = sorted(expected - names), sorted(names - expected)
    if missing or surplus:
        raise UsageError(
            f"the state dict does not fit the model: missing {missing or 'nothing'}, unexpected {surplus or 'nothing'}",
            hint="load it with strict=False to take what fits",
        )


def alias_module(module: nn.Module) -> None:
    """Let `model.module.module` reach the user's model, also under a wrapper of the user's own.

    SMP v1 had a wrapper more or less from version to version, with `ddp` and with `fp16`, and public scripts count the
    hops of theirs. Wrappers keep their place in the chain, and its end has one hop more::

        model ─► FP16Module ─► GPT2 ─► the same GPT2        `.module` at each arrow

    A plain attribute, past nn.Module's registration, keeps that hop out of the module tree and `state_dict()`.
    """
    while isinstance(inner := module._modules.get("module"), nn.Module):
        module = inner
    if not hasattr(module, "module"):
        object.__setattr__(module, "module", _LastHop(module))


def refuse_use_of_parts(root: nn.Module) -> None:
    """Refuse what Hugging Face's models do with whole weights, of which this rank holds parts, as long as it does.

    `save_pretrained` would write NaN for what other pipeline ranks hold, and pieces in the place of wholes.
    """
    for module in root.modules():
        for name, method in (
            ("save_pretrained", _save_pretrained),
            ("resize_token_embeddings", _resize_token_embeddings),
        ):
            if hasattr(type(module), name):
                object.__setattr__(module, name, functools.partial(method, module))


def _is_wrapped(module: nn.Module) -> bool:
    return state.model is not None and any(part is module for part in state.model.modules())


def _resize_token_embeddings(module: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
    # Where embeddings are whole, a new one is refused when the model gets it.
    is_divided = _is_wrapped(module) and state.cfg.sharded_data_parallel_degree > 1
    if is_divided and new_num_tokens not in (None, module.get_input_embeddings().weight.shape[0]):
        raise UsageError(
            "resize_token_embeddings was called after smp.DistributedModel, by which sharded data parallelism has"
            " divided the embeddings over ranks",
            hint="resize them before the model is wrapped",
        )
    kind: Any = type(module)
    return kind.resize_token_embeddings(module, new_num_tokens, *args, **kwargs)


def is_of_diffusers(module: nn.Module) -> bool:
    """Tell whether a model is one of diffusers, which is not imported for that."""
    return any(base.__name__ == "ConfigMixin" for base in type(module).__mro__)


def _save_pretrained(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    name, takes_state = type(module).__name__, not is_of_diffusers(module)
    if _is_wrapped(module) and not (takes_state and kwargs.get("state_dict") is not None) and _holds_parts():
        alone = "adapters: `save_pretrained(folder, state_dict=whole)` on one rank"
        if not takes_state:
            alone = f"a part: load it from `whole` into `{name}.from_config(module.config)` on one rank, and save that"
        raise UsageError(
            f"save_pretrained of {name} would write this rank's part of the weights only",
            hint=f"call `smp.save_pretrained(folder)` on all ranks; {alone}, with `whole = model.original_state_dict()`"
            " from all",
        )
    kind: Any = type(module)
    return kind.save_pretrained(module, *args, **kwargs)


def _holds_parts() -> bool:
    over_ranks = state.model is not None and state.model.partitioned and state.pp_size > 1
    return over_ranks or state.tp_size > 1 or state.cfg.sharded_data_parallel_degree > 1


class _LastHop:
    """Stands for a module in everything but that it has no `.module`: functions that unwrap a model end there."""

    def __init__(self, module: nn.Module) -> None:
        object.__setattr__(self, "_same", module)

    @property  # type: ignore[misc]  # which `isinstance` reads
    def __class__(self) -> Any:
        return type(self._same)

    def __getattr__(self, name: str) -> Any:
        if name in ("module", "_same"):
            raise AttributeError(name)
        return getattr(self._same, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._same, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._same(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _LastHop, (self._same,)
