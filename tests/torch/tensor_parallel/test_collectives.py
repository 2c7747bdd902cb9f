"""What tensor-parallel ranks exchange: values, gradients, how many messages a layer takes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import smpkit.torch as smp
from benchmarks.tensor_parallel.counted import counted
from smpkit.errors import ConfigError, UsageError
from smpkit.testing.ranks import RankFailed
from smpkit.torch.core import devices
from smpkit.torch.tensor_parallel import collectives as c
from smpkit.torch.tensor_parallel.dropout import ParallelDropout
from smpkit.torch.tensor_parallel.layouts import Layout, enter_region
from smpkit.torch.tensor_parallel.loss import _own_labels
from tests.ranks import run_ranks
from tests.torch.steps import train_step

Exchange = Callable[[torch.Tensor], torch.Tensor]
KINDS: dict[str, Exchange] = {
    "copy_to_tp": c.copy_to_tp,
    "reduce_from_tp": c.reduce_from_tp,
    "gather_to_tp": lambda x: c.gather_to_tp(x, 1),
    "reduce_scatter_from_tp": lambda x: c.reduce_scatter_from_tp(x, -1),
    "gather_from_tp": lambda x: c.gather_from_tp(x, 0),
    "scatter_to_tp": lambda x: c.scatter_to_tp(x, 1),
    "all_to_all": lambda x: c.all_to_all(x, 1, 0),
}


def start(**config: Any) -> None:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, **config})


def run(kind: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the result, a gradient that differs by rank, and what it becomes."""
    x = x.clone().requires_grad_()
    result = KINDS[kind](x)
    shared = kind in ("reduce_from_tp", "gather_from_tp")
    torch.manual_seed(10 if shared else 20 + smp.tp_rank())
    gradient = torch.randn(result.shape, dtype=result.dtype)
    (made,) = torch.autograd.grad(result, x, gradient)
    return result.detach(), gradient, made


def value(kind: str, rank: int) -> torch.Tensor:
    torch.manual_seed(1 if kind in ("copy_to_tp", "scatter_to_tp") else 2 + rank)
    return torch.randn(6, 4, dtype=torch.float64).t()  # not contiguous


