"""Modules on several tensor-parallel ranks compute what plain PyTorch does in one process, gradients too."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import smpkit.torch as smp
from smpkit.plan.mesh import CommGroup
from smpkit.torch.placement.shards import join_shards, shard_of
from smpkit.torch.tensor_parallel.module import global_shape
from tests.ranks import run_ranks
from tests.transparency import tensor_parallel_plain as plain

TOLERANCE = 1e-12  # float64; sums over features and samples are added up in another order
SAMPLES, LENGTH, HIDDEN = 4, 8, 16
State = Mapping[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_size": 4,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
}
DROPOUTS: dict[str, Any] = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


@dataclass(frozen=True)
class Case:
    """A module, what goes in, and its plain counterpart.

    `inputs` makes tensors of all samples; those that are floating point are checked for their gradients, masks aside.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], list[torch.Tensor | None]]
    plainly: Callable[..., Any]
    call: Callable[..., Any] = lambda module, *inputs: module(*inputs)


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def additive_mask(length: int = LENGTH) -> torch.Tensor:
    mask = torch.zeros(SAMPLES, 1, 1, length, dtype=torch.float64)
    mask[1, :, :, -2:] = mask[2, :, :, -1:] = -10000.0
    return mask


def kept_mask() -> torch.Tensor:
    mask = torch.ones(SAMPLES, LENGTH, dtype=torch.int64)
    mask[1, -2:] = 0
    return mask


def tokens(upto: int) -> torch.Tensor:
    return torch.randint(upto, (SAMPLES, LENGTH))


def labels() -> torch.Tensor:
    made = tokens(21)
    made[0, 2:4] = -100
    return made


def tupled(module: nn.Module, *inputs: Any) -> Any:
    output = module(inputs)
    return (
        output[0] if isinstance(module, smp.nn.DistributedTransformer | smp.nn.DistributedTransformerLayer) else output
    )


