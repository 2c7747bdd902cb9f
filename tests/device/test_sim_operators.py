"""Operators on the simulated device give what the CPU's give, whatever the order in which streams run."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from smpkit.testing import simulated_device
from tests.device.on_sim import naming, on_sim


class Attention(nn.Module):
    """A layer of a transformer, and attention by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layer(self.embedding(tokens))
        x = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return functional.cross_entropy((x @ self.embedding.weight.T).view(-1, 50), tokens.view(-1))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


MODELS: list[tuple[Callable[[], nn.Module], Tensor]] = [
    (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), normal(5, 8)),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)), normal(2, 3, 8, 8)),
    (Attention, torch.arange(20).view(2, 10)),
]
OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda weights: torch.optim.AdamW(weights, lr=0.1, foreach=False),
    lambda weights: torch.optim.AdamW(weights, lr=0.1, foreach=True),
    lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
    lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
]


def trained(device: str, build: Callable[[], nn.Module], inputs: Tensor, make: Any, steps: int) -> list[Tensor]:
    """Return weights after some steps, and the last gradients."""
    torch.manual_seed(0)
    model, x = build().to(device), inputs.to(device)
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [*model.parameters(), *[each.grad for each in model.parameters() if each.grad is not None]]


def models(device: str) -> list[Tensor]:
    found = [trained(device, build, inputs, OPTIMIZERS[-1], 1) for build, inputs in MODELS]
    return list(itertools.chain.from_iterable(found))


def optimizers(device: str) -> list[Tensor]:
    found = [trained(device, lambda: nn.Linear(8, 8), torch.ones(2, 8), make, 3) for make in OPTIMIZERS]
    return list(itertools.chain.from_iterable(found))


def batch_norm(device: str) -> list[Tensor]:
    torch.manual_seed(0)
    norm, x, found = nn.BatchNorm1d(4), torch.randn(8, 4), []
    for training in (True, False):
        found.append(copy.deepcopy(norm).train(training).to(device)(x.to(device)))
        found[-1].sum().backward()  # no gradient of `x` is asked for
    return found


def views(device: str) -> list[Tensor]:
    a = torch.arange(24.0, device=device).view(2, 3, 4)
    a[:, 1, ::2] += 100
    a.transpose(0, 2)[1] *= 2
    found = [a.unfold(2, 2, 1).contiguous(), a[a > 50]]
    a[a > 50] = 0
    found += [a, torch.cat([a, a]).view(-1)[torch.tensor([3, 5])], torch.view_as_complex(a.view(-1, 2))]
    out = torch.empty(0, device=device)
    torch.add(found[0], found[0], out=out)
    return [*found, out, torch.tensor([1, 2], device=device)]


def asked_before(device: str) -> list[Tensor]:
    """Shapes and dtypes that were asked once depend on all arguments, and on the default dtype.

    Of many operators torch itself makes the outputs first. These are some that must be asked.
    """
    whole, found = torch.arange(1, 5, device=device).view(2, 2), list[Tensor]()
    default = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            found += [whole.angle(), whole / 2, whole * 2.5, whole * 2]
    finally:
        torch.set_default_dtype(default)
    found += [whole[:1].angle(), whole.trace()]
    a = torch.arange(6.0, device=device).view(2, 3)
    for _ in range(2):
        found += [functional.layer_norm(a.to(dtype), (3,)) for dtype in (torch.float32, torch.float64)]
        found += [functional.adaptive_avg_pool2d(a.view(1, 2, 3), size) for size in (2, 3)]
        for dim in (0, 1):
            out = torch.empty(0, device=device)
            torch.sum(a, dim, out=out)
            found += [a.sum(dim), out]
        found += [a @ a.T, a.T @ a, a[a > 2]]
        with pytest.raises(RuntimeError, match=r"tensor size|size mismatch|cannot be multiplied"):
            a @ a
    return found


SAME: list[Callable[[str], list[Tensor]]] = [models, optimizers, batch_norm, views, asked_before]
"""What gives on either device the same numbers, shapes and dtypes."""


