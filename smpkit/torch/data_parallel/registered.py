"""`smp.register_parameter`: parameters that are used outside of the modules that own them.

Sharded data parallelism gathers a block before its own forward. Other modules find its parameters divided, unless the
block stays gathered after its forward, as it does for those that are registered here.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from smpkit.errors import UsageError

__all__ = ["is_registered", "register_parameter"]

_MARK: Final = "_smp_used_outside"


def register_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Say that a module uses a parameter of another module, whose forward comes first.

    With `sharded_data_parallel_degree`, the block that owns it stays gathered from its forward to its backward. Call it
    before `smp.DistributedModel`; parameters outside of repeated layers are gathered all the time, and need it not.

    Args:
        module: what uses the parameter.
        param: the parameter, also one of `module` itself.

    Raises:
        UsageError: these are no module and no parameter, or the model is divided already.
    """
    given: tuple[Any, Any] = (module, param)
    if not (isinstance(given[0], nn.Module) and isinstance(given[1], nn.Parameter)):
        raise UsageError(
            f"register_parameter got `{type(module).__name__}` and `{type(param).__name__}`",
            hint="give it an nn.Module and an nn.Parameter",
        )
    if hasattr(param, "ds_tensor"):
        raise UsageError("the model is divided already", hint="register parameters before smp.DistributedModel(...)")
    setattr(param, _MARK, True)


def is_registered(param: nn.Parameter) -> bool:
    """Return whether a parameter is used outside of the module that owns it."""
    return hasattr(param, _MARK)