def layer_case(**options: Any) -> Case:
    sizes = {**SIZES, **options}
    cross = options.get("add_cross_attention", False)

    def inputs() -> list[torch.Tensor | None]:
        hidden = values(SAMPLES, LENGTH, HIDDEN)
        return (
            [hidden, values(SAMPLES, 6, HIDDEN), additive_mask(), additive_mask(6)]
            if cross
            else [hidden, additive_mask()]
        )

    def plainly(state: State, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        states, mask, cross_mask = others if cross else (None, others[0], None)
        whole = plain.transformer if "num_layers" in options else plain.layer
        return whole(state, hidden, states, mask, cross_mask, sizes)

    kind = smp.nn.DistributedTransformer if "num_layers" in options else smp.nn.DistributedTransformerLayer
    return Case(lambda: kind(**sizes, **DROPOUTS), inputs, plainly, tupled)


def model_case(**options: Any) -> Case:
    sizes = {**SIZES, "num_layers": 2, "vocab_size": 21, "num_positions": LENGTH, **options}

    def inputs() -> list[torch.Tensor | None]:
        types = tokens(2) if options.get("num_token_types") else None
        made: list[torch.Tensor | None] = [tokens(21), kept_mask(), types, None]
        if options.get("add_cross_attention"):
            made += [values(SAMPLES, 6, HIDDEN), None]
        return [*made, labels() if options.get("add_lm_head", True) else None]

    return Case(
        lambda: smp.nn.DistributedTransformerLMHead(**sizes, **DROPOUTS),
        inputs,
        lambda state, *given: plain.language_model(state, given, sizes),
        tupled,
    )


PRE: dict[str, Any] = {"pre_layernorm": True, "post_layernorm": False}
CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: Case(
        lambda: smp.nn.DistributedLinear(HIDDEN, 10),
        lambda: [values(SAMPLES, LENGTH, HIDDEN)],
        lambda state, x: F.linear(x, state["weight"], state["bias"]),
    ),
    "linear of two dimensions, without bias": lambda: Case(
        lambda: smp.nn.DistributedLinear(HIDDEN, 7, bias=False),
        lambda: [values(SAMPLES, HIDDEN)],
        lambda state, x: F.linear(x, state["weight"]),
    ),
    "column, gathered": lambda: Case(
        lambda: smp.nn.ColumnParallelLinear(HIDDEN, 12, gather_output=True),
        lambda: [values(SAMPLES, LENGTH, HIDDEN)],
        lambda state, x: F.linear(x, state["weight"], state["bias"]),
    ),
    "column and row": lambda: Case(
        lambda: nn.Sequential(smp.nn.ColumnParallelLinear(HIDDEN, 24), nn.GELU(), smp.nn.RowParallelLinear(24, HIDDEN)),
        lambda: [values(SAMPLES, LENGTH, HIDDEN)],
        lambda state, x: plain.linear(state, "2", F.gelu(plain.linear(state, "0", x))),
    ),
    "embedding": lambda: Case(
        lambda: smp.nn.DistributedEmbedding(21, HIDDEN, padding_idx=3),
        lambda: [tokens(21)],
        lambda state, x: F.embedding(x, state["weight"], 3),
    ),
    "embedding by an uneven vocabulary": lambda: Case(
        lambda: smp.nn.VocabularyParallelEmbedding(21, HIDDEN, padding_idx=17),
        lambda: [tokens(21)],
        lambda state, x: F.embedding(x, state["weight"], 17),
    ),
    "attention": lambda: Case(
        lambda: smp.nn.DistributedAttentionLayer(4, 4, HIDDEN, 0.0, 0.0, causal_mask_size=LENGTH),
        lambda: [values(SAMPLES, LENGTH, HIDDEN), additive_mask()],
        lambda state, x, mask: plain.attention(state, x, None, mask, {**SIZES, "causal_mask_size": LENGTH}),
        tupled,
    ),
    "cross attention": lambda: Case(
        lambda: smp.nn.DistributedAttentionLayer(4, 4, HIDDEN, 0.0, 0.0, cross_attention=True),
        lambda: [values(SAMPLES, LENGTH, HIDDEN), values(SAMPLES, 6, HIDDEN), additive_mask(6)],
        lambda state, x, states, mask: plain.attention(state, x, states, mask, SIZES),
        tupled,
    ),
    "output": lambda: Case(
        lambda: smp.nn.DistributedTransformerOutputLayer(HIDDEN, 24, 0.0, "relu", **PRE),
        lambda: [values(SAMPLES, LENGTH, HIDDEN)],
        lambda state, x: plain.output(state, x, {"activation": "relu"}),
    ),
    "layer, norm after": layer_case,
    "layer, norms before and after, ALiBi": lambda: layer_case(pre_layernorm=True, use_alibi=True, causal_mask_size=8),
    "layer, cross attention": lambda: layer_case(**PRE, add_cross_attention=True),
    "layer, GPT-J": lambda: layer_case(
        **PRE,
        parallel_residual=True,
        rotary_dim=2,
        rotary_interleaved=True,
        query_key_value_bias=False,
        causal_mask_size=8,
    ),
    "layer, GPT-NeoX": lambda: layer_case(
        **PRE, parallel_residual=True, parallel_layernorm=True, rotary_dim=4, causal_mask_size=8
    ),
    "stack, norms before and after": lambda: layer_case(num_layers=2, pre_layernorm=True, post_layernorm=True),
    "stack, GPT-Neo": lambda: layer_case(
        **PRE, num_layers=2, causal_mask_size=8, window_sizes=[None, 3], scale_attention_scores=False
    ),
    "stack, cross attention": lambda: layer_case(num_layers=2, add_cross_attention=True),
    "model, GPT-2": lambda: model_case(**PRE, causal_mask_size=LENGTH),
    "model, BERT": lambda: model_case(num_token_types=2),
    "model, decoder": lambda: model_case(**PRE, causal_mask_size=LENGTH, add_cross_attention=True),
    "model, both norms, own head": lambda: model_case(
        pre_layernorm=True, num_positions=0, rotary_dim=4, tie_lm_head=False, lm_head_bias=True, vocab_size=24
    ),
    "model without head": lambda: model_case(**PRE, add_lm_head=False),
}