def compare(function: Callable[[str], list[Tensor]]) -> None:
    found = function("sim")
    assert {each.device.type for each in found} == {"sim"}
    torch.testing.assert_close([each.detach().cpu() for each in found], [each.detach() for each in function("cpu")])


def random_numbers() -> None:
    torch.manual_seed(3)
    first = torch.randn(4, device="sim")
    state = torch.get_device_module("sim").get_rng_state()
    second = torch.rand(4, device="sim")
    torch.get_device_module("sim").set_rng_state(state)
    assert torch.equal(second.cpu(), torch.rand(4, device="sim").cpu())
    torch.manual_seed(3)
    assert torch.equal(first.cpu(), torch.randn(4, device="sim").cpu())
    x = torch.ones(1000, device="sim")
    masks = []
    for _ in range(2):
        torch.manual_seed(3)
        masks.append(functional.dropout(x).cpu())
    assert torch.equal(*masks)
    assert 300 < int((masks[0] == 0).sum()) < 700
    generator = torch.Generator("sim").manual_seed(5)
    torch.randn(3, device="sim", generator=generator)
    torch.randperm(5, device="sim")


def autocast() -> None:
    model = nn.Linear(8, 8).to("sim")
    with torch.autocast("sim", torch.bfloat16):
        y = model(torch.ones(2, 8, device="sim"))
        assert (y.dtype, y.softmax(-1).dtype) == (torch.bfloat16, torch.float32)
    y.sum().backward()


def foreach() -> None:
    many = [torch.full((3,), float(i), device="sim") for i in range(3)]
    torch._foreach_add_(many, 1.0)
    hosts = [torch.empty(3, device="cpu").pin_memory() for _ in many]
    torch._foreach_copy_(hosts, many, non_blocking=True)
    torch.accelerator.synchronize()
    assert [int(each[0]) for each in hosts] == [1, 2, 3]


def storages() -> None:
    a = torch.arange(24.0, device="sim")
    storage = a.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    assert "sim" in str(a)


def moving() -> None:
    model = nn.Linear(4, 4)
    weight = model.weight
    model.to("sim")
    assert weight is model.weight
    assert weight.device.type == "sim"
    weight.data = torch.zeros(4, 4, device="cpu")
    assert weight.device.type == "cpu"


def saving() -> None:
    file = io.BytesIO()
    torch.save({"a": torch.ones(3, device="sim")}, file)
    for to, kind in ((None, "sim"), ("cpu", "cpu")):
        file.seek(0)
        found = torch.load(file, map_location=to)["a"]
        assert found.device.type == kind
        assert torch.equal(copy.deepcopy(found).cpu(), torch.ones(3))


def errors() -> None:
    torch.ones(3, device="sim")[torch.tensor([7], device="sim")]
    with pytest.raises(
        RuntimeError, match=r"out of bounds.*\(aten::index, queued at .*test_sim_operators.py:\d+:errors .*\)"
    ):
        torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match=r"tensor size|size mismatch"):
        torch.ones(3, device="sim") @ torch.ones(4, device="sim")
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        torch.ones(3, device="sim") + torch.ones(3, device="cpu")
    with pytest.raises(RuntimeError, match="there is no sim:5, only 1"):
        torch.ones(3, device="sim:5")
    table = nn.Embedding(8, 4, sparse=True).to("sim")
    with pytest.raises(NotImplementedError, match=r"sim: sparse tensors are not simulated \(aten::"):
        table(torch.tensor([1, 2], device="sim")).sum().backward()
    simulated_device.configure(memory=1 << 20)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2097152 bytes"):
        torch.empty(2 << 20, dtype=torch.uint8, device="sim")
    simulated_device.configure()


CHECKS = [random_numbers, autocast, foreach, storages, moving, saving, errors]


@on_sim()
def test_operators_give_what_those_of_the_cpu_give() -> None:
    for policy in simulated_device.POLICIES:
        for function in SAME:
            with naming(f"{function.__name__} under {policy}"), simulated_device.no_races(policy, 1):
                compare(function)
        for check in CHECKS:
            with naming(f"{check.__name__} under {policy}"), simulated_device.no_races(policy, 1):
                check()
