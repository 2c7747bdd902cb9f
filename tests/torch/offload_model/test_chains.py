"""Models that are no Sequential: named layers, Hugging Face decoders, and what crosses the link."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.errors import UnsupportedError, UsageError
from smpkit.testing.emulated_link import EmulatedLink
from smpkit.torch.offload_model.counted_link import Traffic
from tests.models import gpt2, llama

CPU = torch.device("cpu")
everywhere = pytest.mark.usefixtures("place")
both_ways = pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])


def device_links() -> tuple[EmulatedLink, EmulatedLink]:
    """Let the CPU play a device: copy to and from it."""
    return EmulatedLink(), EmulatedLink()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([nn.GRU(8, 8, batch_first=True), First(), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.embedding(tokens)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


class First(nn.Module):
    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        return values[0] + values[1].mean()


@everywhere
@pytest.mark.parametrize("num_slices", [1, 2, 5])
def test_layers_by_path(num_slices: int) -> None:
    torch.manual_seed(0)
    plain = Named()
    model = OffloadModel(
        copy.deepcopy(plain),
        CPU,
        num_slices=num_slices,
        checkpoint_activation=True,
        layers=["embedding", "blocks", "head"],
    )
    tokens = torch.randint(0, 11, (3, 5))
    assert list(model.state_dict()) == [f"_model.{name}" for name in plain.state_dict()]
    for network in (plain, model):
        network(tokens).square().sum().backward()
    # The GRU's two outputs share memory in the plain model, and their gradients are added up in another order.
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["embedding", "block"], "layers names `block`.*\n.*children are embedding, blocks, head"),
        (["embedding", "head"], r"parameters lie in none of the layers, the first is `blocks\.0"),
        ("embedding", "must be a list of module paths"),
        ([], "must be a list of module paths"),
    ],
)
def test_wrong_paths_are_named(layers: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        OffloadModel(Named(), CPU, layers=layers)


@everywhere
@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_hugging_face_decoders(make: Any, num_microbatches: int, padded: bool) -> None:
    torch.manual_seed(0)
    plain = make()
    model = OffloadModel(copy.deepcopy(plain), CPU, CPU, 3, True, num_microbatches)
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    actual = OffloadOptimizer(model, torch.optim.AdamW, lr=1e-3)
    tokens = torch.randint(0, 11, (5, 8))
    more: dict[str, Any] = {"use_cache": False, "return_dict": True, "past_key_values": None}
    more |= {"attention_mask": (torch.arange(8) < 6).long().repeat(5, 1)} if padded else {}
    for _ in range(3):
        for network, optimizer in ((plain, expected), (model, actual)):
            optimizer.zero_grad()
            network(tokens, **more).logits.square().mean().backward()
            optimizer.step()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=3e-6)
    for options in ({"use_cache": True}, {"inputs_embeds": torch.randn(5, 8, 16)}):
        with pytest.raises(UnsupportedError, match=f"`{next(iter(options))}` is not something"):
            model(tokens, **options)
    if num_microbatches == 1:
        assert torch.allclose(model(tokens, labels=tokens).loss, plain(tokens, labels=tokens).loss)
    else:
        with pytest.raises(UsageError, match="a tensor without dimensions, which cannot be joined"):
            model(tokens, labels=tokens)


@pytest.mark.parametrize("num_slices", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_traffic(num_slices: int, num_microbatches: int, dtype: torch.dtype) -> None:
    """Weights in at most (2 - 1/slices) times, gradients out once, weights never out, borders out once."""
    width, batch, steps = 64, 8, 3
    plain = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(8)])
    model = OffloadModel(
        plain,
        CPU,
        num_slices=num_slices,
        checkpoint_activation=True,
        num_microbatches=num_microbatches,
        dtype=dtype,
        links=device_links(),
    )
    optimizer = OffloadOptimizer(model)
    for _ in range(steps):
        model(torch.randn(batch, width, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
    weights = 8 * width * width * dtype.itemsize
    border = batch * width * dtype.itemsize
    traffic = model.traffic
    assert traffic.weights_in <= (2 - 1 / num_slices) * weights * steps
    sizes = [sum(p.numel() * dtype.itemsize for p in piece.parameters()) for piece in model.model_slices]
    assert traffic.weights_in == (2 * weights - sum(sizes[-2:])) * steps  # the last two are still there in backward
    assert traffic.gradients_out == weights * steps
    # Few microbatches hand borders on at once: out for backward, back in for it. Many also wait on the host between
    # slices, and so do their gradients in backward.
    away = 1 if num_microbatches <= 2 else 2
    num_borders = num_slices - (2 if num_microbatches == 1 and num_slices > 1 else 1)  # backward begins with the last
    assert traffic.boundaries_out == away * border * num_borders * steps
    assert traffic.boundaries_in == (1 if away == 1 else 3) * border * num_borders * steps
    assert model._engine.device_weights.num_bytes == max(sizes[0::2]) + max(sizes[1::2], default=0)


@both_ways
def test_where_the_device_is_the_host_nothing_is_copied(checkpoint: bool) -> None:
    plain = _layers()
    model = OffloadModel(plain, CPU, CPU, 3, checkpoint, 4)
    for _ in range(2):
        model(torch.randn(8, 4)).square().mean().backward()
    assert model.traffic == Traffic()
    assert model.device_buffer_bytes == 0
    for parameter in model.parameters():  # autograd's own, not parts of something larger
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().nbytes() == parameter.grad.nbytes


def test_memory_of_borders_that_do_not_fit_the_budget_stays_on_the_device() -> None:
    plain = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    model = OffloadModel(
        copy.deepcopy(plain),
        CPU,
        num_slices=4,
        checkpoint_activation=True,
        host_budget_bytes=4096,
        links=device_links(),
    )
    inputs = torch.randn(16, 64)  # 4 KiB: one border fits, three are needed
    for _ in range(2):
        for network in (plain, model):
            network(inputs).square().sum().backward()
    assert model.traffic.boundaries_out == 2 * 4096
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)


@everywhere
def test_an_error_in_a_layer_leaves_the_model_usable() -> None:
    class Fragile(nn.Module):
        broken = True

        def forward(self, value: Tensor) -> Tensor:
            if self.broken:
                raise ValueError("broken")
            return value

    torch.manual_seed(0)
    fragile = Fragile()
    model = OffloadModel(nn.Sequential(nn.Linear(4, 4), fragile, nn.Linear(4, 1)), CPU, checkpoint_activation=True)
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match="broken"):
        model(torch.randn(3, 4))
    Fragile.broken = False
    output = model(torch.randn(3, 4))
    Fragile.broken = True
    with pytest.raises(ValueError, match="broken"):
        output.sum().backward()
    Fragile.broken = False
    model(torch.randn(3, 4)).sum().backward()
    assert [name for name, _ in model.named_parameters()] == names
    assert all(parameter.grad is not None for parameter in model.parameters())


def _layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


@everywhere
@both_ways
@pytest.mark.parametrize("backward", [False, True])
def test_what_a_forward_kept_goes_with_its_output(checkpoint: bool, backward: bool) -> None:
    """Not when Python looks for cycles: an output such as a language model's scores is large."""
    model = OffloadModel(_layers(), CPU, checkpoint_activation=checkpoint)
    gc.collect()
    gc.disable()
    try:
        output = model(torch.randn(3, 4))
        kept = weakref.ref(output.grad_fn.run)
        if backward:
            output.sum().backward()
        del output
        assert kept() is None
    finally:
        gc.enable()


@everywhere
def test_a_deleted_model_leaves_no_memory_and_no_threads() -> None:
    def threads() -> int:
        return sum(thread.name.startswith("smpkit") for thread in threading.enumerate())

    def train() -> list[weakref.ref[Any]]:
        model = OffloadModel(_layers(), CPU, checkpoint_activation=True, dtype=torch.bfloat16)
        optimizer = OffloadOptimizer(model, max_grad_norm=1.0, num_threads=2)
        for _ in range(2):
            model(torch.randn(3, 4, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
        model.synchronize()
        assert threads() > before
        return [weakref.ref(each) for each in (model, optimizer, model._engine, optimizer._states[0].entries[0].master)]

    gc.collect()
    before = threads()
    kept = train()
    gc.collect()
    assert [each() for each in kept] == [None] * 4
    deadline = time.monotonic() + 60  # the threads end when they next look
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() <= before
