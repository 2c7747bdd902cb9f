"""What was set before tensor parallelism replaced modules acts on what took their place, on two real ranks.

Optimizers made before the model is wrapped train the new parameters; layers that were to be checkpointed are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.core.module_call import ModuleCall
from tests.models_of_others import DIVISIBLE, REPLACED
from tests.ranks import run_ranks
from tests.train import batch

Make = Callable[[nn.Module], Any]


def by_decay(module: nn.Module) -> torch.optim.Optimizer:
    """Decay matrices only, and train norms faster, as scripts do."""
    named = list(module.named_parameters())
    groups = [
        {"params": [each for _, each in named if each.dim() > 1], "weight_decay": 0.3},
        {"params": [each for _, each in named if each.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-4)


def trained(name: str, order: str, config: Mapping[str, Any]) -> dict[str, Tensor]:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, **config})
    case = DIVISIBLE[name]
    module = case.build()
    smp.set_tensor_parallelism(module)
    inside = None if order == "last" else by_decay(module)
    if order == "first":
        optimizer = smp.DistributedOptimizer(inside)
        model = smp.DistributedModel(module)
    else:
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(by_decay(model) if inside is None else inside)
    for step in range(2):
        optimizer.zero_grad()
        smp.step(case.step)(model, *batch(case, step, 8))
        optimizer.step()
    weights = {key: each.clone() for key, each in model.original_state_dict().items()}
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    if not config:
        assert held == {id(each) for each in model.parameters()}
    smp.shutdown()
    return weights


def orders() -> None:
    """Before, between and after: the same weights, with groups of their own, and in half precision."""
    for name, config in (("GPT2", {}), ("GPTJ", {}), ("Llama", {}), ("GPT2", {"bf16": True})):
        expected = trained(name, "last", config)
        for order in ("first", "between"):
            made = trained(name, order, config)
            for key, each in expected.items():
                assert torch.equal(made[key], each), (name, order, key)


def start(module: nn.Module) -> nn.Module:
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    smp.set_tensor_parallelism(module)
    return module


def names_follow() -> None:
    module = start(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    inside = torch.optim.SGD(module.named_parameters(), lr=0.1)
    names = list(inside.param_groups[0]["param_names"])
    same_list = inside.param_groups[0]["params"]
    model = smp.DistributedModel(module)
    smp.DistributedOptimizer(inside)
    assert inside.param_groups[0]["param_names"] == names
    assert inside.param_groups[0]["params"] is same_list
    assert list(map(id, same_list)) == list(map(id, model.parameters()))
    smp.shutdown()


def refused(module: nn.Module, make: Make, expected: str, *, before: bool = False) -> None:
    start(module)
    inside = make(module)
    if before:
        smp.DistributedOptimizer(inside)
        with pytest.raises(UsageError, match=expected):
            smp.DistributedModel(module)
    else:
        smp.DistributedModel(module)
        with pytest.raises(UsageError, match=expected) as caught:
            smp.DistributedOptimizer(inside)
        assert caught.value.hint == "make the optimizer of `model.parameters()` after smp.DistributedModel"
    smp.shutdown()


class Own:
    """A script's own optimizer, with lists of its own."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.param_groups = [{"params": params}]
        self.state: dict[Any, Any] = {}

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


def apart(module: Any) -> torch.optim.Optimizer:
    attention = module.transformer.h[0].attn
    rest = [each for each in module.parameters() if each is not attention.k_proj.weight]
    return torch.optim.SGD([{"params": rest}, {"params": [attention.k_proj.weight]}], lr=0.1)


class Fresh(nn.Linear):
    """A class whose replacement starts with weights of its own."""