def exchange_everything() -> dict[str, Any]:
    start()
    found: dict[str, Any] = {kind: run(kind, value(kind, smp.tp_rank())) for kind in KINDS}
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    cubed = (c.gather_to_tp(x, 0) ** 3).sum() * (1 + smp.tp_rank())
    (first,) = torch.autograd.grad(cubed, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    found["second derivative"] = (second - 3 * 6 * x).abs().max().item()
    found["bfloat16"] = c.reduce_from_tp(torch.full((2, 2), 1.5, dtype=torch.bfloat16))
    with FakeTensorMode():
        found["fake"] = {kind: tuple(KINDS[kind](torch.empty(4, 6)).shape) for kind in KINDS}
    found["meta"] = {kind: tuple(KINDS[kind](torch.empty(4, 6, device="meta")).shape) for kind in KINDS}
    try:
        c.reduce_scatter_from_tp(torch.ones(2, 3), 1)
    except UsageError as error:
        found["uneven"] = str(error)
    try:
        enter_region(torch.ones(2 + smp.tp_rank(), 3), Layout.SHARD_BATCH)
    except UsageError as error:
        found["unequal"] = str(error)
    smp.shutdown()
    return found


def test_values_and_gradients_of_every_exchange() -> None:
    ranks = run_ranks(exchange_everything, 2)
    x: dict[str, Any] = {kind: [value(kind, rank) for rank in range(2)] for kind in KINDS}
    g = {kind: [each[kind][1] for each in ranks] for kind in KINDS}
    for rank, found in enumerate(ranks):
        summed: Any = sum(x["reduce_scatter_from_tp"])
        both = [sum(x["reduce_from_tp"]), torch.cat(x["gather_to_tp"], 1), summed.chunk(2, 1)[rank]]
        parts = [each.chunk(2, 1)[rank] for each in x["all_to_all"]]
        results: list[Any] = [
            x["copy_to_tp"][0],
            *both,
            torch.cat(x["gather_from_tp"]),
            x["scatter_to_tp"][0].chunk(2, 1)[rank],
            torch.cat(parts),
        ]
        gathered: Any = sum(g["gather_to_tp"])
        gradients: list[Any] = [
            sum(g["copy_to_tp"]),
            g["reduce_from_tp"][0],
            gathered.chunk(2, 1)[rank],
            torch.cat(g["reduce_scatter_from_tp"], 1),
            g["gather_from_tp"][0].chunk(2)[rank],
            torch.cat(g["scatter_to_tp"], 1),
            torch.cat([each.chunk(2)[rank] for each in g["all_to_all"]], 1),
        ]
        for kind, result, gradient in zip(KINDS, results, gradients, strict=True):
            assert torch.equal(found[kind][0], result), kind
            assert torch.equal(found[kind][2], gradient), kind
        assert found["second derivative"] == pytest.approx(0, abs=1e-12)
        assert found["bfloat16"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
        shapes = [(4, 6), (4, 6), (4, 12), (4, 3), (8, 6), (4, 3), (8, 3)]
        assert found["fake"] == found["meta"] == dict(zip(KINDS, shapes, strict=True))
        assert "dimension 1 is 3, which the 2 tensor-parallel ranks do not divide" in found["uneven"]
        assert "different shapes: [2, 3] on rank 0, [3, 3] on rank 1" in found["unequal"]


def count_messages() -> dict[str, Any]:
    found = {}
    for prescaled, optimize in [(False, "speed"), (False, "memory"), (True, "speed"), (True, "memory")]:
        start(prescaled_batch=prescaled, optimize=optimize)
        sizes: Any = {"hidden_size": 16, "num_attention_heads": 4, "attention_head_size": 4, "intermediate_size": 32}
        dropouts: Any = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        stack = smp.nn.DistributedTransformer(num_layers=3, **sizes, **dropouts)
        x = torch.randn(2, 4, 16, requires_grad=True)
        stack((x, None))[0].sum().backward()  # shapes have been compared now
        traffic = counted(lambda stack=stack, x=x: stack((x, None))[0].sum().backward())  # type: ignore[misc]
        found[f"{prescaled} {optimize}"] = (dict(traffic.messages), dict(traffic.bytes))
        smp.shutdown()
    return found


def test_a_layer_takes_as_few_messages_as_can_be() -> None:
    values = 2 * 4 * 16 * 4  # bytes of one rank's hidden states
    both, layers = 2 * values, 3
    for found in run_ranks(count_messages, 2):
        # Two blocks per layer, an exchange in and one out, in forward and backward.
        assert found["True speed"] == ({"all-reduce": 4 * layers}, {"all-reduce": 4 * layers * values})
        # An all-gather in and a reduce-scatter out of each block, and the reverse in backward.
        assert found["False speed"] == (
            {"all-gather": 4 * layers, "reduce-scatter": 4 * layers},
            {"all-gather": 4 * layers * both, "reduce-scatter": 4 * layers * both},
        )
        # Six all-gathers: in forward, its input again in backward, and the gradient of what was scattered.
        assert found["False memory"] == (
            {"all-gather": 6 * layers, "reduce-scatter": 4 * layers},
            {"all-gather": 6 * layers * both, "reduce-scatter": 4 * layers * both},
        )
        assert found["True memory"] == (
            {"all-gather": 6 * layers + 2, "reduce-scatter": 4 * layers},
            {"all-gather": (6 * layers + 2) * values, "reduce-scatter": 4 * layers * values},
        )


def losses(prescaled: bool) -> list[Any]:
    """Compare our loss with torch's in all its modes; return the largest differences, and an error."""
    start(prescaled_batch=prescaled)
    found: list[Any] = []
    for classes in (7, 8):
        torch.manual_seed(0)
        logits = torch.randn(4, 3, classes, dtype=torch.float64)
        labels = torch.randint(classes, (4, 3))
        labels[0, 1] = labels[3] = -100
        mine = slice(None) if prescaled else slice(2 * smp.tp_rank(), 2 * smp.tp_rank() + 2)
        first = -(-classes // 2) * smp.tp_rank()
        shard = logits[..., first : first + -(-classes // 2)]
        for reduction in ("mean", "sum", "none"):
            ours, theirs = shard.clone().requires_grad_(), logits.clone().requires_grad_()
            loss = smp.nn.cross_entropy(ours, labels[mine], reduction=reduction, num_classes=classes)
            whole = theirs.flatten(0, 1)
            each = cross_entropy(whole, labels.flatten(), reduction="none").view(4, 3)
            of_rank = [each] if prescaled else each.chunk(2)
            counts = [(part != -100).sum() for part in ([labels] if prescaled else labels.chunk(2))]
            expected: list[Any] = list(of_rank)
            if reduction != "none":
                scales: list[Any] = counts if reduction == "mean" else [1] * len(counts)
                expected = [part.sum() / scale for part, scale in zip(of_rank, scales, strict=True)]
            loss.sum().backward()
            torch.stack([part.sum() for part in expected]).sum().backward()
            assert ours.grad is not None
            assert theirs.grad is not None
            gradient = theirs.grad[..., first : first + -(-classes // 2)]
            rank = 0 if prescaled else smp.tp_rank()
            found += [(loss - expected[rank]).abs().max().item(), (ours.grad - gradient).abs().max().item()]
        gathered = smp.nn.gather_logits(shard, classes)
        assert torch.equal(gathered, logits[mine])
    coarse = shard.bfloat16()
    assert torch.equal(smp.nn.cross_entropy(coarse, labels[mine]), smp.nn.cross_entropy(coarse.float(), labels[mine]))
    try:
        smp.nn.cross_entropy(shard, labels[mine].clamp(min=0) + 8)
    except UsageError as error:
        found.append(str(error))
    smp.shutdown()
    return found


@pytest.mark.parametrize("prescaled", [False, True])
def test_the_loss_of_divided_logits_is_torchs(prescaled: bool) -> None:
    for *differences, message in run_ranks(losses, 2, prescaled):
        assert len(differences) == 12
        assert max(differences) < 1e-12
        assert "is a label, but neither one of 8 classes nor ignore_index" in message


def check_on_the_device() -> list[str]:
    """Look for wrong labels as on a GPU, whose check a CPU can run as well; return what came of each."""
    start()
    found = []
    with patch.object(devices, "is_asynchronous", lambda _: True):
        for label, ignored in [(7, -100), (0, -100), (-100, -100), (9, 9), (8, -100), (-1, -100), (-100, -1), (9, 8)]:
            found.append(error_of(torch.tensor([label, 0]), ignored))
        whole = torch.compile(cross_entropy_labels, backend="eager", fullgraph=True)
        whole(torch.tensor([1, -100]))  # a graph break would raise
        with pytest.raises(RuntimeError, match="a label is neither"):
            whole(torch.tensor([1, 8]))
    smp.shutdown()
    return found


def error_of(labels: torch.Tensor, ignore_index: int) -> str:
    try:
        smp.nn.cross_entropy(torch.zeros(4, 4), labels, ignore_index=ignore_index)
    except RuntimeError as error:
        return str(error)
    return ""


def cross_entropy_labels(labels: torch.Tensor) -> torch.Tensor:
    return _own_labels(labels, -100, 8)


def test_wrong_labels_are_found_on_a_device_without_waiting_for_it() -> None:
    for found in run_ranks(check_on_the_device, 2):
        assert [bool(each) for each in found] == [False] * 4 + [True] * 4
        assert "a label is neither one of 8 classes nor ignore_index (-100)" in found[4]


def drop(same_seed: bool) -> dict[str, Any]:
    start()
    torch.manual_seed(0 if same_seed else smp.tp_rank())
    x = torch.ones(4, 64, requires_grad=True)
    masks: dict[str, Any] = {each.value: ParallelDropout(0.5, each)(x).tolist() for each in Layout}
    after = torch.rand(3).tolist()
    dropout, gradients = ParallelDropout(0.5, Layout.REPLICATE), []
    for recompute in (False, True):
        torch.manual_seed(4 + smp.tp_rank())
        output = checkpoint(dropout, x, use_reentrant=False) if recompute else dropout(x)
        gradients.append(torch.autograd.grad((output * output).sum(), x)[0])
    masks["repeats"] = torch.equal(*gradients)
    masks["stream"] = after
    smp.shutdown()
    return masks


@pytest.mark.parametrize("same_seed", [True, False])
def test_dropout_is_equal_on_equal_values_and_different_on_parts(same_seed: bool) -> None:
    first, second = run_ranks(drop, 2, same_seed)
    for boundary in Layout:
        assert (first[boundary.value] == second[boundary.value]) is (boundary is Layout.REPLICATE), boundary
    assert first["repeats"]
    assert second["repeats"]
    assert (first["stream"] == second["stream"]) is same_seed  # the script's own numbers are its own


def refuse() -> list[str]:
    start()
    found = []
    for make in (
        lambda: smp.nn.DistributedAttentionLayer(num_attention_heads=3),
        lambda: smp.nn.DistributedLinear(3, 4),
        lambda: smp.nn.DistributedTransformerOutputLayer(pre_layernorm=False, post_layernorm=False),
        lambda: smp.nn.DistributedTransformerLayer(use_alibbi=True),
        lambda: smp.nn.DistributedTransformerLayer(activation="swish"),
        lambda: smp.nn.DistributedLinear(4, 4).load_whole({"weight": torch.ones(4, 2)}),
        lambda: smp.nn.VocabularyParallelEmbedding(6, 4)(torch.tensor([6 if smp.tp_rank() else -1])),
    ):
        with pytest.raises((ConfigError, UsageError, IndexError)) as caught:
            make()
        found.append(str(caught.value))
    smp.nn.DistributedTransformerLayer(fused_softmax=True, fused_bias_gelu=True, query_key_layer_scaling=False)
    return found


def test_rejects_wrong_arguments() -> None:
    expected = [
        "num_attention_heads 3 is not divisible by tensor_parallel_degree 2",
        "in_features 3 is not divisible by tensor_parallel_degree 2",
        "pre_layernorm and post_layernorm are both False",
        "did you mean `use_alibi`?",
        "the activation `swish` is unknown",
        "`bias` is missing; `weight` is [4, 2], not [4, 4]",
        "index out of range",
    ]
    for found in run_ranks(refuse, 2):
        for message, part in zip(found, expected, strict=True):
            assert part in message


def fall_out_of_step() -> None:
    start(timeout_seconds=30)
    x = torch.ones(2, 3)
    enter_region(x, Layout.SHARD_BATCH)
    enter_region(torch.ones(2, 5), Layout.SHARD_BATCH)
    enter_region(torch.ones(2, 5) if smp.tp_rank() else x, Layout.SHARD_BATCH)


def test_exchanges_of_different_sizes_do_not_hang() -> None:
    # gloo ends the process that receives more than it expects; the other one may have all it waited for, and go on.
    with pytest.raises(RankFailed, match=r"all-gather of \[2, (3|5)\] between tensor-parallel ranks|exit code -6"):
        run_ranks(fall_out_of_step, 2)


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


@smp.step
def evaluate(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def wrap(**config: Any) -> smp.DistributedModel:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "timeout_seconds": 60, **config})
    torch.manual_seed(0)
    with smp.tensor_parallelism():
        return smp.DistributedModel(nn.Sequential(nn.Linear(4, 4)))


def mismatches() -> list[str]:
    model = wrap()
    other = smp.rank() == 1
    said = []
    for call in (
        lambda: train_step(model, torch.zeros(2 + other, 4)),
        lambda: (evaluate if other else train_step)(model, torch.zeros(2, 4)),
        lambda: model(torch.zeros(2, 4 + 4 * other)),
        lambda: model.train(not other)(torch.zeros(2, 4)),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        said.append(caught.value.message)
        model.train()
    train_step(model, torch.zeros(2, 4))  # and all is well again
    return said


def test_ranks_that_call_different_things_are_told_which() -> None:
    for said in run_ranks(mismatches, 2):
        start = "ranks 0 and 1 of a tensor-parallel group are about to do different things: "
        assert all(each.startswith(start) for each in said)
        shapes, steps, plain, modes = (each.removeprefix(start) for each in said)
        assert "the step `train_step` (training, with gradients) with float32[2, 4], and the step" in shapes
        assert "with float32[3, 4]" in shapes
        assert "the step `train_step`" in steps
        assert "the step `evaluate`" in steps
        assert "the model (training, with gradients) with float32[2, 4], and the model" in plain
        assert "the model (evaluation, with gradients)" in modes


def prescaled_batches() -> str:
    model = wrap(prescaled_batch=True)
    train_step(model, torch.zeros(2, 4))
    with pytest.raises(UsageError) as caught:
        train_step(model, torch.full((2, 4), float(smp.rank())))
    return caught.value.message


def test_a_prescaled_batch_that_is_not_the_same_is_named() -> None:
    for message in run_ranks(prescaled_batches, 2):
        assert "ranks 0 and 1 of a tensor-parallel group brought different values to the step `train_step`" in message
