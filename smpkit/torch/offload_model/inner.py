"""State dicts of modules inside an OffloadModel: wait for updates before they are read or loaded."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.offload_model.engine import SliceEngine

__all__ = ["synchronize_on_state_dict"]


def synchronize_on_state_dict(modules: Iterable[nn.Module], engine: SliceEngine) -> None:
    """Wait for updates before the state dict of any of these modules is read or loaded, while `engine` lives.

    Loading with `assign=True` is refused: it would put other parameters in the place of those that train.
    """
    handles: list[Any] = []
    for module in modules:
        handles.append(module.register_state_dict_pre_hook(_SynchronizeHook(engine)))  # type: ignore[no-untyped-call]
        handles.append(module.register_load_state_dict_pre_hook(_SynchronizeHook(engine)))  # type: ignore[no-untyped-call]
    weakref.finalize(engine, lambda: [handle.remove() for handle in handles])


class _SynchronizeHook:
    """Called before a state dict is read (prefix, keep_vars) or loaded (state, prefix, metadata, ...)."""

    def __init__(self, engine: SliceEngine | None = None) -> None:
        self._engine = (lambda: None) if engine is None else weakref.ref(engine)

    def __reduce__(self) -> tuple[type[_SynchronizeHook], tuple[()]]:
        """Make a copy of the module independent of the engine."""
        return _SynchronizeHook, ()

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
