"""Models divided by the plan that they carry, on two real ranks: what is divided, what is not, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError
from smpkit.torch.placement.shards import shard_of
from smpkit.torch.tensor_parallel import plan
from tests.models_of_others import DIVIDED, DIVISIBLE, PARTLY_DIVIDED, divisible
from tests.torch.steps import on_ranks, wrap
from tests.train import batch

VOCABULARY = DIVIDED["vocab_size"]


def wrapped(module: nn.Module, **config: Any) -> Any:
    smp.set_tensor_parallelism(module)
    return wrap(module, tensor_parallel_degree=2, ddp=True, **config)


def samples() -> tuple[Any, ...]:
    return batch(DIVISIBLE["Llama"], 0, 8)


def fresh(name: str = "Llama") -> Any:
    return DIVISIBLE[name].build()


@on_ranks(2)
def test_logits_are_gathered_when_somebody_reads_them() -> None:
    model = wrapped(fresh(), prescaled_batch=True)
    tokens, mask, _ = samples()
    output = model(input_ids=tokens, attention_mask=mask, labels=tokens)
    kept = vars(output)["logits"]
    assert kept.shape[-1] == VOCABULARY // 2 + (smp.tp_rank() == 0)
    assert output[0] is output["loss"] is output.loss
    assert smp.tp_rank() or "logits=<not gathered>" in repr(output)  # of one rank alone
    assert vars(output)["logits"] is kept
    assert output.logits.shape == (*tokens.shape, VOCABULARY)
    assert output["logits"] is output.logits is output[1]
    assert model.get_module().lm_head(torch.zeros(1, 2, 16).double()).shape[-1] == VOCABULARY
    pair = model(input_ids=tokens, attention_mask=mask, labels=tokens, return_dict=False)
    torch.testing.assert_close(pair[1], output.logits)
    model.get_module().loss_function = lambda logits, **_: logits.sum() * 0 + logits.shape[-1]
    assert model(input_ids=tokens, labels=tokens).loss == VOCABULARY


@on_ranks(2)
def test_generated_tokens_are_those_of_one_process() -> None:
    """Ranks with batches of their own generate what one process does, whoever has padding, whoever ends first."""
    module = fresh("Qwen3")
    tokens, mask = (each[4:].flip(1) for each in samples()[:2])
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    plain = fresh("Qwen3").generate(tokens, attention_mask=mask, **options)
    model = wrapped(module, optimize="memory")
    mine = slice(2 * smp.tp_rank(), 2 * smp.tp_rank() + 2)
    options["eos_token_id"] = plain[:2, tokens.shape[1]].tolist()
    plain = fresh("Qwen3").generate(tokens, attention_mask=mask, **options)
    made = model.get_module().generate(tokens[mine], attention_mask=mask[mine], **options)
    assert torch.equal(made, plain[mine, : made.shape[1]])
    assert made.shape[1] == tokens.shape[1] + (3 if smp.tp_rank() else 1)
    with pytest.raises(UnsupportedError, match="beam search reorders the cache"):
        model.get_module().generate(tokens[mine], num_beams=2)
    packed = torch.arange(tokens.shape[1]).remainder(3).expand_as(tokens)  # without a mask: two sequences in a sample
    with torch.no_grad():
        ours = model(input_ids=tokens[mine], position_ids=packed[mine]).logits
        theirs = fresh("Qwen3")(input_ids=tokens, position_ids=packed).logits[mine]
    torch.testing.assert_close(ours, theirs)


@on_ranks(2)
def test_what_has_an_adapter_stays_whole() -> None:
    """A model inside of PEFT's is found, and what has an adapter stays whole."""
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found, unused-ignore]

    module = get_peft_model(fresh(), LoraConfig(target_modules=["q_proj"]))
    model = wrapped(module, prescaled_batch=True)
    layer = model.get_module().base_model.model.model.layers[0]
    assert layer.mlp.gate_proj.weight.shape == (12, 16)
    assert layer.self_attn.q_proj.base_layer.weight.shape == (16, 16)


@on_ranks(2)
def test_what_the_script_leaves_out_stays_whole() -> None:
    module = fresh()
    smp.set_tensor_parallelism(module)
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "optimize": "speed"})
    smp.set_tensor_parallelism(module.model.layers[0].mlp, enabled=False)
    model: Any = smp.DistributedModel(module)
    shards = {name: shard_of(each) for name, each in model.get_module().named_parameters()}
    assert shards["model.layers.0.mlp.gate_proj.weight"] != shards["model.layers.1.mlp.gate_proj.weight"]
    layers: Any = model.get_module().model.layers
    assert layers[0].mlp.gate_proj.weight.shape == (24, 16)
    assert layers[1].mlp.gate_proj.weight.shape == (12, 16)


