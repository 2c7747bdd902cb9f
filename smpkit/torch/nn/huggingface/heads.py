"""The modules of `smp.nn` that replace Hugging Face models: their arguments, outputs and registration."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.nn.huggingface.generation import generate
from smpkit.torch.nn.huggingface.names import WeightMapping, translation
from smpkit.torch.tensor_parallel.layers.lm_head import DistributedTransformerLMHead, Inputs
from smpkit.torch.tensor_parallel.layers.options import IGNORED_OPTIONS, LayerOptions, activation_of
from smpkit.torch.tensor_parallel.layers.transformer import DistributedTransformer, LayerInputs
from smpkit.torch.tensor_parallel.loss import gather_logits, with_lazy_logits
from smpkit.torch.tensor_parallel.registry import ReplacementRule, register

__all__ = ["HuggingFaceEncoder", "HuggingFaceLMHead", "lm_head_call", "refuse_arguments", "register_model"]


def _with_options(kind: type) -> inspect.Signature:
    """Return the signature of a class with its `**options` spelled out: `with_overrides` goes by argument names."""
    known = inspect.signature(kind).parameters.values()
    named = [each for each in known if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [field.name for field in dataclasses.fields(LayerOptions)] + sorted(IGNORED_OPTIONS)
    excluded = {each.name for each in named} | {"layer_idx", "window_size"}  # which a stack sets for each layer
    optional = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in options]
    return inspect.Signature([*named, *(each for each in optional if each.name not in excluded)])


class HuggingFaceLMHead(DistributedTransformerLMHead):
    """A language model that returns what Hugging Face's return: `output["loss"]`, `output["logits"]`.

    With labels, logits are gathered when they are first read, which all ranks of the tensor-parallel group do together.
    """

    __signature__ = _with_options(DistributedTransformerLMHead)

    def forward(self, inputs: Inputs) -> Any:
        """Return a `CausalLMOutputWithCrossAttentions`, or without a head a `BaseModelOutputWithPast`."""
        from transformers import modeling_outputs

        config: Any = self.config
        if inputs[1] is None and inputs[3] is not None and not getattr(config, "use_cache", True):
            inputs = (inputs[0], _packed_sequence_mask(inputs[3]), *inputs[2:])
        result = super().forward(inputs)
        if self.lm_head is None:
            assert isinstance(result, torch.Tensor)
            return modeling_outputs.BaseModelOutputWithPast(last_hidden_state=result)
        gather = functools.partial(gather_logits, num_classes=self.vocab_size, boundary=self.boundary)
        if isinstance(result, tuple):
            output = modeling_outputs.CausalLMOutputWithCrossAttentions(loss=result[0], logits=result[1])
            return with_lazy_logits(output, gather)
        return modeling_outputs.CausalLMOutputWithCrossAttentions(logits=gather(result))

    def generate(self, inputs: torch.Tensor | None = None, **arguments: Any) -> Any:
        """Return what `generate` of the replaced model would, for the same arguments, computed without a cache.

        All ranks of the tensor-parallel group call this together. Where each brings its own samples, each gets its rows
        of what the samples of the whole group become, padded to the longest of these. Samples are drawn with the random
        numbers of the first rank.

        Raises:
            UsageError: over a pipeline, or without a prompt.
            UnsupportedError: of a model without a head, with a cache, or with `max_time`.
        """
        return generate(self, **({} if inputs is None else {"inputs": inputs}), **arguments)


class HuggingFaceEncoder(DistributedTransformer):
    """A stack of layers that returns what Hugging Face's encoders return."""

    __signature__ = _with_options(DistributedTransformer)

    def forward(self, inputs: LayerInputs) -> Any:
        """Return a `BaseModelOutputWithPastAndCrossAttentions`."""
        from transformers import modeling_outputs

        hidden = super().forward(inputs)[0]
        return modeling_outputs.BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)


# --- registration -----------------------------------------------------------------------------------------------------


def register_model(
    original: str,
    distributed: type[nn.Module],
    init_hook: Callable[[Any], dict[str, Any]],
    forward_hook: Callable[..., tuple[Iterable[Any], Mapping[str, Any]]],
    names: Callable[[nn.Module], Sequence[WeightMapping]],
    refusal: Callable[[Any], str | None] | None = None,
) -> None:
    """Let a class of Hugging Face's, all of which are made from a `config`, be replaced.

    Args:
        original: its qualified name.
        init_hook: the distributed class's arguments, from the config.
        names: of the tensors of a distributed module.
        refusal: why a model of this config cannot be replaced; None if it can.
    """

    def refused(module: nn.Module) -> str | None:
        config: Any = module.config
        try:
            activation_of(getattr(config, "activation_function", None) or config.hidden_act)
        except UsageError as error:
            return error.message
        return None if refusal is None else refusal(config)

    register(
        ReplacementRule(
            original,
            distributed,
            init_hook=lambda config: ((), init_hook(config)),
            forward_hook=forward_hook,
            arguments=lambda module: ((module.config,), {}),
            to_distributed=translation(names, to_hf=False),
            from_distributed=translation(names, to_hf=True),
            finish=_copy_config,
            refusal=refused,
        )
    )


def _copy_config(original: nn.Module, distributed: nn.Module) -> None:
    """Copy what scripts read from a model to the distributed module."""
    for name in ("config", "generation_config"):
        if hasattr(original, name):
            object.__setattr__(distributed, name, getattr(original, name))


# --- calls ------------------------------------------------------------------------------------------------------------


def refuse_arguments(**given: Any) -> None:
    """Raise UnsupportedError if an argument is given that distributed models do not take."""
    for name, value in given.items():
        if value is not None and value is not False and not (isinstance(value, int) and value == 0):
            raise UnsupportedError(
                f"a model that tensor parallelism has replaced cannot be called with `{name}`",
                hint="leave it out, or load the weights (`original_state_dict`) into the original model",
            )


def lm_head_call(
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    labels: torch.Tensor | None,
    cross: tuple[torch.Tensor | None, ...] = (),
    *,
    use_cache: bool | None,
    return_dict: bool | None = None,
    **refused: Any,
) -> tuple[tuple[Any], dict[str, Any]]:
    """Return the one argument of DistributedTransformerLMHead.

    Args:
        cross: states and their mask, for models with cross attention.
        use_cache: no cache is made, but with False positions tell of several sequences packed into a sample.
        return_dict: only False matters, which is refused.
        refused: arguments that must not be given.
    """
    refuse_arguments(**refused)
    if return_dict is False:
        raise UnsupportedError(
            "a model that tensor parallelism has replaced cannot be called with `return_dict=False`",
            hint="leave it out: `output[0]` reads what comes first of either",
        )
    if position_ids is not None and attention_mask is None and use_cache is False:
        attention_mask = _packed_sequence_mask(position_ids)
    return ((input_ids, attention_mask, None, position_ids, *cross, labels),), {}


def _packed_sequence_mask(positions: torch.Tensor) -> torch.Tensor:
    """Return an additive mask (batch, 1, length, length) that separates sequences packed into one sample.

    Hugging Face's models do so when they make no cache. A new sequence begins where a position is not one more than the
    position before. No value is read on the host, so that the step can be traced on fake tensors.
    """
    begins = positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1
    sequence = begins.cumsum(-1)
    others = sequence.unsqueeze(1) != sequence.unsqueeze(2)
    return torch.zeros(others.shape, device=positions.device).masked_fill(others, -torch.inf).unsqueeze(1)
