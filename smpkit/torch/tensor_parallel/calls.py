"""Call a distributed module as the module whose place it took was called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

__all__ = ["wrap_forward"]


def wrap_forward(
    module: nn.Module,
    forward_hook: Callable[..., tuple[Iterable[Any], Mapping[str, Any]]] | None,
    return_hook: Callable[[Any], Any] | None,
) -> None:
    """Let a module's forward take and return what other conventions say.

    Args:
        forward_hook: from the arguments of a call to those of the module's own forward.
        return_hook: from the module's own result to that of a call.
    """
    if forward_hook is not None or return_hook is not None:
        # On the instance, where nn.Module looks first: hooks that users register see the values they know.
        object.__setattr__(module, "forward", _WrappedForward(module, forward_hook, return_hook))


class _WrappedForward:
    """The forward of one module; an object, because copies of a module copy it with them."""

    def __init__(
        self,
        module: nn.Module,
        forward_hook: Callable[..., tuple[Iterable[Any], Mapping[str, Any]]] | None,
        return_hook: Callable[[Any], Any] | None,
    ) -> None:
        self._module = module
        self._forward_hook = forward_hook
        self._return_hook = return_hook
        if forward_hook is not None:
            self.__signature__ = inspect.signature(forward_hook)  # for those who ask which arguments a model takes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward_hook is not None:
            made_args, made_kwargs = self._forward_hook(*args, **kwargs)
            args, kwargs = tuple(made_args), dict(made_kwargs)
        result = type(self._module).forward(self._module, *args, **kwargs)
        return result if self._return_hook is None else self._return_hook(result)
