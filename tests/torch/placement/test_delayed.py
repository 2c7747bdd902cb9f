"""A model made without memory gets its weights where it is placed, and the same ones for every partition."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.placement.delayed import initialize
from tests.models import Case, token_step, tokens
from tests.torch.steps import on_ranks, train_step
from tests.train import Trace, Way, same, trace_of, training

pytestmark = pytest.mark.usefixtures("world")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.get_buffer("scale")
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def make() -> Net:
    with smp.delay_param_initialization():
        return Net()


def storage_bytes(module: nn.Module) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in module.parameters())


def test_parameters_take_no_memory_and_keep_shapes_ties_and_buffers() -> None:
    module, plain = make(), Net()
    assert {n: p.shape for n, p in module.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    assert module.head.weight is module.embedding.weight
    assert module.get_buffer("scale").item() == 0.5
    assert storage_bytes(module) <= 8 * len(list(module.parameters()))


def test_copies_have_no_memory_either_and_get_values_of_their_own() -> None:
    """Layers are often copies of one (`nn.TransformerEncoder`): theirs were zeros."""
    smp.init()
    torch.manual_seed(1)
    with smp.delay_param_initialization():
        layer = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        layer[1].weight = layer[0].weight
        module: Any = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
    assert storage_bytes(module) <= 8 * len(list(module.parameters()))
    model = smp.DistributedModel(module)
    first, second = (each[0].weight for each in module)
    assert module[0][1].weight is first
    assert first.std() > 0.1
    assert not torch.equal(first, second)
    assert len(list(model.parameters())) == 6


def train_on_a_part(case: Case, way: Way) -> Trace:
    with training(case, way) as trained:
        outputs = [trained.run(number) for number in range(len(way.batches))]
        held = sum(p.untyped_storage().nbytes() for p in trained.model.local_parameters())
        assert (held < storage_bytes(Net().double())) == (way.pipeline > 1)
        return trace_of(outputs, trained.model)


@pytest.mark.parametrize("degree", [2, 4])
def test_weights_do_not_depend_on_the_partition(degree: int) -> None:
    same(Case(make, tokens, token_step), Way(pipeline=degree), like=Way(), by=train_on_a_part)


@on_ranks(2)
def test_a_state_dict_loads_into_a_model_without_memory() -> None:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    torch.manual_seed(3)
    plain, ids = Net(), torch.arange(8).view(4, 2)
    model = smp.DistributedModel(make())
    model.load_state_dict(plain.state_dict())
    expected = plain(ids).square().mean().item()
    assert train_step(model, ids).reduce_mean().item() == pytest.approx(expected, rel=1e-5)


def test_what_is_loaded_before_wrapping_stays(tmp_path: Path) -> None:
    """In the block it was dropped, and weights were drawn; after the block torch could not write it."""
    transformers = pytest.importorskip("transformers")
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=2, n_head=2))
    plain.save_pretrained(tmp_path)
    smp.init()
    with smp.delay_param_initialization():
        models = [transformers.GPT2LMHeadModel(plain.config) for _ in range(3)]
        models[0].load_state_dict(plain.state_dict())
        models[1].load_state_dict(plain.state_dict(), assign=True)
        models.append(transformers.GPT2LMHeadModel.from_pretrained(tmp_path))
    models[2].load_state_dict(plain.state_dict())
    for number, model in enumerate(models):
        initialize(model, [*model.parameters()], torch.device("cpu"), 3)
        same_values = [torch.equal(each, plain.get_parameter(name)) for name, each in model.named_parameters()]
        assert all(same_values), number


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_initialising_a_layer_keeps_the_statistics_that_were_loaded() -> None:
    with smp.delay_param_initialization():
        norm = nn.BatchNorm1d(3)
    norm.get_buffer("running_mean").fill_(2.0)
    initialize(norm, list(norm.parameters()), torch.device("cpu"), seed=0)
    assert norm.get_buffer("running_mean").tolist() == [2.0, 2.0, 2.0]
    assert norm.weight.tolist() == [1.0, 1.0, 1.0]


def test_initialising_what_was_not_loaded_keeps_what_was() -> None:
    """As a checkpoint without the bias, loaded with `strict=False`, or a head whose weight is that of an embedding."""
    with smp.delay_param_initialization():
        model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4))
        model[1].weight = model[0].weight
    model.load_state_dict({"0.weight": torch.full((4, 3), 2.0)}, strict=False)
    initialize(model, list(model.parameters()), torch.device("cpu"), seed=0)
    assert model.get_parameter("1.weight").unique().tolist() == [2.0]
    assert model.get_parameter("1.bias").abs().max() < 1


@on_ranks(2)
def test_a_module_that_was_loaded_in_part_keeps_that_when_it_is_replaced() -> None:
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    with smp.delay_param_initialization(), smp.tensor_parallelism():
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module.load_state_dict({"0.weight": torch.full((4, 4), 2.0)}, strict=False)
    loaded = smp.DistributedModel(module).state_dict()
    assert loaded["0.weight"].unique().tolist() == [2.0]
    assert 0 < loaded["0.bias"].abs().max() <= 0.5


def test_what_was_computed_from_weights_without_values_is_refused() -> None:
    """Fine-tuning scripts add tokens, which makes a head of its own from the old one: it was what lay in memory."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, tie_word_embeddings=False)
    smp.init()
    with smp.delay_param_initialization():
        late, early = transformers.GPT2LMHeadModel(config), transformers.GPT2LMHeadModel(config)
        early.resize_token_embeddings(40)
    late.resize_token_embeddings(40)
    with pytest.raises(UsageError, match=r"`lm_head.weight` was computed from parameters that have no values yet"):
        smp.DistributedModel(late)
    model = smp.DistributedModel(early)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        weight = model.get_module().get_parameter(name)
        assert weight.shape == (40, 16)
        assert weight.std().item() == pytest.approx(0.02, rel=0.2)


class HalfInitialised(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = nn.Parameter(torch.ones(3))  # `reset_parameters` does not know of it


@pytest.mark.parametrize("kind", [Stubborn, HalfInitialised])
def test_a_module_that_initialises_nothing_or_not_all_is_named(kind: type[nn.Module]) -> None:
    smp.init()
    with smp.delay_param_initialization():
        module = nn.Sequential(nn.Linear(3, 3), kind())
    with pytest.raises(UsageError, match=rf"initialise `.*` of `1` \({kind.__name__}\)"):
        smp.DistributedModel(module)


def reset_in_proj(attention: nn.MultiheadAttention) -> None:
    nn.init.xavier_uniform_(attention.in_proj_weight)
    nn.init.zeros_(attention.in_proj_bias)


def test_torchs_attention_is_initialised_as_the_refusal_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no `reset_parameters`, and its `_reset_parameters` sets those of another module, too."""
    smp.init()
    with smp.delay_param_initialization():
        module = nn.TransformerEncoderLayer(8, 2, 16)
    parameters, hint = list(module.parameters()), "hint: .*`MultiheadAttention.reset_parameters = function`"
    with pytest.raises(UsageError, match=f"`in_proj_weight` and `in_proj_bias` of `self_attn`(?s:.*){hint}"):
        initialize(module, parameters, torch.device("cpu"), seed=0)
    monkeypatch.setattr(nn.MultiheadAttention, "reset_parameters", reset_in_proj, raising=False)
    with smp.delay_param_initialization():
        module = nn.TransformerEncoderLayer(8, 2, 16)
    initialize(module, list(module.parameters()), torch.device("cpu"), seed=0)
    assert all(bool(each.isfinite().all()) for each in module.parameters())
