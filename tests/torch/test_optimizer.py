"""DistributedOptimizer is the user's optimizer to everything that takes one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from tests.torch.steps import on_ranks, wrap

pytestmark = pytest.mark.usefixtures("world")


def make(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> tuple[nn.Linear, Any]:
    smp.init()
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    return module, smp.DistributedOptimizer(optimizer(module.parameters(), **{"lr": 1.0, **options}))


def test_trap_8_schedulers_and_scalers_take_it_for_an_optimizer() -> None:
    module, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(module(torch.ones(1, 1)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    assert module.weight.item() == 0.0
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.5
    assert isinstance(optimizer, torch.optim.Optimizer)


@pytest.mark.parametrize("wrap_first", [True, False], ids=["model first", "optimizer first"])
def test_trap_9_it_may_be_made_before_or_after_the_model_is_wrapped(wrap_first: bool) -> None:
    smp.init()
    module = nn.Linear(1, 1, bias=False)
    if wrap_first:
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    else:
        inner = torch.optim.SGD(module.parameters(), lr=1.0)
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(inner)
    before = module.weight.item()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert module.weight.item() == before - 1


class OwnHalfPrecision:
    """As the optimizers that scripts of 2021 and 2022 brought along, after Apex: no torch optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.overflow = False
        self.loss_scaler: Any = "own"
        self.loss_scale = 128.0
        self._global_grad_norm = 3.0
        self.calls: list[tuple[Any, ...]] = []

    def zero_grad(self, set_grads_to_None: bool = False) -> None:  # noqa: N803 - their name
        self.calls.append(("zero_grad", set_grads_to_None))

    def step(self, closure: Any = None, grads: Any = None) -> None:
        self.calls.append(("step", closure, grads))

    def init_master_params(self, model: Any = None) -> str:
        self.calls.append(("init_master_params", model))
        return "made"

    def reload_model_params(self) -> None:
        self.calls.append(("reload_model_params",))

    def scale_it(self, factor: float) -> float:
        return factor * self.loss_scale


def test_it_is_the_half_precision_optimizer_of_the_script() -> None:
    smp.init()
    plain = OwnHalfPrecision(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    optimizer: Any = smp.DistributedOptimizer(plain)
    optimizer.zero_grad(set_grads_to_None=True)
    optimizer.zero_grad()
    optimizer.step(grads=[1])
    assert optimizer.init_master_params("model") == "made"
    optimizer.reload_model_params()
    assert plain.calls == [
        ("zero_grad", True),
        ("zero_grad", True),
        ("step", None, [1]),
        ("init_master_params", "model"),
        ("reload_model_params",),
    ]
    optimizer.overflow, optimizer.loss_scaler, optimizer.loss_scale = True, "new", 2.0
    assert (plain.overflow, plain.loss_scaler, plain.loss_scale) == (True, "new", 2.0)
    assert (optimizer.overflow, optimizer.loss_scaler, optimizer.loss_scale) == (True, "new", 2.0)
    assert optimizer.scale_it(3.0) == 6.0
    assert optimizer._global_grad_norm == 3.0
    optimizer.calls = []  # what the optimizer inside has is set there
    assert plain.calls == []
    optimizer.note = "mine"
    assert not hasattr(plain, "note")


def test_an_optimizer_whose_zero_grad_takes_nothing_may_be_wrapped() -> None:
    class Plain(OwnHalfPrecision):
        def zero_grad(self) -> None:  # type: ignore[override]
            self.calls.append(("zero_grad",))

    smp.init()
    optimizer: Any = smp.DistributedOptimizer(Plain(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)))
    optimizer.zero_grad()
    assert optimizer.calls == [("zero_grad",)]


def test_gradients_are_cleared_by_the_names_that_scripts_use() -> None:
    module, optimizer = make()
    for name in ("set_to_none", "set_grads_to_None", "set_grads_to_none"):
        for value in (False, True):
            module(torch.ones(1, 1)).sum().backward()
            optimizer.zero_grad(**{name: value})
            assert (module.weight.grad is None) == value


def test_the_loss_scaler_of_smpkit_can_be_replaced() -> None:
    from smpkit.torch.precision.loss_scale import DynamicLossScaler

    model = wrap(nn.Linear(1, 1), fp16=True)
    optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
    optimizer.loss_scaler = DynamicLossScaler(init_scale=8.0)
    assert optimizer.loss_scale == 8.0
    optimizer.overflow = True
    assert optimizer.overflow
    assert optimizer._global_grad_norm is None


