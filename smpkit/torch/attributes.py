"""What is written on a parameter, and the parameter itself, through copies and state dicts.

Much of what is known of a parameter stands on the object itself or goes by it: its place in the whole model, whether it
has memory yet, the hooks that reduce its gradient, its state in the optimizer.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import UnsupportedError
from smpkit.torch.state import state

__all__ = ["assignment_refusal", "keep_attributes_in_copies", "refuse_assignment"]

_ASSIGN: Final = "assign_to_params_buffers"
"""How `nn.Module.load_state_dict` tells each module of `assign=True`."""


def keep_attributes_in_copies(tensor: torch.Tensor) -> None:
    """Let `copy.deepcopy` copy what is written on a parameter, as it does for any other tensor.

    `nn.Parameter.__deepcopy__` copies values only. Without it, `copy.deepcopy` takes what pickle takes, attributes
    included.
    """
    if isinstance(tensor, nn.Parameter):
        tensor.__deepcopy__ = None  # type: ignore[method-assign, assignment]


def refuse_assignment(root: nn.Module) -> None:
    """Refuse `load_state_dict(assign=True)` for every part of a model, as long as it is the wrapped one.

    Scripted parts take no hooks. The one that a whole model has comes first, so only a part loaded by itself slips by.
    """
    for module in root.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        module.register_load_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(module: nn.Module, _: Any, __: str, metadata: dict[str, Any], *_others: Any) -> None:
    if metadata.get(_ASSIGN) and state.model is not None and any(each is module for each in state.model.modules()):
        raise assignment_refusal()


def assignment_refusal() -> UnsupportedError:
    """Return the error for `load_state_dict(assign=True)`."""
    return UnsupportedError(
        "load_state_dict(assign=True) would replace parameters that the optimizer and data parallelism know",
        hint="leave `assign` out: values are copied into the parameters",
    )
