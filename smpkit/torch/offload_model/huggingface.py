"""Hugging Face models as chains of layers: everything before the blocks, each block, and the head.

::

    _BeforeBlocks ──_BlockInput──► _Block 0 ──_BlockInput──► _Block 1 ──► ... ──► _Head

What comes before the blocks is the model's own code. It runs with a `_Recorder` in the blocks' place, which records the
arguments of each block and ends the code after the last one. transformers is imported only for models of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from smpkit.errors import UnsupportedError, UsageError

__all__ = ["KNOWN", "known_layers"]


class _Family(NamedTuple):
    """The paths of a model's parts."""

    root: str
    """The module that calls the blocks, directly or through its children."""
    blocks: str
    ending: tuple[str, ...]
    """Modules called after the blocks, one after the other; some are None in some sizes of a model."""


_LIKE_LLAMA: Final = _Family("model", "model.layers", ("model.norm", "lm_head"))
_LIKE_GPT2: Final = _Family("transformer", "transformer.h", ("transformer.ln_f", "lm_head"))
_OPT: Final = "model.decoder"
_MASKED: Final = "BertForMaskedLM"
_FAMILIES: Final = {
    "BloomForCausalLM": _LIKE_GPT2,
    "FalconForCausalLM": _LIKE_GPT2,
    "GPT2LMHeadModel": _LIKE_GPT2,
    "GPTNeoXForCausalLM": _Family("gpt_neox", "gpt_neox.layers", ("gpt_neox.final_layer_norm", "lm_head")),
    "Gemma2ForCausalLM": _LIKE_LLAMA,
    "Gemma3ForCausalLM": _LIKE_LLAMA,
    "GemmaForCausalLM": _LIKE_LLAMA,
    "LlamaForCausalLM": _LIKE_LLAMA,
    "MistralForCausalLM": _LIKE_LLAMA,
    "MixtralForCausalLM": _LIKE_LLAMA,
    "OPTForCausalLM": _Family(_OPT, f"{_OPT}.layers", (f"{_OPT}.final_layer_norm", f"{_OPT}.project_out", "lm_head")),
    "PhiForCausalLM": _Family("model", "model.layers", ("model.final_layernorm", "lm_head")),
    "Qwen2ForCausalLM": _LIKE_LLAMA,
    "Qwen3ForCausalLM": _LIKE_LLAMA,
    _MASKED: _Family("bert", "bert.encoder.layer", ("cls",)),
}
"""For each there is a test that it trains to the same bits as the plain model."""
KNOWN: Final = tuple(_FAMILIES)
"""The classes of transformers that `known_layers` takes apart."""


class _Call(NamedTuple):
    """A block's arguments besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _CallOrder:
    """The index in `calls` of each block."""

    # Not a list, which would be searched for tensors at every slice boundary.

    def __init__(self) -> None:
        self.calls: list[int] = []


class _BlockInput(NamedTuple):
    """What goes from block to block; only `hidden` changes, so only `hidden` is offloaded at every slice boundary."""

    hidden: Tensor
    calls: tuple[_Call, ...]
    """The different calls: most models call all blocks with the same arguments."""
    order: _CallOrder
    labels: Tensor | None


def known_layers(model: Any) -> list[nn.Module] | None:
    """Return the layers of a Hugging Face model of a known family; None for any other object.

    Raises:
        UnsupportedError: the model skips blocks at random, or its loss needs further outputs of the blocks.
    """
    family = _FAMILIES.get(type(model).__name__)
    if family is None or not type(model).__module__.startswith("transformers."):
        return None
    for option in ("layerdrop", "output_router_logits"):
        value = getattr(model.config, option, None)
        if value:
            raise UnsupportedError(
                f"an OffloadModel does not train a {type(model).__name__} with {option}={value}",
                hint=f"set config.{option} to {type(value)()} before the model is made",
            )
    blocks = list(attrgetter(family.blocks)(model))
    head = [module for module in (attrgetter(path)(model) for path in family.ending) if module is not None]
    before = list(_others(model, {id(module) for module in (*blocks, *head)}))
    return [
        _BeforeBlocks(model, family, before),
        *(_Block(block, number) for number, block in enumerate(blocks)),
        _Head(model, head),
    ]


def _others(module: nn.Module, taken: set[int]) -> Iterator[nn.Module]:
    """Yield the outermost modules that neither are nor contain one of `taken`."""
    for child in module.children():
        if id(child) not in taken:
            mixed = any(id(inner) in taken for inner in child.modules())
            yield from _others(child, taken) if mixed else (child,)


class _BeforeBlocks(nn.Module):
    """Embeddings, masks and positions, made by the model's own code."""

    def __init__(self, model: Any, family: _Family, before: list[nn.Module]) -> None:
        super().__init__()
        self.before = nn.ModuleList(before)
        path, _, self._name = family.blocks.rpartition(".")
        # In a tuple, so that they do not become children: the blocks in them belong to other slices.
        self._root_and_owner = attrgetter(family.root, path)(model)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> _BlockInput:
        _check_options(options)
        named = {"attention_mask": attention_mask, "position_ids": position_ids, "token_type_ids": token_type_ids}
        given = {name: value for name, value in named.items() if value is not None}
        root, owner = self._root_and_owner
        blocks = owner._modules[self._name]
        recorder = _Recorder(len(blocks), type(root).__name__)
        owner._modules[self._name] = nn.ModuleList([recorder] * len(blocks))
        try:
            root(input_ids, use_cache=False, **given)
        except _BlocksDoneError:
            return _BlockInput(recorder.hidden, tuple(recorder.calls), recorder.order, labels)
        finally:
            owner._modules[self._name] = blocks
        raise recorder.left_out()


