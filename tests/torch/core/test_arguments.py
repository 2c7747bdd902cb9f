"""Invalid arguments are refused at once, in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UsageError

wrong: Any = "x"  # for what the types would refuse
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "size of a linear": (
        lambda: smp.nn.DistributedLinear(-1, 2),
        "in_features of DistributedLinear must be an integer",
    ),
    "empty table": (lambda: smp.nn.DistributedEmbedding(0, 2), "num_embeddings of DistributedEmbedding .* least 1"),
    "attention dropout": (lambda: smp.nn.DistributedTransformerLayer(2, 2, 4, 8, 2.0), "from 0 to 1, got 2.0"),
    "nan dropout": (lambda: smp.nn.DistributedTransformerLayer(2, 2, 4, 8, float("nan")), "from 0 to 1, got nan"),
    "labels": (lambda: smp.nn.cross_entropy(torch.zeros(2, 3), torch.zeros(3).long()), "do not fit labels of"),
    "marked": (lambda: smp.set_tensor_parallelism(wrong), "takes a torch.nn.Module, got str"),
    "placed": (lambda: smp.set_partition(wrong, 0), "takes a torch.nn.Module, got str"),
    "dtype": (lambda: smp.model_creation(dtype=wrong).__enter__(), "must be a floating-point torch.dtype, got 'x'"),
    "dtype of integers": (lambda: smp.model_creation(dtype=torch.int8).__enter__(), "dtype, got torch.int8"),
    "register": (
        lambda: smp.tp_register_with_module(nn.Bilinear, smp.nn.DistributedLinear, wrong),
        "init_hook must be",
    ),
    "clip": (lambda: smp.clip_grad_norm_([], -1.0), "clipped to a norm of -1.0"),
    "clip to nan": (lambda: smp.clip_grad_norm_([], float("nan")), "clipped to a norm of nan"),
}


@pytest.fixture(autouse=True)
def runtime(world: None) -> None:
    smp.init()


@pytest.mark.parametrize("case", CALLS)
def test_rejects_wrong_arguments(case: str) -> None:
    call, message = CALLS[case]
    with pytest.raises(UsageError, match=message):
        call()


def test_a_model_refuses_losses_and_hooks_that_are_none() -> None:
    model = smp.DistributedModel(nn.Linear(2, 2))
    for loss in (None, 1.0):
        with pytest.raises(UsageError, match=f"takes a loss .*, got {type(loss).__name__}"):
            model.backward(loss)  # type: ignore[arg-type]
    for register in (model.register_post_step_hook, model.register_post_partition_hook):
        with pytest.raises(UsageError, match="a hook must be callable, got 5"):
            register(5)  # type: ignore[arg-type]
