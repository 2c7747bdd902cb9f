"""`sharded_data_parallel_degree` changes where parameters are, and nothing else."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.data_parallel import fsdp as sharded_data_parallel
from smpkit.torch.placement.blocks import repeated_blocks
from tests.ranks import run_ranks

STEPS, BATCH, WIDTH, TOKENS = 5, 16, 6, 11
TOLERANCE = 1e-11  # float64; gradients are added up in another order, and AdamW magnifies that


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.grow = nn.Linear(WIDTH, 3 * WIDTH)
        self.shrink = nn.Linear(3 * WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.frozen * self.shrink(torch.tanh(self.grow(self.norm(x))))


class Model(nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.linear(self.blocks(self.scale * self.embedding(tokens)), self.embedding.weight)


def build(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(7)
    return Model().to(dtype)


def batch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    tokens = torch.randint(TOKENS, (BATCH, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def optimizer_of(kind: str, parameters: Any) -> torch.optim.Optimizer:
    """Make an optimizer; the latter two look at norms of whole tensors, of which ranks hold parts, or nothing."""
    if kind == "LAMB":
        return smp.optimizers.FusedLAMB(parameters, lr=0.05, max_grad_norm=0.1)
    if kind == "NovoGrad":
        return smp.optimizers.FusedNovoGrad(parameters, lr=0.01, norm_type=0, weight_decay=0.1)
    if kind == "Adagrad":  # has states from the beginning
        return torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1)
    return torch.optim.AdamW(parameters, lr=0.05)


def train_plainly(
    accumulation: int, clip: float, model: nn.Module | None = None, kind: str = "AdamW"
) -> dict[str, Tensor]:
    model = model or build()
    optimizer = optimizer_of(kind, model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for turn in range(accumulation):
            (loss_of(model, *batch(step * accumulation + turn)) / accumulation).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


@smp.step
def train_step(model: Any, tokens: Tensor, targets: Tensor, divisor: int) -> Tensor:
    loss = loss_of(model, tokens, targets)
    model.backward(loss / divisor)
    return loss


def start(degree: int, **config: Any) -> None:
    smp.init({"ddp": True, "sharded_data_parallel_degree": degree, **config})


def run_steps(model: Any, optimizer: Any, steps: range, accumulation: int = 1, *, plain: bool = False) -> None:
    for step in steps:
        optimizer.zero_grad()
        for turn in range(accumulation):
            tokens, targets = batch(step * accumulation + turn)
            mine = slice(smp.dp_rank(), None, smp.dp_size())
            if plain:
                (loss_of(model, tokens[mine], targets[mine]) / accumulation).backward()
            else:
                train_step(model, tokens[mine], targets[mine], accumulation)
        optimizer.step()


def train(
    degree: int,
    accumulation: int,
    *,
    plain: bool = False,
    first: bool = False,
    checkpointed: bool = False,
    kind: str = "AdamW",
    **config: Any,
) -> dict[str, Tensor]:
    start(degree, **config)
    module = build()
    if smp.rank() > 0:
        for parameter in module.parameters():
            parameter.data.add_(1.0)  # replicas start different, so a missing broadcast shows
    made_first = optimizer_of(kind, module.parameters()) if first else None
    model = smp.DistributedModel(module, backward_passes_per_step=accumulation)
    if checkpointed:
        smp.set_activation_checkpointing(module.blocks, strategy="each")
    optimizer = smp.DistributedOptimizer(made_first or optimizer_of(kind, model.parameters()))
    run_steps(model, optimizer, range(STEPS), accumulation, plain=plain)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    smp.shutdown()
    return weights


CASES: list[tuple[int, int, dict[str, Any]]] = [
    (2, 1, {"microbatches": 2, "sdp_param_persistence_threshold": 0}),
    (4, 2, {"microbatches": 1}),
    (2, 2, {"microbatches": 2, "sdp_gradient_clipping": 0.05, "first": True}),
    (2, 2, {"plain": True, "sdp_gradient_clipping": 0.0}),
    (2, 1, {"microbatches": 2, "checkpointed": True, "sdp_param_persistence_threshold": 0}),
    (2, 1, {"kind": "LAMB"}),
    (4, 1, {"kind": "NovoGrad"}),
    (2, 1, {"kind": "Adagrad", "first": True}),
    (4, 1, {"microbatches": 2, "checkpointed": True, "offload_activations": True, "activation_loading_horizon": 1}),
]


def train_cases() -> list[dict[str, Tensor]]:
    return [train(degree, accumulation, **options) for degree, accumulation, options in CASES]


def assert_close(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def test_weights_equal_plain_pytorch() -> None:
    ranks = run_ranks(train_cases, 4, timeout=120)
    for index, (_, accumulation, options) in enumerate(CASES):
        plain = train_plainly(
            accumulation, options.get("sdp_gradient_clipping", 1.0), kind=options.get("kind", "AdamW")
        )
        for results in ranks:
            assert_close(results[index], plain)


def measure() -> dict[str, Any]:
    """What one rank holds, and the norms it sees."""
    start(2, microbatches=2, sdp_gradient_clipping=0.0)
    module = build()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    run_steps(model, optimizer, range(1))
    local = [p.to_local() for p in model.parameters()]  # type: ignore[attr-defined]
    gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
    states = [v.to_local() for entry in optimizer.state.values() for v in entry.values() if v.ndim]
    norms = [smp.clip_grad_norm_(model, 1e9, kind).item() for kind in (2.0, float("inf"))]
    smp.clip_grad_norm_(model.parameters(), 0.01)
    norms.append(smp.clip_grad_norm_(model, 1e9).item())
    with pytest.raises(UnsupportedError, match="join"):
        model.join()
    with pytest.raises(UnsupportedError, match="communication hook"):
        model.register_comm_hook(None, lambda _, bucket: bucket)
    return {
        "parameters": sum(each.numel() for each in local),
        "gradients": sum(each.numel() for each in gradients),
        "states": sum(each.numel() for each in states),
        "norms": norms,
        "saved": {name: tuple(each.shape) for name, each in model.local_state_dict().items() if torch.is_tensor(each)},
        "gathered": len(model.state_dict(gather_to_rank0=True)),
    }


def test_each_rank_of_a_sharding_group_holds_its_part_and_sees_the_norm_of_all() -> None:
    plain = build()
    loss_of(plain, *batch(0)).backward()
    size = sum(each.numel() for each in plain.parameters())
    live = sum(each.numel() for each in plain.parameters() if each.requires_grad)
    wanted = [torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9, kind).item() for kind in (2.0, float("inf"))]
    found = run_ranks(measure, 4)
    for each in found:
        assert 0.45 * size <= each["parameters"] <= 0.55 * size
        assert 0.45 * live <= each["gradients"] <= 0.55 * live
        assert each["states"] == 2 * each["gradients"]
        assert each["norms"] == found[0]["norms"]
        assert each["norms"][:2] == pytest.approx(wanted, rel=1e-13)
        assert each["norms"][2] == pytest.approx(0.01, rel=1e-3)
        assert each["saved"]["blocks.0.grow.weight"] == (9, 6)
    assert found[0]["parameters"] + found[1]["parameters"] == size
    assert [each["gathered"] for each in found] == [len(plain.state_dict()), 0, 0, 0]


SCALE, CLIP = 2.0**10, 0.5


def resume_in_half(precision: str, folder: Path, whole: bool) -> tuple[Any, Any]:
    start(2, **{precision: True})
    model = smp.DistributedModel(build(torch.float32))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.07), dynamic_loss_scale=True)
    smp.resume_from_checkpoint(folder, load_sharded_optimizer_state=whole)
    return model, optimizer


def train_in_half(precision: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    start(2, **{precision: True}, sdp_gradient_clipping=CLIP)
    model = smp.DistributedModel(build(torch.float32))
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.05), dynamic_loss_scale=True, init_scale=SCALE
    )
    run_steps(model, optimizer, range(3))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.module.get_parameter("embedding.weight").grad.mul_(float("inf") if smp.rank() == 3 else 1)  # type: ignore[union-attr]
    optimizer.step()
    kept = {name: torch.equal(value, weights[name]) for name, value in model.state_dict().items()}
    after = {"overflow": optimizer.overflow, "scale": optimizer.loss_scale, "kept": all(kept.values())}
    smp.save_checkpoint(folder, tag=precision)
    for whole in (False, True):
        smp.shutdown()
        model, again = resume_in_half(precision, folder, whole)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in weights.items()) or not after["kept"]
        assert again.loss_scale == optimizer.loss_scale
        assert bool(again.state) == whole
        assert again.param_groups[0]["lr"] == (0.05 if whole else 0.07)
    smp.shutdown()
    return weights, after


def train_all_in_half(folder: Path) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    return [train_in_half(precision, folder) for precision in ("bf16", "fp16")]


def train_plainly_in_half(dtype: torch.dtype, scale: float) -> dict[str, Tensor]:
    """Four replicas in turn, each with a copy in half precision of the weights in float32."""
    model = build(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        tokens, targets = batch(step)
        for replica in range(4):
            half, mine = copy.deepcopy(model).to(dtype), slice(replica, None, 4)
            half.zero_grad()
            loss = functional.cross_entropy(half(tokens[mine]).float().flatten(0, 1), targets[mine].flatten())
            (loss * scale).backward()
            for weight, copied in zip(model.parameters(), half.parameters(), strict=True):
                if copied.grad is not None:
                    part = copied.grad.float() / (4 * scale)
                    weight.grad = part if weight.grad is None else weight.grad + part
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return model.state_dict()


def wrap_in_half() -> set[torch.dtype]:
    start(2, bf16=True)
    model = smp.DistributedModel(build(torch.bfloat16))
    found = {each.dtype for each in model.parameters() if each.is_floating_point()}
    smp.shutdown()
    return found


def test_a_model_that_is_made_in_half_precision_has_weights_in_float32() -> None:
    assert run_ranks(wrap_in_half, 4) == [{torch.float32}] * 4


def test_half_precision_computes_with_copies_of_weights_in_float32(tmp_path: Path) -> None:
    ranks = run_ranks(train_all_in_half, 4, tmp_path)
    for index, (dtype, scale) in enumerate([(torch.bfloat16, 1.0), (torch.float16, SCALE)]):
        plain = train_plainly_in_half(dtype, scale)
        for results in ranks:
            weights, after = results[index]
            for name, value in plain.items():
                if name != "scale":
                    assert weights[name].dtype is torch.float32
                    # Float32 sums in another order; where AdamW divides two tiny numbers that shows.
                    torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=name)
            if dtype is torch.float16:
                assert after == {"overflow": True, "scale": SCALE / 2, "kept": True}


class PartlyFloat32(nn.Module):
    """Blocks with parts that half precision leaves in float32: batch normalisation, and what the model names."""

    _keep_in_fp32_modules_strict = ("gate",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict(self.block()) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)

    @staticmethod
    def block() -> dict[str, nn.Module]:
        return {"grow": nn.Linear(WIDTH, WIDTH), "norm": nn.BatchNorm1d(WIDTH), "gate": nn.Linear(WIDTH, WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            grown = block["norm"](block["grow"](x))
            x = x + grown * block["gate"](x.float()).sigmoid().to(x.dtype)
        return self.norm(x)


def partly_float32() -> PartlyFloat32:
    torch.manual_seed(7)
    return PartlyFloat32()


def vectors(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


@smp.step
def square_step(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x).pow(2).mean()
    model.backward(loss)
    return loss


def train_partly_in_float32(precision: str) -> tuple[list[float], dict[str, Tensor]]:
    start(2, **{precision: True}, sdp_gradient_clipping=0.0, sdp_param_persistence_threshold=0)
    model = smp.DistributedModel(partly_float32())
    smp.set_activation_checkpointing(model.get_module().get_submodule("blocks.0.grow"))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05), static_loss_scale=SCALE)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(square_step(model, vectors(step)).reduce_mean().item())
        optimizer.step()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    smp.shutdown()
    return losses, weights


def train_all_partly_in_float32() -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train_partly_in_float32(precision) for precision in ("bf16", "fp16")]


def half_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    half = copy.deepcopy(model)
    for name, module in half.named_modules():
        if name.endswith("grow"):
            module.to(dtype)
    return half


def test_what_stays_in_float32_is_gathered_by_itself() -> None:
    ranks = run_ranks(train_all_partly_in_float32, 2)
    for index, dtype in enumerate([torch.bfloat16, torch.float16]):
        model: nn.Module = partly_float32()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        losses = []
        scale = SCALE if dtype is torch.float16 else 1.0
        for step in range(3):
            half = half_copy(model, dtype)
            loss = (half(vectors(step).to(dtype)).float() - vectors(step)).pow(2).mean()
            (loss * scale).backward()
            for weight, copied in zip(model.parameters(), half.parameters(), strict=True):
                assert copied.grad is not None
                weight.grad = copied.grad.float() / scale
            for buffer, counted in zip(model.buffers(), half.buffers(), strict=True):
                buffer.copy_(counted)
            optimizer.step()
            losses.append(loss.item())
        for result in ranks:  # both replicas have the same batch, so that their mean is exact
            assert result[index][0] == losses
            for name, value in model.state_dict().items():
                torch.testing.assert_close(result[index][1][name], value, rtol=0, atol=0, msg=name)


def save_and_load() -> list[dict[str, Tensor]]:
    start(2)
    model = smp.DistributedModel(build())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    run_steps(model, optimizer, range(2))
    parts = copy.deepcopy((model.local_state_dict(), optimizer.local_state_dict()))
    wholes = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run_steps(model, optimizer, range(2, 4))
    results = [{name: value.clone() for name, value in model.state_dict().items()}]
    smp.shutdown()
    for degree, (weights, states) in [(2, parts), (4, wholes)]:
        start(degree)
        model = smp.DistributedModel(build())
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        run_steps(model, optimizer, range(2, 4))
        results.append({name: value.clone() for name, value in model.state_dict().items()})
        smp.shutdown()
    return results


def test_parts_load_on_the_same_degree_and_wholes_on_any() -> None:
    for first, *others in run_ranks(save_and_load, 4):
        for other in others:
            assert_close(other, first)


def train_delayed() -> tuple[dict[str, Tensor], int]:
    """Make the model without memory, and note the most elements that were whole at a time."""
    start(4)
    largest = 0
    torch.manual_seed(3)
    with smp.delay_param_initialization():
        module = Model()
    original = sharded_data_parallel._materialize

    def watched(root: nn.Module, parts: Any) -> None:
        nonlocal largest
        original(root, parts)
        plain = [each for each in root.parameters() if not isinstance(each, DTensor)]
        largest = max(largest, sum(p.numel() for p in plain if p.untyped_storage().size() > p.element_size()))

    with mock.patch.object(sharded_data_parallel, "_materialize", watched):
        model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    begun = {name: value.clone() for name, value in model.state_dict().items()}
    run_steps(model, optimizer, range(1))
    smp.shutdown()
    return begun, largest


def test_a_model_without_memory_is_created_in_parts() -> None:
    block = sum(p.numel() for p in Block().parameters())
    first, *others = run_ranks(train_delayed, 4)
    assert block <= first[1] < 2 * block
    assert all(bool(value.isfinite().all()) for value in first[0].values())
    for begun, _ in others:
        assert all(torch.equal(begun[name], value) for name, value in first[0].items())


class _Trouble(ValueError):
    """What a test raises."""


class Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise _Trouble


class Failing(Model):
    """Raises where `fails_at` says; what follows the middle block lies gathered then, or its gradients on their way."""

    fails_at = ""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(lambda _, __, x: self.trouble("forward", x))
        self.blocks[2].register_forward_hook(lambda _, __, x: self.trouble("last forward", x))

    def trouble(self, where: str, x: Tensor) -> Tensor:
        if self.fails_at == where:
            raise _Trouble
        return Raises.apply(x) if self.fails_at == f"{where}'s backward" else x


PLACES = ["before", "forward", "after", "forward's backward", "last microbatch"]


@smp.step
def failing_step(model: Any, tokens: Tensor, targets: Tensor, where: str) -> Tensor:
    if where == "before":
        raise _Trouble
    loss = loss_of(model, tokens, targets)
    if where == "after":
        raise _Trouble
    model.backward(loss)
    if where == "last microbatch":
        model.module.fails_at = "forward's backward"
    return loss


def build_failing() -> Failing:
    torch.manual_seed(7)
    return Failing().double()


def fail_everywhere(degree: int, threshold: int) -> dict[str, Tensor]:
    """Train, but for a pass of every kind that fails before each step."""
    start(degree, microbatches=2, sdp_param_persistence_threshold=threshold)
    module = build_failing()
    model: Any = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    mine = slice(smp.dp_rank(), None, smp.dp_size())
    tokens, targets = (each[mine] for each in batch(0))
    for step in range(STEPS):
        module.fails_at = PLACES[step]
        with pytest.raises(_Trouble):
            failing_step(model, tokens, targets, PLACES[step])
        assert all(isinstance(each, DTensor) for each in model.parameters())
        module.fails_at = "forward"
        with pytest.raises(_Trouble), torch.no_grad():
            loss_of(model, tokens, targets)
        module.fails_at = "forward's backward"
        loss = loss_of(model, tokens, targets)
        with pytest.raises(_Trouble):
            model.backward(loss)
        module.fails_at = ""
        run_steps(model, optimizer, range(step, step + 1))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    smp.shutdown()
    return weights


def fail_in_many_ways() -> tuple[list[dict[str, Tensor]], str]:
    """Fail and go on; then fail in an accumulation, and then at different places."""
    found = [fail_everywhere(2, 0), fail_everywhere(4, 10**6)]
    start(2, sdp_param_persistence_threshold=0)
    module = build_failing()
    model: Any = smp.DistributedModel(module, backward_passes_per_step=2)
    tokens, targets = batch(0)
    train_step(model, tokens, targets, 1)
    module.fails_at = "forward"
    said = "the gradients of the 1 before it .* accumulation begins anew"
    warned = contextlib.nullcontext() if smp.rank() else pytest.warns(UserWarning, match=said)
    with pytest.raises(_Trouble), warned:
        train_step(model, tokens, targets, 1)
    assert model.data_parallel._passes == 0
    module.fails_at = "last forward" if smp.rank() % 2 else ""
    with pytest.raises(_Trouble):
        failing_step(model, tokens, targets, "after")
    with pytest.raises(UsageError, match="a step failed") as caught:
        train_step(model, tokens, targets, 1)
    return found, str(caught.value)


def test_after_a_failed_pass_training_goes_on_as_if_it_had_not_been() -> None:
    for found, message in run_ranks(fail_in_many_ways, 4, timeout=120):
        for weights in found:
            assert_close(weights, train_plainly(1, 1.0, build_failing()))
        assert "at one place on rank 0 and at another on rank 1" in message


def test_blocks_are_what_a_list_repeats_without_those_that_share_parameters() -> None:
    model = build()
    assert repeated_blocks(model) == list(model.blocks)
    shared = model.blocks[1]
    assert isinstance(shared, Block)
    model.register_parameter("outside", shared.norm.weight)
    assert repeated_blocks(model) == [model.blocks[0], model.blocks[2]]
    assert repeated_blocks(nn.Linear(2, 2)) == []


def shard_attributes() -> list[Any]:
    """Return what a script finds on the parameters and the optimizer, before and after a step that it clips."""
    options = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.25}
    smp.init(options)
    model = smp.DistributedModel(build())
    optimizer: Any = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    wholes = {name: value.clone() for name, value in build().named_parameters()}
    names = [name for name, _ in model.module.named_parameters()]
    parameters: list[Any] = list(model.module.parameters())
    assert [each.ds_id for each in parameters] == list(range(len(parameters)))
    assert [each.ds_shape for each in parameters] == [wholes[name].shape for name in names]
    assert [each.ds_numel for each in parameters] == [wholes[name].numel() for name in names]
    # As scripts describe their shards for the tools that merge them.
    of_parameter = {parameter: name for name, parameter in model.module.named_parameters()}
    (group,) = optimizer.fp16_groups
    assert {of_parameter[each]: each.ds_shape for each in group} == {name: wholes[name].shape for name in names}
    assert optimizer._global_grad_norm is None
    tokens, targets = batch(0)
    loss_of(model, tokens, targets).backward()
    optimizer.step()
    (flat,) = optimizer.fp32_partitioned_groups_flat
    held = [each.ds_tensor for each in parameters]
    assert flat.dtype is torch.float32
    assert flat.numel() == sum(each.ds_numel for each in held)
    assert optimizer.ds_param_shard_group.size() == 2
    norm = torch.stack([torch.norm(each.float()) for each in held]).norm()
    torch.testing.assert_close(norm, flat.norm())
    return [sum(each.ds_numel for each in held), optimizer._global_grad_norm, flat]


def test_scripts_can_read_their_shards() -> None:
    first, second = run_ranks(shard_attributes, 2)
    model = build()
    assert first[0] + second[0] == sum(each.numel() for each in model.parameters())
    tokens, targets = batch(0)
    loss_of(model, tokens, targets).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert first[1] == second[1] == pytest.approx(norm.item())
    whole = torch.cat([each.detach().flatten() for each in model.parameters()]).float().sort().values
    torch.testing.assert_close(torch.cat([first[2], second[2]]).sort().values, whole)


class UsesOutside(Model):
    """The model itself uses a parameter of a block, after the blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks(self.scale * self.embedding(tokens)) * self.bias
        return functional.linear(hidden, self.embedding.weight)

    @property
    def bias(self) -> nn.Parameter:
        return self.blocks.get_parameter("1.shrink.bias")