class _BlocksDoneError(Exception):
    """Ends the model's own code after its last block."""


class _Recorder(nn.Module):
    """Stands in for all blocks, and records their calls."""

    hidden: Tensor

    def __init__(self, count: int, whose: str) -> None:
        super().__init__()
        self._count, self._whose = count, whose
        self.calls: list[_Call] = []
        self.order = _CallOrder()

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> _PlaceholderOutput:
        if not self.order.calls:
            self.hidden = hidden
        call = _Call(args, kwargs)
        known = (number for number, other in enumerate(self.calls) if _are_same(call, other))
        number = next(known, len(self.calls))
        if number == len(self.calls):
            self.calls.append(call)
        self.order.calls.append(number)
        if len(self.order.calls) == self._count:
            raise _BlocksDoneError
        return _PlaceholderOutput(self)

    def left_out(self) -> UsageError:
        """Return the error for a model that has not called all of its blocks."""
        return UsageError(
            f"a {self._whose} has called {len(self.order.calls)} of its {self._count} blocks",
            hint="remove blocks from the model, not only from its config",
        )


class _PlaceholderOutput:
    """Stands for the output of a block, itself or first in a tuple; code that computes with it gets an error."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def __getitem__(self, index: int) -> _PlaceholderOutput:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._recorder.left_out()


def _are_same(one: _Call, other: _Call) -> bool:
    """Return whether two blocks get the same objects."""
    return (
        one.kwargs.keys() == other.kwargs.keys()
        and len(one.args) == len(other.args)
        and all(p is q for p, q in zip(one.args, other.args, strict=True))
        and all(value is other.kwargs[name] for name, value in one.kwargs.items())
    )


class _Block(nn.Module):
    def __init__(self, block: nn.Module, number: int) -> None:
        super().__init__()
        self.block, self._number = block, number

    def forward(self, block_input: _BlockInput) -> _BlockInput:
        args, kwargs = block_input.calls[block_input.order.calls[self._number]]
        value = self.block(block_input.hidden, *args, **kwargs)
        return block_input._replace(hidden=value[0] if isinstance(value, tuple) else value)


class _Head(nn.Module):
    def __init__(self, model: Any, behind: list[nn.Module]) -> None:
        super().__init__()
        self.behind = nn.ModuleList(behind)  # the attribute's name is part of state dicts
        self._config = model.config
        self._masked = type(model).__name__ == _MASKED
        self._loss_function = _masked_loss if self._masked else model.loss_function

    def forward(self, block_input: _BlockInput) -> Any:
        from transformers.modeling_outputs import CausalLMOutput, MaskedLMOutput

        logits, labels, loss = block_input.hidden, block_input.labels, None
        for module in self.behind:
            logits = module(logits)
        if (cap := getattr(self._config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        if labels is not None:
            loss = self._loss_function(logits, labels, vocab_size=self._config.vocab_size)
        return (MaskedLMOutput if self._masked else CausalLMOutput)(loss=loss, logits=logits)


def _masked_loss(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    return functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


def _check_options(options: dict[str, Any]) -> None:
    """Accept options that training scripts pass with their default meaning; refuse all others."""
    for name, value in options.items():
        if value is not None and (name, value) not in _HARMLESS:
            raise UnsupportedError(
                f"`{name}` is not something that a Hugging Face model takes inside an OffloadModel",
                hint="pass input_ids, attention_mask, position_ids and labels; it returns logits and loss",
            )


_HARMLESS: Final = (
    ("use_cache", False),
    ("return_dict", True),
    ("output_attentions", False),
    ("output_hidden_states", False),
)
