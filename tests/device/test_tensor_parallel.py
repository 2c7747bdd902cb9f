"""Tensor parallelism over two ranks on the GPU: collectives of CUDA tensors, and dropout that all ranks draw alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import smpkit.torch as smp
from tests.device.device import gpu
from tests.device.ranks import run_on_gpu
from tests.transparency.models import Trace, assert_same
from tests.transparency.tensor_parallel_models import LENGTH, TOKENS, train_plainly
from tests.transparency.test_tensor_parallel import CASES, MODES, Row, train_rows

_TOLERANCE = 1e-8  # float64 beside the CPU's; AdamW magnifies


@pytest.mark.parametrize("case", CASES)
def test_training_equals_plain_pytorch(case: str) -> None:
    plain = train_plainly(case, device=gpu())
    rows = [Row(case, 1, 2, mode, sharded) for mode in MODES for sharded in (False, True)]
    for traces in run_on_gpu(train_rows, rows, timeout=150):
        for trace in traces:
            gradients = {name: plain.gradients[name] for name in trace.gradients}
            assert_same(trace, Trace(plain.losses, gradients, plain.weights), _TOLERANCE)


def test_a_pipeline_of_tensor_parallel_ranks() -> None:
    plain = train_plainly("language model")
    rows = [Row("language model", 2, 2, "memory")]
    for (trace,) in run_on_gpu(train_rows, rows, size=4, timeout=150):
        gradients = {name: plain.gradients[name] for name in trace.gradients}
        assert_same(trace, Trace(plain.losses, gradients, plain.weights), _TOLERANCE)


@smp.step
def train_step(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model((tokens, None, None, None, tokens))[0]
    model.backward(loss)
    return loss


def train_with_dropout(checkpoints: bool, optimize: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses, and gradients of what this rank holds."""
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "optimize": optimize, "microbatches": 2})
    torch.manual_seed(7)
    module = smp.nn.DistributedTransformerLMHead(
        num_layers=2,
        num_attention_heads=4,
        attention_head_size=4,
        hidden_size=16,
        intermediate_size=24,
        vocab_size=TOKENS,
        num_positions=LENGTH,
        causal_mask_size=LENGTH,
        attention_dropout_prob=0.3,
        hidden_dropout_prob=0.3,
        embedding_dropout_prob=0.3,
        pre_layernorm=True,
        post_layernorm=False,
    )
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    if checkpoints:
        inner: Any = model.get_module()
        smp.set_activation_checkpointing(inner.transformer.seq_layers)
    # Under `speed` both ranks have the same batch, under `memory` each has its own.
    share = smp.rank() if optimize == "memory" else 0
    generator = torch.Generator().manual_seed(5 + share)
    losses = []
    for _ in range(3):
        model.zero_grad()
        tokens = torch.randint(TOKENS, (8, LENGTH), generator=generator)
        losses.append(train_step(model, tokens).reduce_mean().item())
    gradients = {name: each.grad.clone() for name, each in model.local_named_parameters() if each.grad is not None}
    smp.shutdown()
    return losses, gradients


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_dropout_is_the_same_when_layers_are_recomputed(optimize: str) -> None:
    plain = run_on_gpu(train_with_dropout, False, optimize)
    again = run_on_gpu(train_with_dropout, True, optimize)
    assert len(set(plain[0][0])) > 1  # it draws
    for (losses, gradients), (expected, theirs) in zip(again, plain, strict=True):
        assert losses == expected
        assert gradients.keys() == theirs.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=0, msg=name)