def build_that_uses_outside() -> UsesOutside:
    torch.manual_seed(7)
    return UsesOutside().double()


def train_registered() -> tuple[dict[str, Tensor], str]:
    start(2, microbatches=2, sdp_param_persistence_threshold=0)
    module = build_that_uses_outside()
    smp.register_parameter(module, module.bias)
    model = smp.DistributedModel(module)
    run_steps(model, smp.DistributedOptimizer(optimizer_of("AdamW", model.parameters())), range(STEPS))
    with pytest.raises(UsageError, match="is divided already") as error:
        smp.register_parameter(module, module.bias)
    return {name: value.clone() for name, value in model.state_dict().items()}, str(error.value)


def test_a_registered_parameter_may_be_used_outside_of_its_module() -> None:
    plain = train_plainly(1, 1.0, build_that_uses_outside())
    for weights, _ in run_ranks(train_registered, 2):
        assert_close(weights, plain)


def train_unregistered() -> str:
    start(2, sdp_param_persistence_threshold=0)
    model = smp.DistributedModel(build_that_uses_outside())
    with pytest.raises(RuntimeError, match="DTensor") as error:
        model(batch(0)[0])
    return str(error.value)


def test_without_that_its_users_find_a_part() -> None:
    run_ranks(train_unregistered, 2)


def test_what_is_no_module_or_parameter_cannot_be_registered() -> None:
    wrong: Any = torch.zeros(1)
    with pytest.raises(UsageError, match="register_parameter got `Linear` and `Tensor`"):
        smp.register_parameter(nn.Linear(1, 1), wrong)
