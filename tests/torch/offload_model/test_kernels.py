"""The optimizers' arithmetic: both kernels against torch's optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit.torch.offload_model import compiled, kernels
from smpkit.torch.offload_model.kernels import Adam, FlatRange, Kernel, Rule, Sgd

LENGTH = 140_001  # a tile of the fallback and a rest, no multiple of a vector
KERNELS = [kernels.one_pass, kernels.tiled]
ADAM: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": False}


def adam(decoupled: bool, step: int, factor: float = 1.0) -> Adam:
    return Adam(**ADAM, decoupled=decoupled, step=step, factor=factor)


def run(
    kernel: Kernel, rules: list[Rule], gradients: list[Tensor], num_state: int, weight: torch.dtype | None
) -> FlatRange:
    torch.manual_seed(0)
    state = tuple(torch.zeros(LENGTH) for _ in range(num_state))
    copy = None if weight is None else torch.zeros(LENGTH, dtype=weight)
    span = FlatRange(gradients[0], torch.randn(LENGTH), state, copy)
    for rule, gradient in zip(rules, gradients, strict=True):
        kernel(rule, FlatRange(gradient, span.master, state, copy))
    return span


def torch_run(rule: type[torch.optim.Optimizer], gradients: list[Tensor], **options: Any) -> Tensor:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(LENGTH))
    optimizer = rule([parameter], **options)
    for gradient in gradients:
        parameter.grad = gradient.float()
        optimizer.step()
    return parameter.detach()


def some_gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(LENGTH).to(dtype) for _ in range(3)]


def test_the_fallback_leaves_nothing_to_torchs_threads() -> None:
    """Updates run in threads of their own; each of those would start as many again."""
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 4):
            torch.set_num_threads(count)
            results.append(run(kernels.tiled, [adam(True, 1)], some_gradients()[:1], 2, torch.bfloat16))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0].master, results[1].master)


def test_a_working_copy_may_lie_anywhere() -> None:
    """Past the caches only whole lanes are written; a start between them is written as ever."""
    gradient = some_gradients(torch.bfloat16)[0]
    expected = run(kernels.one_pass, [adam(True, 1)], [gradient], 2, torch.bfloat16)
    assert expected.weight is not None
    for offset in (1, 5, 16):
        torch.manual_seed(0)
        weight = torch.full((LENGTH + offset + 1,), 7.0, dtype=torch.bfloat16)
        state = (torch.zeros(LENGTH), torch.zeros(LENGTH))
        kernels.one_pass(adam(True, 1), FlatRange(gradient, torch.randn(LENGTH), state, weight[offset:-1]))
        assert torch.equal(weight[offset:-1], expected.weight)
        assert weight[offset - 1] == weight[-1] == 7.0


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("decoupled", [False, True], ids=["adam", "adamw"])
def test_adam_is_torchs(kernel: Kernel, decoupled: bool) -> None:
    gradients = some_gradients()
    found = run(kernel, [adam(decoupled, step) for step in (1, 2, 3)], gradients, 2, None)
    rule = torch.optim.AdamW if decoupled else torch.optim.Adam
    expected = torch_run(rule, gradients, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    torch.testing.assert_close(found.master, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda each: each.__name__)
@pytest.mark.parametrize(
    "options",
    [SGD, {**SGD, "momentum": 0.0, "dampening": 0.0}, {**SGD, "nesterov": True, "dampening": 0.0}],
    ids=["momentum", "plain", "nesterov"],
)
def test_sgd_is_torchs(kernel: Kernel, options: dict[str, Any]) -> None:
    gradients = some_gradients()
    rules: list[Rule] = [Sgd(**options, step=step, factor=1.0) for step in (1, 2, 3)]
    found = run(kernel, rules, gradients, 1 if options["momentum"] else 0, None)
    torch.testing.assert_close(found.master, torch_run(torch.optim.SGD, gradients, **options), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda each: each.__name__)
def test_narrow_gradients_come_in_and_narrow_weights_go_out(kernel: Kernel, dtype: torch.dtype) -> None:
    gradients = some_gradients(dtype)
    found = run(kernel, [adam(True, step) for step in (1, 2, 3)], gradients, 2, dtype)
    expected = torch_run(torch.optim.AdamW, gradients, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    torch.testing.assert_close(found.master, expected, rtol=0, atol=2e-6)
    assert found.weight is not None
    assert torch.equal(found.weight, found.master.to(dtype))  # rounded as torch rounds


def test_rounding_to_bfloat16_is_torchs_for_every_kind_of_number() -> None:
    # 3.4e38 rounds to infinity; 1.00390625 and 1.01171875 are ties, one up and one down.
    masters = torch.tensor([0.0, -0.0, float("nan"), 3.4e38, -3.4e38, 1e-45, 1.00390625, 1.01171875])
    full = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # a NaN that rounding up makes a -0
    masters = torch.cat([masters, full]).repeat(5)  # so that each of them goes in a vector and in the rest behind
    weight = torch.zeros(len(masters), dtype=torch.bfloat16)
    rule = Sgd(lr=0.0, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, step=1, factor=0.0)
    kernels.one_pass(rule, FlatRange(torch.zeros(len(masters), dtype=torch.bfloat16), masters.clone(), (), weight))
    assert torch.equal(weight.isnan(), masters.isnan())
    known = ~masters.isnan()
    assert torch.equal(weight[known].view(torch.int16), masters.bfloat16()[known].view(torch.int16))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda each: each.__name__)
def test_how_memory_is_cut_changes_no_bit(kernel: Kernel) -> None:
    gradient = some_gradients()[0]
    whole = run(kernel, [adam(True, 1)], [gradient], 2, None)
    torch.manual_seed(0)
    master, state = torch.randn(LENGTH), (torch.zeros(LENGTH), torch.zeros(LENGTH))
    span = FlatRange(gradient, master, state, None)
    for start, end in ((0, 33), (33, 40_000), (40_000, LENGTH)):
        kernel(adam(True, 1), span.part(start, end))
    assert torch.equal(master, whole.master)


def test_without_a_compiler_it_goes_tile_by_tile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    compiled._library.cache_clear()
    try:
        found, expected = (
            run(kernel, [adam(True, 1)], some_gradients(torch.bfloat16)[:1], 2, torch.bfloat16)
            for kernel in (kernels.one_pass, kernels.tiled)
        )
        assert torch.equal(found.master, expected.master)
        assert "no C++ compiler was found" in caplog.text
    finally:
        compiled._library.cache_clear()


def test_other_dtypes_go_tile_by_tile() -> None:
    assert compiled.function("adam", torch.float64, None) is None
    assert compiled.function("adam", torch.float16, None) is None
    span = FlatRange(torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), (), None)
    kernels.one_pass(Sgd(0.5, 0.0, 0.0, 0.0, nesterov=False, step=1, factor=1.0), span)
    assert span.master.tolist() == [0.5] * 3
