"""Hugging Face models train under tensor parallelism as they do in one process: losses, gradients, weights, logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError
from smpkit.torch.core.module_call import ModuleCall
from tests.models_of_others import DIVISIBLE, PARTLY_DIVIDED
from tests.pairwise import slow
from tests.torch.steps import on_ranks
from tests.train import Way, batch, build, checkpoint_layers, same

TOLERANCE = 1e-6  # Hugging Face computes losses, norms and some scores in float32


def divide(module: nn.Module) -> None:
    smp.set_tensor_parallelism(module)


def divide_and_checkpoint(module: nn.Module) -> None:
    divide(module)
    checkpoint_layers(module)


def divide_and_checkpoint_as_transformers_4(module: Any) -> None:
    divide(module)
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


OWN = Way(tensor=2, replicas=2, microbatches=1, batches=(8, 8), prepare=divide, config={"optimize": "speed"})
OWN_FOR_MEMORY = replace(OWN, config={"optimize": "memory"})
SHARED = replace(OWN, replicas=1, config={"prescaled_batch": True})
SHARED_FOR_MEMORY = replace(SHARED, config={**SHARED.config, **OWN_FOR_MEMORY.config})
WAYS = (SHARED, OWN, OWN_FOR_MEMORY, SHARED_FOR_MEMORY)
"""Whether ranks bring samples of their own, and what they keep whole between layers."""

FEW = [
    ("Llama", SHARED),
    ("Qwen3", SHARED),
    ("Llama", OWN_FOR_MEMORY),
    ("Phi3", OWN),
    ("normed Phi", SHARED),
    ("Glm4Moe", OWN),
    ("Apertus", SHARED),  # its activations are trained
    ("Mixtral", SHARED),
    ("MiMoV2Flash", SHARED),
    ("balanced Mixtral", OWN),
    ("GPT2", SHARED_FOR_MEMORY),
    ("GPTJ", OWN),
    ("GPTNeo", OWN_FOR_MEMORY),
    ("GPTNeoX", SHARED),
    ("Bert", OWN),
    # More ranks than key and value heads, and two pipeline ranks.
    ("Qwen3", replace(OWN_FOR_MEMORY, tensor=4, replicas=4)),
    ("tied Llama", replace(OWN_FOR_MEMORY, pipeline=2, microbatches=2)),
    ("GPT2", replace(SHARED, pipeline=2, microbatches=2)),
]
REFUSED = [*product(("Mixtral", "balanced Mixtral", "Qwen3Moe"), (OWN_FOR_MEMORY, SHARED_FOR_MEMORY))]
MORE = [
    *[row for row in product(DIVISIBLE, WAYS) if row not in (*FEW, *REFUSED)],
    ("GPT2", replace(SHARED, tensor=4)),
    ("tied Llama", replace(OWN, replicas=4)),
    ("Llama", replace(SHARED, pipeline=2, microbatches=2)),
    ("GPT2", replace(OWN_FOR_MEMORY, pipeline=2, microbatches=2)),
]


@pytest.mark.parametrize(("name", "way"), [*FEW, *slow(MORE)], ids=str)
def test_a_model_trains_as_in_one_process(name: str, way: Way) -> None:
    same(DIVISIBLE[name], way, tolerance=TOLERANCE)


@pytest.mark.parametrize(
    ("way", "prepare"),
    [
        (SHARED, divide_and_checkpoint),
        (OWN_FOR_MEMORY, divide_and_checkpoint),
        (SHARED_FOR_MEMORY, divide_and_checkpoint_as_transformers_4),
    ],
    ids=["whole samples", "own samples", "without gradients in forward"],
)
def test_a_checkpointed_model_trains_as_in_one_process(way: Way, prepare: Callable[[Any], None]) -> None:
    same(DIVISIBLE["Llama"], replace(way, prepare=prepare), tolerance=TOLERANCE)


@on_ranks(2)
def test_checkpointing_that_was_enabled_before_wrapping_goes_on() -> None:
    for name in ("GPT2", "Bert"):
        smp.init({"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True})
        module: Any = build(DIVISIBLE[name])
        divide(module)
        module.gradient_checkpointing_enable()
        model = smp.DistributedModel(module)
        layers = [each for each in model.modules() if isinstance(each, smp.nn.DistributedTransformerLayer)]
        assert layers
        assert name == "Bert" or isinstance(model.module, smp.nn.DistributedTransformerLMHead)
        assert all(ModuleCall.of(each).checkpointing is not None for each in layers)
        smp.shutdown()


@pytest.mark.parametrize(("name", "way"), [*product(PARTLY_DIVIDED, (SHARED, OWN))], ids=str)
def test_a_model_of_which_parts_stay_whole_trains_as_in_one_process(name: str, way: Way) -> None:
    # Linear attention computes in float32, whatever the model does, and steps of training magnify what that rounds.
    same(PARTLY_DIVIDED[name], replace(way, batches=(8,)), tolerance=1e-5)


@on_ranks(2)
def test_outputs_of_divided_layers_are_refused() -> None:
    smp.init({"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True, "optimize": "memory"})
    case = DIVISIBLE["Llama"]
    module = build(case)
    divide(module)
    model: Any = smp.DistributedModel(module)
    ids, *_ = batch(case, 0, 2)
    with pytest.raises(UnsupportedError, match=r"asked for `output_hidden_states`, but .* has a part of them"):
        model(input_ids=ids, output_hidden_states=True)
    with pytest.raises(UnsupportedError, match=r"asked for `output_attentions`, but .* some of the heads"):
        model(input_ids=ids, output_attentions=True)
    smp.shutdown()
