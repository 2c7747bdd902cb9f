"""GPT-2's blocks, one by one: a public script of SMP v1 registers them, and keeps the rest of the model as it is.

::

    smp.set_tensor_parallelism(model.transformer.h)
    smp.tp_register_with_module(GPT2Block, DistributedTransformerLayer, *get_hf_gpt2_transformer_layer_hooks())

They keep their names, `transformer.h.0` say; what is inside of one is a layer of `smp.nn`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch

from smpkit.errors import UnsupportedError
from smpkit.torch.nn.huggingface.families import GPT2
from smpkit.torch.nn.huggingface.heads import refuse_others
from smpkit.torch.nn.huggingface.names import names_of_tensors, rename, translation
from smpkit.torch.tensor_parallel.layers.transformer import DistributedTransformerLayer
from smpkit.torch.tensor_parallel.registry import CallArguments, ReplacementRule, argument_names, register

__all__ = [
    "get_hf_gpt2_transformer_layer_hooks",
    "translate_hf_block_state_dict_to_smdistributed",
    "translate_layer_state_dict_to_hf_gpt2_block",
]

_MODULE: Final = "transformers.models.gpt2.modeling_gpt2"
_IN_BLOCK: Final = names_of_tensors("", "", GPT2.in_layers)
_IN_LIST: Final = names_of_tensors("*.", "*.", GPT2.in_layers)


def get_hf_gpt2_transformer_layer_hooks() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the hooks for `__init__`, for `forward` and for its result, as `smp.tp_register` takes them."""
    return _arguments_of_layer, _arguments_of_call, _result_of_block


def translate_hf_block_state_dict_to_smdistributed(
    state_dict: dict[str, Any],
    max_seq_len: int | None = None,  # noqa: ARG001  as in Family.to_distributed
) -> dict[str, Any]:
    """Return the state dict of a model whose blocks are distributed from that of Hugging Face's, which is emptied."""
    return rename(state_dict, _IN_LIST, to_hf=False, inside="h")


def translate_layer_state_dict_to_hf_gpt2_block(
    state_dict: dict[str, Any],
    max_seq_len: int | None = None,  # noqa: ARG001  as in Family.to_distributed
) -> dict[str, Any]:
    """Return the state dict of Hugging Face's model from that of one whose blocks are distributed, which is emptied."""
    return rename(state_dict, _IN_LIST, to_hf=True, inside="h")


def _arguments_of_layer(config: Any, layer_idx: int | None = None) -> CallArguments:
    arguments = {**GPT2.arguments_of(config, {}), "layer_idx": layer_idx}
    taken = argument_names(DistributedTransformerLayer)
    return (), {name: value for name, value in arguments.items() if name in taken}


def _arguments_of_call(*args: Any, **kwargs: Any) -> CallArguments:
    forward = inspect.signature(_block_class().forward)  # its order differs from release to release
    call = forward.bind(None, *args, **kwargs).arguments
    others = {**call.pop("kwargs", {}), **call}
    hidden, mask = others.pop("hidden_states"), others.pop("attention_mask", None)
    if others.pop("past_key_values", None) is not None:
        raise UnsupportedError("a block of GPT-2 that is distributed keeps no cache", hint="set `use_cache = False`")
    for name in ("self", "use_cache", "position_ids", "cache_position"):  # of no importance to a block without a cache
        others.pop(name, None)
    refuse_others(others, None)
    return ((hidden, mask),), {}


def _result_of_block(result: tuple[torch.Tensor, ...]) -> Any:
    """Return hidden states, or in releases whose blocks return more the tuple that begins with them."""
    returned = inspect.signature(_block_class().forward).return_annotation
    return result[0] if returned is torch.Tensor else (result[0],)


def _block_class() -> Any:
    return importlib.import_module(_MODULE).GPT2Block


def _arguments_of_block(block: Any) -> CallArguments:
    return (block.attn.config, block.attn.layer_idx), {}


def _refusal(block: Any) -> str | None:
    if not hasattr(block.attn, "config"):
        return "this release of transformers does not keep the configuration in it"
    return GPT2.refusal(block.attn.config)


register(
    ReplacementRule(
        f"{_MODULE}.GPT2Block",
        DistributedTransformerLayer,
        *get_hf_gpt2_transformer_layer_hooks(),
        arguments=_arguments_of_block,
        to_distributed=translation(_IN_BLOCK, to_hf=False),
        from_distributed=translation(_IN_BLOCK, to_hf=True),
        refusal=_refusal,
    )
)
