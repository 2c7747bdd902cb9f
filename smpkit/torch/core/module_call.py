"""What happens between `module(...)` and its forward: where the call runs, and whether it is recomputed in backward.

::

    module(x)   nn.Module.__call__   ModuleCall               checkpointing   the module's own call
                                     (its subclasses: where   (settings of    (hooks and forward,
                                      and how a call runs)     the user's)     or compiled)

Nothing is wrapped: names, classes and state dicts stay the user's, and copies of a module are plain modules again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

OriginalCall = Callable[..., Any]
CallWrapper = Callable[[OriginalCall], OriginalCall]
"""Wraps a call in another."""


class ModuleCall:
    """The call of one module, in the slot that `module.compile()` fills.

    `nn.Module.__call__` looks there first, and pickling and deep copies leave it out.
    """

    pp_ranks: frozenset[int] = frozenset()
    """Pipeline ranks on which parts of the module lie; empty if it holds nothing or there is no pipeline."""
    stream: str | None = None
    """The name by which the call moves its caller's stream of random numbers on; None: it does not move it."""

    def __init__(self, module: nn.Module) -> None:
        compiled = module._compiled_call_impl
        previous = compiled if isinstance(compiled, ModuleCall) else None
        self.is_compiled: bool = compiled is not None if previous is None else previous.is_compiled
        """Whether `module.compile()` was called before."""
        self.original: OriginalCall = compiled or module._call_impl if previous is None else previous.original
        self.checkpointing: CallWrapper | None = None if previous is None else previous.checkpointing

    @classmethod
    def of(cls, module: nn.Module) -> ModuleCall:
        """Return the module's call, or a new one that is not stored in the module."""
        call = module._compiled_call_impl
        return call if isinstance(call, ModuleCall) else cls(module)

    @classmethod
    def on(cls, module: nn.Module) -> ModuleCall:
        """Return the module's call, stored in the module, so that setting its attributes has an effect."""
        call = cls.of(module)
        module._compiled_call_impl = call
        return call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.original if self.checkpointing is None else self.checkpointing(self.original))(*args, **kwargs)

    def run(self, wrapper: CallWrapper | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module with `wrapper` in place of its own checkpointing."""
        call = copy.copy(self)
        call.checkpointing = wrapper
        return call(*args, **kwargs)


@contextlib.contextmanager
def on_module_created(callback: Callable[[nn.Module], object]) -> Iterator[None]:
    """Call `callback` with every module that is created in this block; the callback of an inner block runs last."""
    original_init = nn.Module.__init__

    @functools.wraps(original_init)
    def observed_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        callback(self)

    nn.Module.__init__ = observed_init  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = original_init  # type: ignore[method-assign]


def expose_original_forwards(module: nn.Module) -> None:
    """Expose the `forward` of every base class of the model's classes as `_orig_forward`."""
    # SMP v1 replaced `forward` on classes, so `super().forward()` recursed without end there, and its guide told
    # scripts to call `super()._orig_forward()`. Here both work.
    bases = {base for part in module.modules() for base in type(part).__mro__[1:]}
    for base in bases - {nn.Module, object}:
        forward = vars(base).get("forward")
        if forward is not None and "_orig_forward" not in vars(base):
            setattr(base, "_orig_forward", forward)  # noqa: B010  type checkers know no such attribute
