"""Run something on all ranks: all of them succeed, or all of them raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from smpkit.errors import CheckpointError, SmpkitError, UsageError
from smpkit.torch.comm import allgather
from smpkit.torch.state import state

__all__ = ["Model", "Optimizer", "all_or_raise", "wrapped_model"]

_T = TypeVar("_T")


class Model(Protocol):
    """What is asked of a wrapped model."""

    module: nn.Module
    pipeline: Any
    partitioned: bool

    data_parallel: Any

    def holds(self, parameter: Any) -> bool: ...
    def owns(self, parameter: Any) -> bool: ...
    def random_state(self) -> Mapping[str, int]: ...
    def load_random_state(self, kept: Mapping[str, int]) -> None: ...


class Optimizer(Protocol):
    """What is asked of a wrapped optimizer."""

    masters: Any

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    def local_state_dict(self, gather_if_shard: bool = ...) -> dict[str, Any]: ...
    def model_parameter(self, parameter: torch.Tensor) -> torch.Tensor: ...
    def refresh_masters(self) -> None: ...
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


def wrapped_model(model: Model | None = None) -> Model:
    """Return the model that is meant: the last one that was wrapped if none is given.

    Raises:
        UsageError: there is none.
    """
    found: Any = model if model is not None else state.model
    if found is None:
        raise UsageError("there is no model to save or load", hint="wrap it with smp.DistributedModel(...) first")
    return found  # type: ignore[no-any-return]


def all_or_raise(what: str, attempt: Callable[[], _T]) -> _T:
    """Let every rank try; return the own result, or raise CheckpointError on all of them, naming those that failed."""
    cause: Exception | None = None
    try:
        result = attempt()
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        cause = error
    errors = allgather(None if cause is None else _message(cause))
    failed = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
    if failed:
        hint = cause.hint if isinstance(cause, SmpkitError) else None
        raise CheckpointError(f"{what}; {'; '.join(failed)}", hint=hint) from cause
    return result


def _message(error: Exception) -> str:
    return error.message if isinstance(error, SmpkitError) else f"{type(error).__name__}: {error}"
