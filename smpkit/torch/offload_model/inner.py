"""What users do with the modules inside an OffloadModel, not through it: read and load their state dicts."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.offload_model.engine import Engine

__all__ = ["guard"]


def guard(modules: Iterable[nn.Module], engine: Engine) -> None:
    """Let updates end before the state dict of any of these modules is read or loaded, for as long as `engine` lives.

    Loading with `assign=True` is refused: it would put other parameters in the place of those that train.
    """
    handles: list[Any] = []
    for module in modules:
        handles.append(module.register_state_dict_pre_hook(_Guard(engine)))  # type: ignore[no-untyped-call]
        handles.append(module.register_load_state_dict_pre_hook(_Guard(engine)))  # type: ignore[no-untyped-call]
    weakref.finalize(engine, lambda: [handle.remove() for handle in handles])


class _Guard:
    """Called before a state dict is read (prefix, keep_vars) or loaded (state, prefix, metadata, ...)."""

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine = (lambda: None) if engine is None else weakref.ref(engine)

    def __reduce__(self) -> tuple[type[_Guard], tuple[()]]:
        """A copy of a module is nobody's."""
        return _Guard, ()

    def __call__(self, module: nn.Module, *details: Any) -> None:
        engine = self._engine()
        if engine is None:
            return
        if len(details) > 2 and details[2].get("assign_to_params_buffers"):
            raise UsageError(
                f"load_state_dict(assign=True) would take the parameters of this {type(module).__name__} out of its"
                " OffloadModel",
                hint="load without assign: values are copied into the parameters",
            )
        engine.synchronize()