def whole_state(module: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {
        name: torch.randn(global_shape(parameter), dtype=torch.float64) / 4
        for name, parameter in module.named_parameters()
    }


def load(module: nn.Module, state: State) -> None:
    if isinstance(module, smp.nn.DistributedModule):
        module.load_whole(state)
        return
    for name, child in module.named_children():
        load(child, plain.below(state, f"{name}."))


def whole_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Reduce a gradient as data parallelism does, and bring the pieces together."""
    assert parameter.grad is not None
    gradient, shard = parameter.grad.clone(), shard_of(parameter)
    if shard is None or shard.group is CommGroup.DP_GROUP:
        dist.all_reduce(gradient, group=smp.get_dp_process_group())
        gradient /= smp.dp_size()
    if shard is None:
        return gradient
    assert smp.rdp_size() == 1
    gradient *= shard.scale
    if shard.dim is None and shard.group is CommGroup.RDP_GROUP:  # each rank must have the same, without being told
        first = gradient.clone()
        dist.broadcast(first, group=smp.get_tp_process_group(), group_src=0)
        assert torch.equal(first, gradient)
    return join_shards(smp.allgather(gradient, smp.TP_GROUP), shard)


def part(x: Any, rank: int) -> Any:
    """Return what a rank brings of something of all samples."""
    if x is None or smp.state.cfg.prescaled_batch:
        return x
    return x.chunk(smp.tp_size())[rank]


def leaf(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor to differentiate by, unless it is none or a mask."""
    return x.clone().requires_grad_() if x is not None and x.is_floating_point() and x.dim() < 4 else x


def loss_of(output: Any, weights: torch.Tensor) -> torch.Tensor:
    """A mean over samples in which every element counts differently, and the loss of the model."""
    loss, values = output if isinstance(output, tuple) else (0, output)
    return loss + (values * weights).mean()


def differences(name: str) -> float:
    """Return the largest difference between a case on these ranks and in plain PyTorch."""
    case = CASES[name]()
    module = case.make().double()
    state = whole_state(module)
    load(module, state)
    torch.manual_seed(3)
    inputs = case.inputs()
    weights = values(SAMPLES, LENGTH, 24)
    pairs: list[tuple[Any, Any]] = []

    leaves = {name: value.clone().requires_grad_() for name, value in state.items()}
    whole = [leaf(x) for x in inputs]
    ranks = range(1 if smp.state.cfg.prescaled_batch else smp.tp_size())
    expected = [case.plainly(leaves, *(part(x, rank) for x in whole)) for rank in ranks]
    fitting = [fit(part(weights, rank), output) for rank, output in zip(ranks, expected, strict=True)]
    torch.stack([loss_of(*each) for each in zip(expected, fitting, strict=True)]).mean().backward()

    me = smp.tp_rank() if len(ranks) > 1 else 0
    mine = [leaf(part(x, me)) for x in inputs]
    output = case.call(module, *mine)
    loss_of(output, fitting[me]).backward()
    pairs += zip(flat(output), flat(expected[me]), strict=True)
    for ours, theirs in zip(mine, whole, strict=True):
        if ours is not None and theirs is not None and ours.grad is not None:
            pairs.append((ours.grad, part(theirs.grad, me) * len(ranks)))
    pairs += [(whole_gradient(each), leaves[name].grad) for name, each in module.named_parameters()]
    return max((a - b).abs().max().item() for a, b in pairs)


def flat(output: Any) -> list[torch.Tensor]:
    return list(output) if isinstance(output, tuple) else [output]


def fit(weights: torch.Tensor, output: Any) -> torch.Tensor:
    """Cut weights to the shape of an output."""
    values = flat(output)[-1]
    return (weights[:, 0] if values.dim() == 2 else weights)[..., : values.shape[-1]]


def compare(names: list[str]) -> dict[str, float]:
    found = {}
    degree = int(os.environ["WORLD_SIZE"])
    for prescaled, optimize in itertools.product([False, True] if degree > 1 else [False], ["speed", "memory"]):
        degrees = {"tensor_parallel_degree": degree, "ddp": True}
        smp.init({**degrees, "prescaled_batch": prescaled, "optimize": optimize})
        for name in names:
            found[f"{name}, prescaled {prescaled}, {optimize}"] = differences(name)
        smp.shutdown()
    return found


EACH_KIND = ["linear", "embedding", "embedding by an uneven vocabulary", "layer, GPT-NeoX", "stack, cross attention"]
EACH_KIND += ["model, GPT-2", "model, BERT"]


@pytest.mark.parametrize(
    ("size", "names"),
    [(1, EACH_KIND), (2, list(CASES)), (4, EACH_KIND[:4]), pytest.param(4, list(CASES), marks=pytest.mark.slow)],
    ids=["1", "2", "4", "4, all"],
)
def test_modules_equal_plain_pytorch(size: int, names: list[str]) -> None:
    for found in run_ranks(compare, size, names, timeout=150):
        assert len(found) == len(names) * (4 if size > 1 else 2)
        assert {case: found[case] for case in found if not found[case] < TOLERANCE} == {}


@smp.step
def train_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss, _ = model((ids, None, None, None, ids))
    model.backward(loss)
    return loss


def train_language_model(pipeline: int, tensor: int) -> dict[str, list[float]]:
    """Return the losses of four steps: they depend on all gradients and on how each is reduced."""
    found = {}
    for prescaled, optimize in itertools.product([False, True] if tensor > 1 else [False], ["speed", "memory"]):
        degrees = {"tensor_parallel_degree": tensor, "pipeline_parallel_degree": pipeline, "microbatches": 2}
        smp.init({**degrees, "ddp": True, "prescaled_batch": prescaled, "optimize": optimize})
        torch.manual_seed(0)
        sizes = {**SIZES, **DROPOUTS, **PRE, "num_layers": 2, "vocab_size": 21, "num_positions": LENGTH}
        model = smp.DistributedModel(smp.nn.DistributedTransformerLMHead(**sizes, causal_mask_size=LENGTH).double())
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        torch.manual_seed(1)
        ids = torch.randint(21, (8, LENGTH))
        if tensor > 1 and not prescaled:  # every microbatch has samples of all ranks
            ids = ids.view(2, tensor, -1, LENGTH)[:, smp.tp_rank()].flatten(0, 1)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = train_step(model, ids).reduce_mean().item()
            losses.append(sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size())
            optimizer.step()
        found[f"prescaled {prescaled}, {optimize}"] = losses
        smp.shutdown()
    return found


def test_a_language_model_trains_over_pipeline_and_tensor_ranks_as_in_one_process() -> None:
    (alone,) = run_ranks(train_language_model, 1, 1, 1)
    expected = alone["prescaled False, speed"]
    for found in run_ranks(train_language_model, 4, 2, 2, timeout=120):
        assert set(found) == {f"prescaled {p}, {o}" for p in (False, True) for o in ("speed", "memory")}
        for losses in found.values():
            assert losses == pytest.approx(expected, abs=TOLERANCE)


def train_with_dropout() -> dict[str, Any]:
    """Train with and without checkpointed layers, from weights that are made late, and evaluate."""
    found = {}
    for prescaled, optimize in itertools.product([False, True], ["speed", "memory"]):
        runs = []
        for checkpointed in (False, True):
            degrees = {"tensor_parallel_degree": 2, "ddp": True, "microbatches": 2}
            smp.init({**degrees, "prescaled_batch": prescaled, "optimize": optimize})
            torch.manual_seed(0)
            with smp.delay_param_initialization():
                sizes = {**SIZES, **PRE, "num_layers": 2, "vocab_size": 21, "num_positions": LENGTH}
                module = smp.nn.DistributedTransformerLMHead(**sizes, causal_mask_size=LENGTH)
            model = smp.DistributedModel(module)
            if checkpointed:
                smp.set_activation_checkpointing(module.transformer.seq_layers, strategy="each")
            optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
            ids = torch.randint(21, (4, LENGTH))
            losses = []
            for _ in range(2):
                optimizer.zero_grad()
                losses.append(train_step(model, ids).reduce_mean().item())
                optimizer.step()
            with torch.no_grad():
                logits = model.eval()((ids, None, None, None, None))
            runs.append((losses, logits.tolist()))
            smp.shutdown()
        found[f"prescaled {prescaled}, {optimize}"] = runs
    return found


def test_checkpointed_layers_drop_the_same_again_to_the_bit() -> None:
    for found in run_ranks(train_with_dropout, 2, timeout=120):
        for setting, (kept, computed_again) in found.items():
            assert kept == computed_again, setting