@on_ranks(2)
def test_what_a_layer_adds_between_its_divided_layers_is_whole() -> None:
    """What a layer does between and beside its divided layers is computed on whole values."""
    plain, module = fresh(), fresh()
    for each in (plain, module):
        mlp = each.model.layers[1].mlp
        vars(mlp)["forward"] = lambda x, mlp=mlp: mlp.down_proj(mlp.up_proj(x)) * mlp.gate_proj.weight.mean() * 0 + x
    model = wrapped(module, prescaled_batch=True)
    tokens, *_ = samples()
    for each in (plain, model):
        each(input_ids=tokens, labels=tokens).loss.backward()
    ours, theirs = (each.model.layers[1].input_layernorm.weight.grad for each in (model.get_module(), plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def refused(module: nn.Module, message: str, **config: Any) -> None:
    with pytest.raises(UnsupportedError, match=message):
        wrapped(module, **config)


@on_ranks(2)
def test_what_the_plan_cannot_divide_is_refused() -> None:
    dropped = fresh("Phi")
    dropped.model.layers[0].resid_dropout.p = 0.5
    refused(dropped, r"PhiModel has dropout \(`layers\.0\.resid_dropout`: 0\.5\)", optimize="speed")
    by_function: Any = divisible("Starcoder2").build()  # it calls the function
    by_function.config.residual_dropout = 0.5
    refused(by_function, r"Starcoder2Model has dropout \(`config\.residual_dropout`: 0\.5\)")
    for case, name in (
        (DIVISIBLE["Mixtral"], "model.layers.0.mlp.gate"),
        (PARTLY_DIVIDED["Qwen3Next"], "model.layers.0.linear_attn"),
        (PARTLY_DIVIDED["Llama of three heads"], "model.layers.0.self_attn.q_proj"),
    ):
        refused(case.build(), f"`{name}` is not in a block that tensor parallelism divides", optimize="memory")
    for style, name in (("diagonal", "diagonal"), (object(), "object")):  # diffusers' plans have objects, too
        unknown = fresh()
        unknown._tp_plan = {**unknown._tp_plan, "model.layers.*.mlp.up_proj": style}
        refused(unknown, rf"divides `model\.layers\.\*\.mlp\.up_proj` by the style `{name}`", optimize="speed")
    smp.shutdown()
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "optimize": "speed"})
    for layer in unknown.model.layers:
        smp.set_tensor_parallelism(layer.mlp.up_proj, enabled=False)
    smp.DistributedModel(unknown)
    assert unknown.model.layers[0].mlp.up_proj.weight.shape == (24, 16)


def test_every_style_of_transformers_is_known() -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES  # type: ignore[attr-defined]

    refused_by_name = {"sequence_parallel", "embedding_colwise"}
    known = {*plan._DIVISIONS, *plan._EXPERTS, *plan._WHOLE, *plan._OTHER}
    of_experts = {"ep_dispatch_experts", "grouped_gemm"}  # of a plan of its own; there once a model has imported them
    assert {*ALL_PARALLEL_STYLES.keys()} - of_experts == known | refused_by_name


@on_ranks(2)
def test_weights_that_are_made_late_are_pieces_of_those_of_one_rank() -> None:
    """Weights that are made late are pieces of those that one rank would make, however the others are seeded."""
    states = []
    for degree in (1, 2):
        smp.init({"tensor_parallel_degree": degree, "ddp": True})
        with smp.delay_param_initialization():
            module = divisible("Llama", tie_word_embeddings=True).build()
        torch.manual_seed(5 + smp.tp_rank())
        smp.set_tensor_parallelism(module)
        states.append(smp.DistributedModel(module).original_state_dict())
        smp.shutdown()
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


class NormedEmbedding(nn.Embedding):
    """As Inkling has it: what it looks up goes through a norm of its own."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, indices: Tensor) -> Tensor:
        return self.norm(super().forward(indices))


class EmbeddingOfPictures(nn.Embedding):
    """As T5Gemma2 has it: one token's vector is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, 16)
        self.end_of_image = nn.Parameter(torch.ones(16))

    def forward(self, indices: Tensor) -> Tensor:
        return torch.where(indices.unsqueeze(-1) == 5, self.end_of_image, super().forward(indices))


@on_ranks(2)
def test_embeddings_with_more_than_a_table_give_the_same() -> None:
    tokens, *_ = samples()
    for kind in (NormedEmbedding, EmbeddingOfPictures):
        torch.manual_seed(7)
        embedding = kind().double()
        plain, module = fresh(), fresh()
        for each in (plain, module):
            each.model.embed_tokens = copy.deepcopy(embedding)
        model = wrapped(module, prescaled_batch=True)
        torch.testing.assert_close(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)


@on_ranks(2)
def test_a_weight_that_a_forward_reads_itself_is_right() -> None:
    """As Liger's kernels do, a forward computes the loss from the weight of the head."""
    from transformers import LlamaForCausalLM

    class Fused(LlamaForCausalLM):
        def forward(self, input_ids: Any = None) -> Any:
            return self.loss_of(self.model(input_ids=input_ids)[0])

        def loss_of(self, hidden: Tensor) -> Tensor:
            return (hidden.to(self.lm_head.weight.dtype) @ self.lm_head.weight.t()).logsumexp(-1).mean()

    tokens, *_ = samples()
    plain, module = fresh(), fresh()
    for each in (plain, module):
        each.__class__ = Fused
    model = wrapped(module, prescaled_batch=True)
    assert module.model.layers[0].mlp.gate_proj.weight.shape == (12, 16)
    losses = [each(input_ids=tokens) for each in (model, plain)]
    losses[0].backward()
    losses[1].backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(module.lm_head.weight.grad, plain.lm_head.weight.grad)


def test_norms_of_latent_attention_see_whole_values() -> None:
    """They are as wide as what the divided projections behind them take; norms of queries are not."""
    attention: Any = nn.Module()
    attention.q_a_layernorm, attention.q_b_proj, attention.q_norm = nn.LayerNorm(6), nn.Linear(6, 16), nn.LayerNorm(4)
    group = plan._Group("", "", [plan._Named("q_b_proj", "colwise", attention, attention.q_b_proj)])
    assert [name for name, _ in group.unnamed_inside()] == ["q_norm"]
    assert plan._why_heads_differ(group) is None
    attention.q_norm = nn.ModuleList(nn.LayerNorm(4) for _ in range(4))  # as StableLM has them
    assert plan._why_heads_differ(group) == "`q_norm` has weights of its own for each head"


def test_losses_are_those_of_hugging_face() -> None:
    """Every argument of the loss means what it does there; without tensor parallelism logits are whole."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    from smpkit.torch.tensor_parallel.loss import causal_loss

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
