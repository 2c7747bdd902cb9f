"""`generate` of a Hugging Face model that tensor parallelism has replaced: Hugging Face's own, around the new forward.

Hugging Face's loop calls a model for the logits of the next token. It is given a proxy: an instance of the replaced
class, without weights, whose forward calls the distributed model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.layouts import Layout, stack_layout
from smpkit.torch.tensor_parallel.replace import applied_rule_of

__all__ = ["generate"]

_PER_SAMPLE_ARGUMENTS: Final = ("inputs", "input_ids", "attention_mask", "position_ids", "token_type_ids")
_PROXY: Final = "_smp_shell"


def generate(model: nn.Module, **arguments: Any) -> Any:
    """Return what `generate` of the replaced model would, computed without a cache; see HuggingFaceLMHead.generate.

    Raises:
        UsageError: over a pipeline, or without a prompt.
        UnsupportedError: of a model without a head, with a cache, or with `max_time`.
    """
    _check(model, arguments)
    arguments["use_cache"] = False
    ranks_have_own_samples = not state.cfg.prescaled_batch
    if ranks_have_own_samples:
        # All ranks generate for all samples, so that they stop at the same token, and keep their own in the end.
        for name in _PER_SAMPLE_ARGUMENTS:
            value = arguments.get(name)
            if isinstance(value, torch.Tensor):
                arguments[name] = collectives.gather_from_tp(value.to(state.device), 0)
    with _rng_of_first_rank():
        made = _proxy_of(model).generate(**arguments)
    return _own_samples(made) if ranks_have_own_samples else made


def _check(model: nn.Module, arguments: dict[str, Any]) -> None:
    if getattr(model, "lm_head", None) is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no head, so it cannot generate", hint="use a ...LMHeadModel"
        )
    if state.pp_size > 1:
        raise UsageError(
            "`generate` was called on a model that lies on several pipeline ranks",
            hint="load `model.original_state_dict()` into the original class, and generate there",
        )
    if arguments.get("use_cache"):
        raise UnsupportedError(
            "a model that tensor parallelism has replaced keeps no cache, so it cannot `generate(use_cache=True)`",
            hint="leave `use_cache` out, or load `model.original_state_dict()` into the original class",
        )
    if arguments.get("max_time") or getattr(arguments.get("generation_config"), "max_time", None):
        raise UnsupportedError(
            "`max_time` would let tensor-parallel ranks stop at different tokens", hint="limit `max_new_tokens`"
        )
    if arguments.get("inputs") is None and arguments.get("input_ids") is None:
        raise UsageError("`generate` was called without a prompt", hint="pass `input_ids`, at least a first token each")


def _own_samples(made: Any) -> Any:
    """Return this rank's rows of tensors with those of the whole group; other values as they are."""
    if isinstance(made, torch.Tensor):
        length = made.shape[0] // state.tp_size
        return made.narrow(0, length * state.tp_rank, length)
    if isinstance(made, tuple):
        return tuple(map(_own_samples, made))
    if isinstance(made, dict):  # a ModelOutput
        return type(made)(**{name: _own_samples(value) for name, value in made.items()})
    return made


@contextlib.contextmanager
def _rng_of_first_rank() -> Iterator[None]:
    """Draw the random numbers of tp_rank 0 on all ranks of the group; only its generators keep their new state."""
    group = collectives.tp_group()
    before = [generator.get_state() for generator in _generators()]
    first = [each.to(state.device, copy=True) for each in before]
    with waiting("the random numbers of tp_rank 0", group):
        for each in first:
            dist.broadcast(each, group=group, group_src=0)
    _set_rng_states([each.cpu() for each in first])
    try:
        yield
    finally:
        if state.tp_rank:
            _set_rng_states(before)


def _set_rng_states(states: list[torch.Tensor]) -> None:
    for generator, each in zip(_generators(), states, strict=True):
        generator.set_state(each)


def _generators() -> list[devices.Generator]:
    """Return the generators of the CPU and of this rank's accelerator, if it has one."""
    own = devices.default_generator(state.device)
    return [torch.default_generator] if own is torch.default_generator else [torch.default_generator, own]


def _pad_to_divisible(of_positions: torch.Tensor) -> torch.Tensor:
    """Pad sequences with zeros if they are divided over the ranks; no earlier position sees these."""
    missing = -of_positions.shape[1] % state.tp_size if stack_layout() is Layout.SHARD_SEQUENCE else 0
    return functional.pad(of_positions, (0, missing)) if missing else of_positions


# --- the proxy that Hugging Face calls --------------------------------------------------------------------------------


def _proxy_of(model: nn.Module) -> Any:
    proxy: Any = vars(model).get(_PROXY)
    if proxy is None:
        rule, config = applied_rule_of(model), getattr(model, "config", None)
        assert rule is not None
        kind: Any = rule.original_class
        made: Any = type(kind.__name__, (_GenerateProxy, kind), {"__module__": kind.__module__})
        with torch.random.fork_rng([]), torch.device("meta"):
            proxy = made(config)
        vars(proxy)["_smp_model"] = model  # past nn.Module's registration, in both directions
        vars(model)[_PROXY] = proxy
    # Users change it on the model that they hold.
    proxy.generation_config = getattr(model, "generation_config", proxy.generation_config)
    return proxy


class _GenerateProxy:
    """A mixin for a model without weights: its forward calls the distributed model."""

    @property
    def device(self) -> torch.device:
        return state.device

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        model: nn.Module = vars(self)["_smp_model"]
        named = {"attention_mask": attention_mask, "position_ids": position_ids, "token_type_ids": token_type_ids}
        given = {name: value for name, value in named.items() if value is not None}
        if state.cfg.prescaled_batch:
            last = input_ids.shape[1] - 1
            named = {name: _pad_to_divisible(value) for name, value in {"input_ids": input_ids, **given}.items()}
            return CausalLMOutputWithPast(logits=model(**named, **others)["logits"][:, last : last + 1])
        own = {name: _own_samples(value) if len(value) == len(input_ids) else value for name, value in given.items()}
        logits = model(input_ids=_own_samples(input_ids), **own, **others)["logits"][:, -1:]
        return CausalLMOutputWithPast(logits=collectives.gather_from_tp(logits, 0))
