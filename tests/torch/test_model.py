"""DistributedModel behaves as the user's model under the user's names."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.model import DistributedModel
from tests.torch.steps import on_ranks

pytestmark = pytest.mark.usefixtures("world")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


def wrap(module: nn.Module | None = None, **options: Any) -> DistributedModel:
    smp.init()
    return smp.DistributedModel(module or Net(), **options)


def test_it_says_what_it_is_in_one_line_also_when_the_job_is_over() -> None:
    model = wrap()
    smp.shutdown()
    assert repr(model) == "DistributedModel(Net, pipeline 1 × tensor 1 × data 1)"


def test_names_are_the_users_own() -> None:
    plain, model = Net(), wrap()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]
    assert len(list(model.parameters())) == len(list(model.local_parameters())) == 4
    assert [name for name, _ in model.local_named_modules()] == ["", "layer", "norm"]


class Generating(Net):
    """Has what Hugging Face's models have."""

    generate = save_pretrained = Net.forward


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("generate", r"model.get_module\(\).generate"),
        ("save_pretrained", r"smp.save_pretrained\(folder\)"),
        ("no_sync", r"smp.DistributedModel\(model, backward_passes_per_step=count\)"),  # of torch's DDP
    ],
    ids=["generate", "save_pretrained", "no_sync"],
)
def test_what_the_users_model_has_is_named_where_it_is(name: str, instead: str) -> None:
    model = wrap(Generating())
    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=f"has no `{name}`: write `{instead}`"):
        getattr(model, name)
    with pytest.raises(AttributeError, match="'DistributedModel' object has no attribute 'generates'"):
        getattr(model, "generates")  # noqa: B009


def new_layer(module: Any) -> None:
    module.layer = nn.Linear(2, 3)


def new_weight(module: Any) -> None:
    module.layer.weight = nn.Parameter(torch.ones(3, 2))


@pytest.mark.parametrize("change", [new_layer, new_weight])
@on_ranks(2)
def test_a_new_parameter_after_wrapping_is_refused(change: Any) -> None:
    # Ranks trained embeddings of another size each for itself, or not at all.
    smp.init({"ddp": True})
    model: Any = smp.DistributedModel(Net())
    with pytest.raises(UsageError, match=r"was given a new parameter of shape \[3, 2\] after smp.DistributedModel"):
        change(model.get_module())
    change(Net())  # another model
    module = model.get_module()
    module.same, module.layer.weight = module.layer, module.layer.weight


def test_trap_15_the_module_is_reached_by_one_hop_more() -> None:
    module: Any = Net()
    model: Any = wrap(module)
    assert model.get_module() is model.module is module
    same = model.module.module
    assert same.layer is module.layer
    assert isinstance(same, Net)
    same.training = False
    assert not module.training
    assert not hasattr(same, "module")  # transformers 4.28 unwraps a model until it has none (D4)
    copied: Any
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.module.layer is copied.layer is not module.layer
    assert "module" not in dict(module.named_modules())
    assert list(module.state_dict()) == list(Net().state_dict())
    assert isinstance(model.module.layer, nn.Linear)


def test_trap_15_a_module_with_a_module_of_its_own_keeps_it() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Net()

        def forward(self, x: torch.Tensor) -> Any:
            return self.module(x)

    inner = Wrapper()
    model: Any = wrap(inner)
    assert model.get_module() is model.module is inner
    # Scripts before 1.10 with a wrapper for half precision: SMP's own for `ddp` came between the two.
    assert model.module.module is inner.module
    assert model.module.module.module.layer is inner.module.layer
    assert not hasattr(model.module.module.module, "module")
    assert list(model.state_dict()) == list(Wrapper().state_dict())


def test_trap_15_train_and_eval_return_the_model() -> None:
    model = wrap()
    assert model.eval() is model
    assert not model.get_module().training
    assert model.train() is model
    assert model.get_module().training


def test_trap_14_local_state_dict_is_marked_partial_and_loads_again() -> None:
    model = wrap()
    local = model.local_state_dict()
    assert local.pop("_smp_is_partial") is True
    for mark in (True, False):
        model.load_state_dict({**local, "_smp_is_partial": mark})
    model.load_state_dict(Net().state_dict(), same_partition_load=True)