def test_trap_14_its_local_state_is_marked_partial_and_loads_again() -> None:
    module, optimizer = make(torch.optim.AdamW)
    module(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    local = optimizer.local_state_dict(gather_if_shard=False)
    assert local["_smp_is_partial"] is True
    assert "_smp_is_partial" not in optimizer.state_dict()
    keys = list(local)
    optimizer.load_state_dict(local)
    assert list(local) == keys
    optimizer.load_state_dict({**optimizer.orig_state_dict(), "_smp_is_partial": False})
    optimizer.load_optimizer_backcompat(optimizer.save_optimizer_backcompat(gather_if_shard=False))


def test_param_groups_state_and_hooks_are_shared_with_the_optimizer_inside() -> None:
    module, optimizer = make(momentum=0.9)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 7.0})
    assert optimizer.optimizer.param_groups[1]["lr"] == 7.0
    assert optimizer.defaults["momentum"] == 0.9
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    module(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert calls == ["pre"]
    assert optimizer.state is optimizer.optimizer.state
    assert len(optimizer.state) == 1


def test_step_passes_a_closure_on() -> None:
    _, optimizer = make()
    assert optimizer.step(lambda: 3.0) == 3.0


def test_it_copies_and_prints() -> None:
    _, optimizer = make()
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 1.0
    assert repr(optimizer).startswith("DistributedOptimizer(SGD (")


def test_what_is_no_optimizer_is_refused_by_what_it_lacks() -> None:
    smp.init()
    with pytest.raises(
        UsageError, match="object is no optimizer: it has no `param_groups`, `state`, `step`, `zero_grad`"
    ):
        smp.DistributedOptimizer(object())
    _, optimizer = make()
    with pytest.raises(UsageError, match="a DistributedOptimizer already"):
        smp.DistributedOptimizer(optimizer)


def test_before_init_it_says_what_to_call() -> None:
    with pytest.raises(UsageError, match=r"smp\.init\(\)"):
        smp.DistributedOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


def test_an_update_that_accelerate_leaves_out_is_refused() -> None:
    # In `with accelerator.accumulate(model):` each batch had an update, whatever gradient_accumulation_steps said.
    gradients = pytest.importorskip("accelerate.state").GradientState()
    _, optimizer = make()
    gradients._set_sync_gradients(False)
    try:
        with pytest.raises(UsageError, match="a batch that accelerate's `accumulate` only adds up"):
            optimizer.step()
    finally:
        gradients._reset_state()
    optimizer.step()


@pytest.mark.parametrize("name", ["LayerWiseDummyOptimizer", "Lomo", "AdaLomo"])
def test_rules_that_update_in_backward_are_refused(name: str) -> None:
    # `optim="galore_adamw_layerwise"` updated after each microbatch; LOMO ended with an empty NotImplementedError.
    smp.init()
    rule: Any = type(name, (torch.optim.SGD,), {})  # transformers' and lomo_optim's
    with pytest.raises(UnsupportedError, match=f"{name} updates weights in backward"):
        smp.DistributedOptimizer(rule(nn.Linear(1, 1).parameters()))


OTHERS: Any = type("Adafactor", (torch.optim.SGD,), {})  # the one of Transformers has the name, and nothing of torch's
LAMB: Any = type("Lamb", (torch.optim.SGD,), {})  # timm's: it goes by the norms of matrices
AGC: Any = type("AGC", (torch.optim.SGD,), {})  # of nfnets-pytorch: it clips by the norms of rows
SAM: Any = type("SAM", (torch.optim.SGD,), {})  # it climbs by a norm of all gradients
MARS: Any = type("Mars", (torch.optim.SGD,), {})  # timm's: it clips by the norms of matrices


class Lookahead(torch.optim.SGD):
    """Around another rule, as timm's `lookahead_lamb`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self._base_optimizer = LAMB(parameters)


class Cautious(torch.optim.SGD):
    """As timm's `cadamw` and `clion`: its mask is divided by the mean over a matrix."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups[0]["caution"] = True


class LowRank(torch.optim.SGD):
    """As `AdamW` of GaLore and APOLLO: it projects each matrix."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups[0]["update_proj_gap"] = 200


PIECES = {
    "tensor_parallel_degree": (
        torch.optim.Adafactor,
        torch.optim.Muon,
        OTHERS,
        LAMB,
        AGC,
        SAM,
        MARS,
        Lookahead,
        Cautious,
        LowRank,
    ),
    "sharded_data_parallel_degree": (torch.optim.Adafactor, OTHERS, torch.optim.LBFGS),
}


@pytest.mark.parametrize("degree", PIECES)
@on_ranks(2)
def test_rules_that_look_at_more_than_a_rank_has_are_refused(degree: str) -> None:
    """They trained otherwise than in one process, or failed with an error of torch's about its DTensors."""
    smp.init({degree: 2, "ddp": True, "prescaled_batch": True})
    module = nn.Linear(4, 4, bias=False)
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    for rule in PIECES[degree]:
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(
            UnsupportedError, match=rf"{rule.__name__}( with `\w+`)? looks at (whole matrices|all parameters)"
        ):
            smp.DistributedOptimizer(rule(list(model.parameters()))).step(lambda: 0.0)


class ScheduleFree(torch.optim.SGD):
    """Goes to the weights that it evaluates and back, as `schedulefree.AdamWScheduleFree` does."""

    def eval(self) -> None:
        self._add(1.0)

    def train(self) -> None:
        self._add(-1.0)

    @torch.no_grad()
    def _add(self, distance: float) -> None:
        for parameter in self.state:
            parameter.add_(distance)


@pytest.mark.parametrize("config", [{"shard_optimizer_state": True}, {"bf16": True}], ids=str)
@on_ranks(2)
def test_hooks_after_a_step_and_switches_have_the_new_weights_of_the_model(config: dict[str, Any]) -> None:
    """An average that a hook keeps lagged a step behind, and evaluation ran with the weights for training."""
    smp.init({"ddp": True, **config})
    module = nn.Linear(2, 2)
    seen: list[set[float]] = []
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(ScheduleFree(model.parameters(), lr=1.0, momentum=0.9))

    def weights(*_: Any) -> None:
        seen.append({each.item() for parameter in model.parameters() for each in parameter.flatten()})

    handle = optimizer.register_step_post_hook(weights)
    model.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.eval()
    weights()
    optimizer.train()
    weights()
    assert seen == [{0.0}, {1.0}, {0.0}]
    handle.remove()
    optimizer.step()
    assert len(seen) == 3
