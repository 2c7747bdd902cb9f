"""Models divided by the plan that they carry, on two real ranks: what is divided, what is not, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.placement.shards import shard_of
from smpkit.torch.tensor_parallel.hf_plan.apply import parallel_blocks, styles_of
from smpkit.torch.tensor_parallel.layouts import Layout
from tests.models_of_others import DIVIDED, DIVISIBLE, divisible
from tests.ranks import run_ranks
from tests.train import batch

VOCABULARY = DIVIDED["vocab_size"]


def wrapped(module: nn.Module, **config: Any) -> Any:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, **config})
    smp.set_tensor_parallelism(module)
    return smp.DistributedModel(module)


def samples() -> tuple[Any, ...]:
    return batch(DIVISIBLE["Llama"], 0, 8)


def fresh(name: str = "Llama") -> Any:
    return DIVISIBLE[name].build()


def lazy_logits() -> None:
    model = wrapped(fresh(), prescaled_batch=True)
    tokens, mask, _ = samples()
    output = model(input_ids=tokens, attention_mask=mask, labels=tokens)
    kept = vars(output)["logits"]
    assert kept.shape[-1] == VOCABULARY // 2 + (smp.tp_rank() == 0)
    assert output[0] is output["loss"] is output.loss
    assert vars(output)["logits"] is kept
    assert output.logits.shape == (*tokens.shape, VOCABULARY)
    assert output["logits"] is output.logits is output[1]
    assert model.get_module().lm_head(torch.zeros(1, 2, 16).double()).shape[-1] == VOCABULARY
    pair = model(input_ids=tokens, attention_mask=mask, labels=tokens, return_dict=False)
    torch.testing.assert_close(pair[1], output.logits)
    model.get_module().loss_function = lambda logits, **_: logits.sum() * 0 + logits.shape[-1]
    assert model(input_ids=tokens, labels=tokens).loss == VOCABULARY
    smp.shutdown()


def generation() -> None:
    """Ranks with batches of their own generate what one process does."""
    module = fresh("Qwen3")
    tokens, mask = (each[:4].flip(1) for each in samples()[:2])
    options = {"max_new_tokens": 3, "do_sample": False}
    plain = fresh("Qwen3").generate(tokens, attention_mask=mask, **options)
    model = wrapped(module, optimize="memory")
    mine = slice(2 * smp.tp_rank(), 2 * smp.tp_rank() + 2)
    made = model.get_module().generate(tokens[mine], attention_mask=mask[mine], **options)
    assert torch.equal(made, plain[mine])
    smp.shutdown()


def exceptions() -> None:
    module = fresh()
    smp.set_tensor_parallelism(module)
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    smp.set_tensor_parallelism(module.model.layers[0].mlp, enabled=False)
    model: Any = smp.DistributedModel(module)
    shards = {name: shard_of(each) for name, each in model.get_module().named_parameters()}
    assert shards["model.layers.0.mlp.gate_proj.weight"] != shards["model.layers.1.mlp.gate_proj.weight"]
    layers: Any = model.get_module().model.layers
    assert layers[0].mlp.gate_proj.weight.shape == (24, 16)
    assert layers[1].mlp.gate_proj.weight.shape == (12, 16)
    smp.shutdown()


def other_shapes() -> None:
    model = wrapped(fresh())
    tokens, *_ = samples()
    with pytest.raises(
        UsageError, match=r"different inputs: input_ids \[2, 6\] on rank 0; input_ids \[3, 6\] on rank 1"
    ):
        model.get_module()(input_ids=tokens[: 2 + smp.tp_rank()])
    smp.shutdown()


def paths_past_the_sum() -> None:
    """A block that adds its own input to its result would train on wrong gradients."""
    module = fresh()
    mlp = module.model.layers[1].mlp
    plain = mlp.forward
    vars(mlp)["forward"] = lambda x: x + plain(x)
    model = wrapped(module, prescaled_batch=True)
    tokens, *_ = samples()
    with pytest.raises(UnsupportedError, match=r"`model.layers.1.mlp` .* what enters it reaches its result"):
        model(input_ids=tokens)
    smp.shutdown()


def dropout() -> None:
    """Values that all ranks have would be dropped differently where each has random numbers of its own."""
    module: Any = fresh("Phi")
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.5
    model: Any = wrapped(module, optimize="speed").get_module()
    assert model.model.layers[0].mlp.fc2.tp_layout is Layout.SHARD_BATCH
    smp.shutdown()
    module = divisible("Starcoder2").build()
    assert not any(isinstance(each, nn.Dropout) for each in module.modules())  # it calls the function, and its layers
    module.config.residual_dropout = 0.5  # have the chance from there
    model = wrapped(module, optimize="speed").get_module()
    assert model.model.layers[0].mlp.c_proj.tp_layout is Layout.SHARD_BATCH
    smp.shutdown()
    plain: Any = wrapped(fresh("Phi"), optimize="speed").get_module()
    assert plain.model.layers[0].mlp.fc2.tp_layout is Layout.REPLICATE_GATHERED
    smp.shutdown()


def delayed() -> None:
    """Weights that are made late are pieces of those that one rank would make."""
    for case in (divisible("Llama", tie_word_embeddings=True), DIVISIBLE["GPT2"]):
        states = []
        for degree in (1, 2):
            smp.init({"tensor_parallel_degree": degree, "ddp": True})
            torch.manual_seed(5)
            with smp.delay_param_initialization():
                module = case.build()
            smp.set_tensor_parallelism(module)
            states.append(smp.DistributedModel(module).original_state_dict())
            smp.shutdown()
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            assert torch.equal(states[1][name], value), name


def indivisible() -> None:
    """Three heads stay whole, and so does what belongs to them."""
    case = divisible("Llama", hidden_size=12, num_attention_heads=3, num_key_value_heads=3)
    module = case.build()
    model = wrapped(module, prescaled_batch=True)
    layer = model.get_module().model.layers[0]
    assert layer.self_attn.q_proj.weight.shape == (12, 12)
    assert layer.mlp.gate_proj.weight.shape == (12, 12)
    tokens, *_ = samples()
    expected = case.build()(input_ids=tokens)
    torch.testing.assert_close(model(input_ids=tokens).logits, expected.logits)
    smp.shutdown()


def everything() -> None:
    for case in (lazy_logits, generation, exceptions, other_shapes, paths_past_the_sum, dropout, delayed, indivisible):
        case()


def test_on_two_ranks() -> None:
    run_ranks(everything, 2, timeout=120)


def test_blocks() -> None:
    module = DIVISIBLE["Qwen3"].build()
    blocks = {block.name: block for block in parallel_blocks(module, styles_of(module))}
    assert sorted(blocks) == [f"model.layers.{layer}.{part}" for layer in (0, 1) for part in ("mlp", "self_attn")]
    attention = blocks["model.layers.1.self_attn"]
    assert attention.stack == "model.layers"
    assert set(attention.layers) == {f"model.layers.1.self_attn.{each}_proj" for each in "qkvo"}
    assert isinstance(attention.module, nn.Module)


def test_losses_are_those_of_hugging_face() -> None:
    """Every argument of the loss means what it does there; without tensor parallelism logits are whole."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    from smpkit.torch.tensor_parallel.hf_plan.head import causal_loss

    smp.init({})
    numbers = torch.Generator().manual_seed(0)
    logits: Tensor = torch.randn(2, 5, 7, generator=numbers)
    labels = torch.randint(0, 7, (2, 5), generator=numbers)
    labels[0, 2:] = -100
    for more in ({}, {"num_items_in_batch": 3}, {"shift_labels": labels}):
        given: dict[str, Any] = more
        torch.testing.assert_close(causal_loss(logits, labels, 7, **given), ForCausalLMLoss(logits, labels, 7, **given))
    labels[0, 2:] = 4
    expected = ForCausalLMLoss(logits, labels, 7, ignore_index=4)
    torch.testing.assert_close(causal_loss(logits, labels, 7, ignore_index=4), expected)
    smp.shutdown()
