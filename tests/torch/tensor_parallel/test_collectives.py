"""What tensor-parallel ranks exchange: values, gradients, how many messages a layer takes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import smpkit.torch as smp
from benchmarks.tensor_parallel.counted import counted
from smpkit.errors import ConfigError, UsageError
from smpkit.torch.core import devices
from smpkit.torch.tensor_parallel import collectives as c
from smpkit.torch.tensor_parallel.layouts import Layout, enter_region
from smpkit.torch.tensor_parallel.loss import _own_labels
from tests.torch.steps import evaluate, on_ranks, train_step


class Kind(NamedTuple):
    """An exchange, and what it makes on a rank of both ranks' values, and backward of both ranks' gradients."""

    exchange: Callable[[Tensor], Tensor]
    forward: Callable[[list[Tensor], int], Tensor]
    backward: Callable[[list[Tensor], int], Tensor]
    shape: tuple[int, int]
    """Of the result, of a value of 4 rows and 6 columns."""


KINDS = {
    "copy_to_tp": Kind(c.copy_to_tp, lambda x, _: x[0], lambda g, _: g[0] + g[1], (4, 6)),
    "reduce_from_tp": Kind(c.reduce_from_tp, lambda x, _: x[0] + x[1], lambda g, _: g[0], (4, 6)),
    "gather_to_tp": Kind(
        lambda x: c.gather_to_tp(x, 1),
        lambda x, _: torch.cat(x, 1),
        lambda g, rank: (g[0] + g[1]).chunk(2, 1)[rank],
        (4, 12),
    ),
    "reduce_scatter_from_tp": Kind(
        lambda x: c.reduce_scatter_from_tp(x, -1),
        lambda x, rank: (x[0] + x[1]).chunk(2, 1)[rank],
        lambda g, _: torch.cat(g, 1),
        (4, 3),
    ),
    "gather_from_tp": Kind(
        lambda x: c.gather_from_tp(x, 0), lambda x, _: torch.cat(x), lambda g, rank: g[0].chunk(2)[rank], (8, 6)
    ),
    "scatter_to_tp": Kind(
        lambda x: c.scatter_to_tp(x, 1), lambda x, rank: x[0].chunk(2, 1)[rank], lambda g, _: torch.cat(g, 1), (4, 3)
    ),
    "all_to_all": Kind(
        lambda x: c.all_to_all(x, 1, 0),
        lambda x, rank: torch.cat([each.chunk(2, 1)[rank] for each in x]),
        lambda g, rank: torch.cat([each.chunk(2)[rank] for each in g], 1),
        (8, 3),
    ),
}


def start(**config: Any) -> None:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, **config})


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@on_ranks(2)
def test_values_and_gradients_of_every_exchange() -> None:
    start()
    rank = smp.tp_rank()
    for name, kind in KINDS.items():
        takes_one_value = name in ("copy_to_tp", "scatter_to_tp")
        gets_one_gradient = name in ("reduce_from_tp", "gather_from_tp")
        x = [drawn(1 if takes_one_value else 2 + each, 6, 4).t() for each in range(2)]  # not contiguous
        mine = x[rank].clone().requires_grad_()
        result = kind.exchange(mine)
        g = [drawn(10 if gets_one_gradient else 20 + each, *result.shape) for each in range(2)]
        (gradient,) = torch.autograd.grad(result, mine, g[rank])
        assert torch.equal(result, kind.forward(x, rank)), name
        assert torch.equal(gradient, kind.backward(g, rank)), name
        with FakeTensorMode():
            fake = kind.exchange(torch.empty_strided((4, 6), (1, 4)))
            assert (fake.shape, fake.stride()) == (kind.shape, result.stride()), name
        assert kind.exchange(torch.empty(4, 6, device="meta")).shape == kind.shape, name


@on_ranks(2)
def test_second_derivatives_and_bfloat16() -> None:
    start()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    cubed = (c.gather_to_tp(x, 0) ** 3).sum() * (1 + smp.tp_rank())
    (first,) = torch.autograd.grad(cubed, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 3 * 6 * x, rtol=0, atol=1e-12)
    assert c.reduce_from_tp(torch.full((2, 2), 1.5, dtype=torch.bfloat16)).eq(3).all()


@on_ranks(2)
def test_shapes_that_do_not_fit_are_named() -> None:
    start()
    with pytest.raises(UsageError, match="dimension 1 is 3, which the 2 tensor-parallel ranks do not divide"):
        c.reduce_scatter_from_tp(torch.ones(2, 3), 1)
    with pytest.raises(UsageError, match=r"different shapes: \[2, 3\] on rank 0, \[3, 3\] on rank 1"):
        enter_region(torch.ones(2 + smp.tp_rank(), 3), Layout.SHARD_BATCH)


@pytest.mark.parametrize(
    ("prescaled", "optimize", "gathers", "reductions"),
    [
        # Two blocks per layer, an exchange in and one out, in forward and backward.
        (True, "speed", ("all-reduce", 4 * 3), None),
        # An all-gather in and a reduce-scatter out of each block, and the reverse in backward.
        (False, "speed", ("all-gather", 4 * 3), ("reduce-scatter", 4 * 3)),
        # Six all-gathers: in forward, its input again in backward, and the gradient of what was scattered.
        (False, "memory", ("all-gather", 6 * 3), ("reduce-scatter", 4 * 3)),
        (True, "memory", ("all-gather", 6 * 3 + 2), ("reduce-scatter", 4 * 3)),
    ],
)
@on_ranks(2)
def test_a_layer_takes_as_few_messages_as_can_be(prescaled: bool, optimize: str, gathers: Any, reductions: Any) -> None:
    start(prescaled_batch=prescaled, optimize=optimize)
    sizes: Any = {"hidden_size": 16, "num_attention_heads": 4, "attention_head_size": 4, "intermediate_size": 32}
    dropouts: Any = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    stack = smp.nn.DistributedTransformer(num_layers=3, **sizes, **dropouts)
    x = torch.randn(2, 4, 16, requires_grad=True)
    stack((x, None))[0].sum().backward()  # shapes have been compared now
    traffic = counted(lambda: stack((x, None))[0].sum().backward())
    messages = dict(each for each in (gathers, reductions) if each is not None)
    assert traffic.messages == messages
    moved = x.nbytes if prescaled else 2 * x.nbytes
    assert traffic.bytes == {name: count * moved for name, count in messages.items()}


@pytest.mark.parametrize("prescaled", [False, True])
@on_ranks(2)
def test_the_loss_of_divided_logits_is_torchs(prescaled: bool) -> None:
    start(prescaled_batch=prescaled)
    for classes in (7, 8):
        torch.manual_seed(0)
        logits = torch.randn(4, 3, classes, dtype=torch.float64)
        labels = torch.randint(classes, (4, 3))
        labels[0, 1] = labels[3] = -100
        mine = slice(None) if prescaled else slice(2 * smp.tp_rank(), 2 * smp.tp_rank() + 2)
        part = -(-classes // 2)
        columns = slice(part * smp.tp_rank(), part * smp.tp_rank() + part)
        shard = logits[..., columns]
        for reduction in ("mean", "sum", "none"):
            ours, theirs = shard.clone().requires_grad_(), logits.clone().requires_grad_()
            loss = smp.nn.cross_entropy(ours, labels[mine], reduction=reduction, num_classes=classes)
            each = cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="none").view(4, 3)
            expected: list[Any] = [each] if prescaled else [*each.chunk(2)]
            if reduction != "none":
                counts = [(of_rank != -100).sum() for of_rank in ([labels] if prescaled else labels.chunk(2))]
                scales: list[Any] = counts if reduction == "mean" else [1] * len(counts)
                expected = [of_rank.sum() / scale for of_rank, scale in zip(expected, scales, strict=True)]
            loss.sum().backward()
            torch.stack([of_rank.sum() for of_rank in expected]).sum().backward()
            assert theirs.grad is not None
            torch.testing.assert_close(loss, expected[0 if prescaled else smp.tp_rank()], rtol=0, atol=1e-12)
            torch.testing.assert_close(ours.grad, theirs.grad[..., columns], rtol=0, atol=1e-12)
        assert torch.equal(smp.nn.gather_logits(shard, classes), logits[mine])
    coarse = shard.bfloat16()
    assert torch.equal(smp.nn.cross_entropy(coarse, labels[mine]), smp.nn.cross_entropy(coarse.float(), labels[mine]))
    with pytest.raises(UsageError, match="is a label, but neither one of 8 classes nor ignore_index"):
        smp.nn.cross_entropy(shard, labels[mine].clamp(min=0) + 8)


@on_ranks(1)
def test_the_loss_of_one_rank_is_as_exact_as_that_of_several() -> None:
    # A model of a v1 script is made of `smp.nn` at degree 1, too. With 8 bits of a loss, 10.33 was 10.25.
    smp.init({})
    logits, labels = torch.randn(2, 3, 50).mul(100).half().requires_grad_(), torch.tensor([[1, 2, 3], [4, 5, -100]])
    exact = logits.detach().float().requires_grad_()
    for reduction in ("mean", "sum", "none"):
        loss = smp.nn.cross_entropy(logits, labels, reduction=reduction)
        expected = cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction=reduction).view(loss.shape)
        torch.testing.assert_close(loss, expected)
        found, wanted = (torch.autograd.grad(each.sum(), of)[0] for each, of in ((loss, logits), (expected, exact)))
        torch.testing.assert_close(found, wanted.half())


@on_ranks(2)
def test_wrong_labels_are_found_on_a_device_without_waiting_for_it() -> None:
    """Look for them as on a GPU, whose check a CPU can run as well."""
    start()
    with patch.object(devices, "is_asynchronous", lambda _: True):
        for label, ignored in [(7, -100), (0, -100), (-100, -100), (9, 9)]:
            smp.nn.cross_entropy(torch.zeros(4, 4), torch.tensor([label, 0]), ignore_index=ignored)
        for label, ignored in [(8, -100), (-1, -100), (-100, -1), (9, 8)]:
            message = rf"a label is neither one of 8 classes nor ignore_index \({ignored}\)"
            with pytest.raises(RuntimeError, match=message):
                smp.nn.cross_entropy(torch.zeros(4, 4), torch.tensor([label, 0]), ignore_index=ignored)
        whole = torch.compile(lambda labels: _own_labels(labels, -100, 8), backend="eager", fullgraph=True)
        whole(torch.tensor([1, -100]))  # a graph break would raise
        with pytest.raises(RuntimeError, match="a label is neither"):
            whole(torch.tensor([1, 8]))


@on_ranks(2)
def test_rejects_wrong_arguments() -> None:
    start()
    refused: list[tuple[Callable[[], object], str]] = [
        (
            lambda: smp.nn.DistributedAttentionLayer(num_attention_heads=3),
            "num_attention_heads 3 is not divisible by tensor_parallel_degree 2",
        ),
        (lambda: smp.nn.DistributedLinear(3, 4), "in_features 3 is not divisible by tensor_parallel_degree 2"),
        (
            lambda: smp.nn.DistributedTransformerOutputLayer(pre_layernorm=False, post_layernorm=False),
            "pre_layernorm and post_layernorm are both False",
        ),
        (lambda: smp.nn.DistributedTransformerLayer(use_alibbi=True), r"did you mean `use_alibi`\?"),
        (lambda: smp.nn.DistributedTransformerLayer(activation="swish"), "the activation `swish` is unknown"),
        (
            lambda: smp.nn.DistributedLinear(4, 4).load_whole({"weight": torch.ones(4, 2)}),
            r"`bias` is missing; `weight` is \[4, 2\], not \[4, 4\]",
        ),
        (
            lambda: smp.nn.VocabularyParallelEmbedding(6, 4)(torch.tensor([6 if smp.tp_rank() else -1])),
            "index out of range",
        ),
    ]
    for make, message in refused:
        with pytest.raises((ConfigError, UsageError, IndexError), match=message):
            make()
    smp.nn.DistributedTransformerLayer(fused_softmax=True, fused_bias_gelu=True, query_key_layer_scaling=False)


# gloo ends the process that receives more than it expects; the other one may have all it waited for, and go on.
@on_ranks(2, fails=r"all-gather of \[2, (3|5)\] between tensor-parallel ranks|exit code -6")
def test_exchanges_of_different_sizes_do_not_hang() -> None:
    start(timeout_seconds=30)
    x = torch.ones(2, 3)
    enter_region(x, Layout.SHARD_BATCH)
    enter_region(torch.ones(2, 5), Layout.SHARD_BATCH)
    enter_region(torch.ones(2, 5) if smp.tp_rank() else x, Layout.SHARD_BATCH)


def test_flash_attention_equals_attention_written_out() -> None:
    torch.manual_seed(0)
    qkv, mask = torch.randn(2, 5, 3, 4, 8).double(), torch.randn(2, 1, 5, 5).double()
    layer = smp.nn.FlashAttentionLayer(0.0, 8, scale_attn_by_layer_idx=True, layer_idx=2).eval()
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    scores = query @ key.transpose(2, 3) / 8**0.5 / 3
    hidden = torch.ones(5, 5).tril() == 0
    for causal, added in [(True, None), (False, mask), (True, mask)]:
        seen = scores if added is None else scores + added
        weights = (seen.masked_fill(hidden, -torch.inf) if causal else seen).softmax(-1)
        torch.testing.assert_close(layer(qkv, added, causal), weights @ value)
    plain = smp.nn.FlashAttentionLayer(0.0, scale=0.3).eval()
    torch.testing.assert_close(plain(qkv), scaled_dot_product_attention(query, key, value, scale=0.3))
    with pytest.raises(UsageError, match=r"not \[batch, length, 3, heads, 8\]"):
        layer(qkv[..., :4])


def wrap(**config: Any) -> smp.DistributedModel:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "timeout_seconds": 60, **config})
    torch.manual_seed(0)
    with smp.tensor_parallelism():
        return smp.DistributedModel(nn.Sequential(nn.Linear(4, 4)))


@on_ranks(2)
def test_ranks_that_call_different_things_are_told_which() -> None:
    model, other = wrap(), smp.rank() == 1
    x = torch.zeros(2, 4)
    calls: list[tuple[Callable[[], object], str, str]] = [
        (
            lambda: train_step(model, torch.zeros(2 + other, 4)),
            r"the step `train_step` \(training, with gradients\) with float32\[2, 4\], and the step",
            r"with float32\[3, 4\]",
        ),
        (lambda: (evaluate if other else train_step)(model, x), "the step `train_step`", "the step `evaluate`"),
        (
            lambda: model(torch.zeros(2, 4 + 4 * other)),
            r"the model \(training, with gradients\) with float32\[2, 4\], and the model",
            "",
        ),
        (lambda: model.train(not other)(x), "", r"the model \(evaluation, with gradients\)"),
    ]
    for call, first, second in calls:
        start = "ranks 0 and 1 of a tensor-parallel group are about to do different things: "
        with pytest.raises(UsageError, match=f"{start}(?=.*{first}).*{second}"):
            call()
        model.train()
    train_step(model, x)  # and all is well again


@on_ranks(2)
def test_a_prescaled_batch_that_is_not_the_same_is_named() -> None:
    model = wrap(prescaled_batch=True)
    train_step(model, torch.zeros(2, 4))
    message = "ranks 0 and 1 of a tensor-parallel group brought different values to the step `train_step`"
    with pytest.raises(UsageError, match=message):
        train_step(model, torch.full((2, 4), float(smp.rank())))
