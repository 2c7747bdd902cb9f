"""Mark modules for tensor parallelism: where they are made, or afterwards. `DistributedModel` then replaces them.

Marks are attributes of the modules, so copies keep them; `marking_of` reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.arguments import check_module
from smpkit.torch.core.module_call import on_module_created
from smpkit.torch.core.runtime import state
from smpkit.torch.placement.delayed import delay_param_initialization

_ATTRIBUTE: Final = "_smp_tensor_parallelism"
_LOADED: Final = "_smp_weights_were_loaded"


@dataclass(frozen=True)
class Marking:
    """The user's choice for one module.

    Args:
        enabled: whether to distribute it.
        config: arguments of distributed classes that the user gave, by name.
    """

    enabled: bool
    config: Mapping[str, Any]


def marking_of(module: nn.Module) -> Marking | None:
    """Return the user's choice for a module; None if there is none."""
    marking: Marking | None = vars(module).get(_ATTRIBUTE)
    return marking


def _mark(module: nn.Module, marking: Marking) -> None:
    if marking_of(module) is None:
        module.register_load_state_dict_post_hook(_note_loading)  # type: ignore[no-untyped-call]
    # An attribute, so that copies of the module have it too (`nn.TransformerEncoder` copies its layer).
    object.__setattr__(module, _ATTRIBUTE, marking)


def _note_loading(module: nn.Module, _: object) -> None:
    object.__setattr__(module, _LOADED, True)


def loaded_modules(root: nn.Module) -> set[int]:
    """Return the ids of marked modules into which weights were loaded: by `load_state_dict`, or `from_pretrained`."""
    loaded: set[int] = set()
    for module in root.modules():
        path: Any = getattr(getattr(module, "config", None), "_name_or_path", None)
        if _LOADED in vars(module) or path:
            loaded.update(map(id, module.modules()))
    return loaded


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **tensor_parallel_config: Any) -> Iterator[None]:
    """Distribute the supported modules that are created in this block over the tensor-parallel ranks.

    Works as a decorator too. `smp.DistributedModel` does the work: of nested supported modules it replaces the
    outermost. What it leaves as it is, it says in the log, with the reason. The innermost block wins.

    Args:
        enabled: False excepts the modules of this block from an outer one.
        tensor_parallel_config: arguments of the distributed classes, which override what a registered `init_hook`
            makes; a class that has no argument of a name takes no notice.
    """
    marking = Marking(enabled, tensor_parallel_config)
    with on_module_created(lambda module: _mark(module, marking)):
        yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **tensor_parallel_config: Any) -> None:
    """Distribute the supported modules of a tree that exists, or except it; before it is wrapped.

    A later call for a part of the tree overrides an earlier one for the whole.

    Args:
        enabled: False excepts the module with everything in it.
        tensor_parallel_config: as in `smp.tensor_parallelism`.

    Raises:
        UsageError: the model has been wrapped, or this is no module.
    """
    check_module("smp.set_tensor_parallelism", module)
    if state.model is not None and any(part is module for part in state.model.modules()):
        raise UsageError(
            "the model has been wrapped", hint="call smp.set_tensor_parallelism before smp.DistributedModel"
        )
    marking = Marking(enabled, tensor_parallel_config)
    for part in module.modules():
        _mark(part, marking)


_marked, _delayed = tensor_parallelism, delay_param_initialization  # `model_creation` has arguments of these names


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False,
    dtype: torch.dtype | None = None,
    *,
    delayed_parameter_initialization: bool | None = None,
    delay_param_initialization: bool | None = None,
    **tensor_parallel_config: Any,
) -> Iterator[None]:
    """Create a model in this block: `smp.tensor_parallelism`, `smp.delay_param_initialization` and a dtype in one.

    Args:
        tensor_parallelism: distribute the supported modules that are created in this block.
        dtype: of floating-point parameters; None: torch's default.
        delayed_parameter_initialization: create parameters without memory; None: as the configuration says. SMP v1's
            documents also call it `delay_param_initialization`.
        tensor_parallel_config: as in `smp.tensor_parallelism`.

    Raises:
        UsageError: `dtype` is no floating-point dtype, or the two names of the delay contradict each other.
    """
    value: object = dtype
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise UsageError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    with (
        _marked(tensor_parallelism, **tensor_parallel_config),
        _delayed(_delay(delayed_parameter_initialization, delay_param_initialization)),
        default_dtype(dtype),
    ):
        yield


def _delay(first: bool | None, second: bool | None) -> bool:
    answers = {answer for answer in (first, second) if answer is not None}
    if len(answers) > 1:
        raise UsageError(
            "delayed_parameter_initialization and delay_param_initialization are one argument, and were given as"
            f" {first} and {second}",
            hint="leave one of them out",
        )
    return answers.pop() if answers else state.cfg.delayed_parameter_initialization


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Set torch's default dtype in this block; None leaves it as it is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
