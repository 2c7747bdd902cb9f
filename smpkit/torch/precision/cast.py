"""`fp16` and `bf16`: the model computes in half precision; what it is given and what it returns stays in float32.

Weights, activations, gradients and messages between ranks are in half precision, because there is much of them. What
half precision would ruin stays in float32: the running statistics of batch normalisation, the frequencies of rotary
positions, what a Hugging Face model asks to keep, the loss, and the master weights that the optimizer updates
(master_weights.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.torch.core.tensor_spec import map_tensors
from smpkit.torch.placement.delayed import is_delayed
from smpkit.torch.placement.shards import copy_mark_to

MASTER_KEY: Final = "master"
"""Where a parameter's entry in an optimizer's state dict has its master weight, beside its moments."""
SCALER_KEY: Final = "loss_scaler"
"""Where an optimizer's state dict has the state of the loss scale."""

_FREQUENCIES: Final = "inv_freq"
"""How names of frequencies of rotary positions end (`full_attention_inv_freq` in a Gemma 3): rounded to float16 they
turn position 4096 by a radian and more."""


def half_dtype(cfg: ModelParallelConfig) -> torch.dtype | None:
    """Return the half precision that the configuration asks for; None if it does not."""
    if cfg.fp16:
        return torch.float16
    return torch.bfloat16 if cfg.bf16 else None


def cast_model(root: nn.Module, dtype: torch.dtype, *, weights: bool = True) -> None:
    """Cast weights and buffers of floating point in place; parameters stay the same objects.

    What is kept in float32: modules of batch normalisation, rotary frequencies, and what a Hugging Face model names in
    `_keep_in_fp32_modules` (float16) or `_keep_in_fp32_modules_strict` (both).
    """
    kept = frozenset(kept_in_float32(root, dtype))
    for module in root.modules():
        for key, parameter in module.named_parameters(recurse=False) if weights else ():
            wanted = torch.float32 if (module, key) in kept else dtype
            if parameter.is_floating_point() and parameter.dtype != wanted:
                parameter.data = _cast(parameter, wanted)
        for key, buffer in module.named_buffers(recurse=False):
            # New tensors, unlike parameters: nobody else refers to buffers, but their marks must come along.
            wanted = torch.float32 if (module, key) in kept else dtype
            if buffer.is_floating_point() and buffer.dtype != wanted:
                module._buffers[key] = copy_mark_to(buffer.to(wanted), buffer)


def _cast(parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    if is_delayed(parameter):  # one element, expanded: `to` would allocate all of them
        return torch.empty((), dtype=dtype, device=parameter.device).expand(parameter.shape)
    return parameter.data.to(dtype)


def kept_in_float32(root: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, str]]:
    """Yield the weights and buffers that stay in float32 when the model computes in `dtype`: a module and its key each.

    Hugging Face's lists have names of modules, weights and buffers, or the last words of them (`gate.weight`).
    """
    lists = ["_keep_in_fp32_modules_strict"]
    if dtype is torch.float16:
        lists.append("_keep_in_fp32_modules")
    for name, module in root.named_modules():
        wanted = {name for attribute in lists for name in getattr(module, attribute, None) or ()}
        for path, inside in module.named_modules(prefix=name) if wanted else ():
            for key in (*inside._parameters, *inside._buffers):
                if any(f".{name}." in f".{path}.{key}." for name in wanted):
                    yield inside, key
        for key in (*module._parameters, *module._buffers):
            if isinstance(module, nn.modules.batchnorm._BatchNorm) or key.endswith(_FREQUENCIES):
                yield module, key


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments of the model with tensors of floating point in its precision."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, value)


def cast_outputs(value: Any, dtype: torch.dtype) -> Any:
    """Return what the model returned with tensors of its precision in float32."""
    return map_tensors(lambda tensor: tensor.to(torch.float32) if tensor.dtype == dtype else tensor, value)