def refusals() -> None:
    def adagrad(module: nn.Module) -> Any:
        return torch.optim.Adagrad(module.parameters())

    divided = "has states of parameters that smp.DistributedModel has divided"
    refused(nn.Sequential(nn.Linear(4, 4)), adagrad, f"Adagrad {divided}")
    refused(nn.Sequential(nn.Linear(4, 4)), adagrad, f"Adagrad {divided}", before=True)
    refused(DIVISIBLE["Llama"].build(), adagrad, f"Adagrad {divided}")
    owned = r"Own was made before smp.DistributedModel, which has replaced `0.weight` and 1 other parameters of its"
    refused(nn.Sequential(nn.Linear(4, 4)), lambda module: Own([*module.parameters()]), owned)
    keys = ", ".join(f"`transformer.h.0.attn.{each}_proj.weight`" for each in "kvq")
    packed = rf"`transformer.seq_layers.0.attention.query_key_value.weight` took the place of {keys}, which are not all"
    refused(DIVISIBLE["GPTJ"].build(), apart, packed)
    smp.tp_register_with_module(
        Fresh, smp.nn.DistributedLinear, init_hook=lambda inputs, outputs: ((inputs, outputs), {})
    )
    unknown = "it is not known what `0.weight` took the place of"
    refused(nn.Sequential(Fresh(4, 4)), lambda module: torch.optim.SGD(module.parameters(), lr=0.1), unknown)


def checkpointing_follows() -> None:
    """Each block is checkpointed in whatever has its weights; what has no counterpart is named."""
    for name, case in REPLACED.items():
        module: Any = start(case.build())
        blocks = next(each for each in module.modules() if isinstance(each, nn.ModuleList))
        smp.set_activation_checkpointing(blocks, preserve_rng_state=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = smp.DistributedModel(module)
        layers = [each for each in model.modules() if isinstance(each, smp.nn.DistributedTransformerLayer)]
        assert len(layers) == len(blocks) > 1, name
        for layer in layers:
            checkpoint: Any = ModuleCall.of(layer).checkpointing
            assert checkpoint.module is layer, name
            assert not checkpoint.preserve_rng_state
        assert len(checkpointed(model)) == len(layers), name
        smp.shutdown()
    module = start(nn.Sequential(nn.Linear(4, 4), DIVISIBLE["GPT2"].build()))
    smp.set_activation_checkpointing(module[0], strategy="each")
    smp.set_activation_checkpointing(module[1].transformer.h[0].mlp)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = smp.DistributedModel(module)
    if smp.rank() == 0:
        expected = (
            "`1.transformer.h.0.mlp` is not checkpointed: tensor parallelism replaced it, and no part of the"
            " HuggingFaceLMHead has its weights and no others; call smp.set_activation_checkpointing after"
            " smp.DistributedModel"
        )
        assert [str(each.message) for each in caught] == [expected]
    assert checkpointed(model) == [model.get_submodule("module.0")]
    smp.shutdown()


def checkpointed(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if ModuleCall.of(each).checkpointing is not None]


def everything() -> None:
    for case in (orders, names_follow, refusals, checkpointing_follows):
        case()


def test_on_two_ranks() -> None:
    run_ranks(everything, 2, timeout=120)


def load_whole_states() -> tuple[str, str | None]:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "fp16": True})
    with smp.tensor_parallelism():
        module = nn.Linear(4, 6)
    optimizer = torch.optim.AdamW(module.parameters())
    whole = {**optimizer.state_dict(), "state": {0: {"step": torch.ones(()), "exp_avg": torch.zeros(6, 4)}}}
    model = smp.DistributedModel(module)
    with pytest.raises(UsageError) as caught:
        smp.DistributedOptimizer(torch.optim.AdamW(model.parameters())).load_state_dict(whole)
    return str(caught.value).splitlines()[0], caught.value.hint


def test_states_of_whole_weights_are_refused_where_weights_are_divided() -> None:
    message = (
        "`exp_avg` of parameter 0 in the optimizer state has the shape of the whole weight, [6, 4],"
        " but a tensor-parallel rank has a part of it, [6, 2]"
    )
    hint = "go on from a partial checkpoint of smp.save_checkpoint, which resumes at any degrees"
    assert run_ranks(load_whole_states, 2) == [(message, hint)] * 2