class Versioned(Net):
    """Loads nothing that does not say which version it is of, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version") != 2:
            raise ValueError(f"there is no version {local_metadata.get('version')}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("gather", [False, True])
def test_state_dicts_say_of_which_versions_modules_are(gather: bool, tmp_path: Path) -> None:
    model = wrap(Versioned())
    state = model.state_dict(gather_to_rank0=gather)
    Versioned().load_state_dict(state)
    model.load_state_dict(state)
    model.load_state_dict(model.local_state_dict())
    smp.save_checkpoint(tmp_path, "whole", partial=False)
    Versioned().load_state_dict(torch.load(tmp_path / "whole"))


def test_trap_11_load_state_dict_leaves_its_argument_alone_and_is_strict() -> None:
    model = wrap()
    state = {**model.state_dict(), "_smp_is_partial": False}
    keys = list(state)
    model.load_state_dict(state)
    assert list(state) == keys
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**state, "surplus": torch.zeros(1)})
    model.load_state_dict({**state, "surplus": torch.zeros(1)}, strict=False)


@on_ranks(2)
def test_every_replica_has_a_first_rank_of_its_own_to_gather_to() -> None:
    smp.init({"ddp": True})
    assert len(smp.DistributedModel(Net()).state_dict(gather_to_rank0=True)) == 7


def test_trap_10_hooks_get_model_and_optimizer_once_each_at_their_time() -> None:
    calls: list[tuple[Any, ...]] = []

    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        calls.append(("forward",))
        model.backward(model(x).sum())

    smp.init({"microbatches": 2})
    module = nn.Linear(2, 1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    model.register_post_partition_hook(lambda m, o: calls.append(("partition", m is model, o is optimizer)))
    model.register_post_step_hook(lambda m, o: calls.append(("step", m is model, module.weight.grad is not None)))
    removed = model.register_post_step_hook(lambda m, o: calls.append(("removed",)))
    removed.remove()
    train(model, torch.ones(4, 2))
    train(model, torch.ones(4, 2))
    assert calls == [("partition", True, True), *[("forward",)] * 2, ("step", True, True), *[("forward",)] * 2]


def test_trap_10_without_a_step_function_hooks_run_around_forward_and_optimizer() -> None:
    calls: list[str] = []
    module = nn.Linear(2, 1)
    model = wrap(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    model.register_post_partition_hook(lambda m, o: calls.append("partition"))
    model.register_post_step_hook(lambda m, o: calls.append("step"))
    model(torch.ones(1, 2)).sum().backward()
    assert calls == ["partition"]
    optimizer.step()
    assert calls == ["partition", "step"]


def test_trap_10_an_optimizer_that_is_loaded_by_a_hook_of_a_hook_resumes_exactly() -> None:
    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).square().mean())

    def begin() -> tuple[Any, Any]:
        torch.manual_seed(1)
        model = wrap(nn.Linear(2, 2))
        return model, smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))

    def update(model: Any, optimizer: Any, number: int) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        train(model, torch.eye(2) + number)
        optimizer.step()
        return copy.deepcopy(model.state_dict())

    model, optimizer = begin()
    weights, states = update(model, optimizer, 0), copy.deepcopy(optimizer.state_dict())
    expected = [update(model, optimizer, number) for number in (1, 2)]
    smp.shutdown()

    model, optimizer = begin()
    model.load_state_dict(weights)
    # GPT scripts of 2022 do so: when the step has ended, the model is partitioned.
    model.register_post_step_hook(lambda m, _: m.register_post_partition_hook(lambda _, o: o.load_state_dict(states)))
    for number, each in enumerate(expected, 1):
        torch.testing.assert_close(update(model, optimizer, number), each, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trace_device": "tpu"}, "trace_device must be one of `gpu`, `cpu`, got `tpu`"),
        ({"trace_device": "cpu", "trace_execution_times": True}, "trace_execution_times measures on the GPU"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be at least 1, got 0"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be more than 0, got 0"),
    ],
    ids=["trace_device", "trace_execution_times", "backward_passes", "bucket_cap"],
)
def test_rejects_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wrap(**options)


def test_torchs_default_for_the_size_of_buckets_is_ours() -> None:
    model: Any = wrap(bucket_cap_mb=None)
    assert model._reduction.bucket_cap_bytes == 25 * 2**20


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: smp.DistributedModel(wrap()), UsageError, "DistributedModel already"),
        (lambda: [wrap(), smp.DistributedModel(Net())], UsageError, r"call smp\.shutdown\(\) before another"),
        (lambda: smp.DistributedModel(Net()), UsageError, r"smp\.init\(\)"),
        (lambda: wrap(lambda x: x), UsageError, "got function"),  # type: ignore[arg-type]
        (lambda: wrap().register_comm_hook(None, print), UnsupportedError, "would replace the all-reduce of gradients"),
        (lambda: wrap().join(), UnsupportedError, r"model\.join\(\) lets replicas take different numbers of steps"),
    ],
    ids=["wrapped", "a second model", "before init", "no module", "communication hook", "join"],
)
def test_rejects_what_it_does_not_do(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_at_tensor_degree_1_nothing_is_distributed() -> None:
    model = wrap()
    parameter = next(model.parameters())
    assert not list(model.distributed_modules())
    assert not list(model.scaled_batch_reducer_named_parameters())
    assert not model.is_distributed_parameter(parameter)
    assert not model.is_scaled_batch_parameter(parameter)
    assert len(list(model.default_reducer_named_parameters())) == 4
