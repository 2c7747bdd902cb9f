"""`smpkit.fit` changes memory and time, and no bit of losses and weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import smpkit
from smpkit.errors import UsageError
from smpkit.plan.tune.chain import Choice
from smpkit.testing import EmulatedLink
from smpkit.torch.memory import Fitted, lightning_callback, trainer_callback
from tests.ranks import run_ranks

STEPS = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.dropout(self.shrink(nn.functional.gelu(self.grow(self.norm(x)))))
        return result


class Transformer(nn.Module):
    """Alike layers, one after the other."""

    def __init__(self, width: int = 32, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(count))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


class SharedLayer(nn.Module):
    """One layer that is called several times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(32)])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.layers[0](x)
        return x


class Pictures(nn.Module):
    """Layers that differ, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [2, 8, 16, 8]
        self.layers = nn.Sequential(*(self.layer(*pair) for pair in itertools.pairwise(sizes)))

    @staticmethod
    def layer(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x.view(x.shape[0], 2, 16, -1))
        return result


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    fitted: Fitted | None = None


def train(
    model: nn.Module,
    fit: Callable[[nn.Module], Fitted] | None = None,
    *,
    batches: tuple[int, ...] = (4,) * STEPS,
    microbatches: int = 1,
    autocast: bool = False,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Trained:
    """Train a copy of a model, and return what came out."""
    model = copy.deepcopy(model)
    found = Trained(fitted=fit(model) if fit is not None else None)
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3)
    torch.manual_seed(1)
    for size in batches:
        for _ in range(microbatches):
            x = torch.randn(size, 16, 32)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = wrapped(x).square().mean()
            loss.backward()
            found.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    everything = [*wrapped.parameters(), *wrapped.buffers()]
    found.weights = [each.full_tensor() if isinstance(each, DTensor) else each.detach() for each in everything]
    return found


def assert_same(found: Trained, expected: Trained) -> None:
    assert found.losses == expected.losses
    for one, other in zip(found.weights, expected.weights, strict=True):
        assert torch.equal(one, other)


def link() -> EmulatedLink:
    """Return a link that is never the slower part, however loaded the machine is."""
    return EmulatedLink(1e13, latency_seconds=1e-6)


def some_gib(model: nn.Module, share: float, **options: Any) -> float:
    """Return so much memory that this share of what layers would save fits besides the least they can hold."""
    fitted = train(model, lambda each: smpkit.fit(each, device_gib=64, link=link(), lead=1), **options).fitted
    assert fitted is not None
    found = fitted.report()
    kept = sum(each.saved_bytes for each in found.layers)
    once = max(each.saved_bytes for each in found.layers) + 3 * max(each.input_bytes for each in found.layers)
    return float((found.other_bytes + once + share * (kept - once)) / 2**30)


MODELS = {"alike": Transformer, "shared": SharedLayer, "pictures": Pictures}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"microbatches": 3},
    "autocast": {"autocast": True},
    "growing batches": {"batches": (2, 2, 2, 4, 4, 2, 6, 8, 8)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_no_bit_changes(name: str, way: str) -> None:
    torch.manual_seed(0)
    model, options = MODELS[name](), WAYS[way]
    expected = train(model, **options)
    for share in (0.0, 0.5):
        gib = some_gib(model, share, **options)
        found = train(model, partial(smpkit.fit, device_gib=gib, link=link(), lead=1), **options)
        assert_same(found, expected)
    without_link = train(model, lambda each: smpkit.fit(each, device_gib=gib), **options)
    assert_same(without_link, expected)
    assert without_link.fitted is not None
    assert Choice.OFFLOAD not in without_link.fitted.choices.values()


def test_the_layers_of_one_model_do_different_things() -> None:
    model = Transformer()
    gib = some_gib(model, 0.5)
    fitted = train(model, lambda each: smpkit.fit(each, device_gib=gib, link=link(), lead=1)).fitted
    assert fitted is not None
    chosen = list(fitted.choices.values())
    assert chosen.count(Choice.KEEP) == 2
    assert chosen.count(Choice.OFFLOAD) == 4
    assert chosen == sorted(chosen, key=[Choice.OFFLOAD, Choice.KEEP].index)  # the first ones wait longest


def test_two_forwards_before_one_backward() -> None:
    """As contrastive losses need them."""

    def twice(model: nn.Module, fit: bool) -> tuple[list[Tensor], Fitted | None]:
        model = copy.deepcopy(model)
        fitted = smpkit.fit(model, device_gib=gib, link=link(), lead=1) if fit else None
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(1)
        for _ in range(STEPS):
            one, other = model(torch.randn(4, 16, 32)), model(torch.randn(4, 16, 32))
            (one - other).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach() for each in model.parameters()], fitted

    torch.manual_seed(0)
    model = Transformer()
    gib = some_gib(model, 0.5)
    expected, _ = twice(model, fit=False)
    found, fitted = twice(model, fit=True)
    assert all(map(torch.equal, found, expected))
    assert fitted is not None
    # Each layer holds twice as much as with one forward at a time, and less is kept.
    assert list(fitted.choices.values()).count(Choice.KEEP) < 2


def test_forwards_without_backward_and_failed_ones_are_no_steps() -> None:
    torch.manual_seed(0)
    model = Transformer()
    gib = some_gib(model, 0.5)
    expected = train(model)
    assert expected.losses

    def disturbed(fitted: Any) -> Fitted:
        found = smpkit.fit(fitted, device_gib=gib, link=link(), lead=1)
        original = fitted.head.forward
        calls = 0

        def fails_now_and_then(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls % 3 == 0:
                calls += 1
                state = torch.get_rng_state()
                with pytest.raises(RuntimeError, match="shape"):
                    fitted(torch.randn(4, 16, 31))
                fitted(torch.randn(4, 16, 32))  # nobody needs it
                torch.set_rng_state(state)
            return original(x)

        fitted.head.forward = fails_now_and_then
        return found

    assert_same(train(model, disturbed), expected)


def test_choices_of_an_earlier_run() -> None:
    model = Transformer()
    gib = some_gib(model, 0.5)
    first = train(model, lambda each: smpkit.fit(each, device_gib=gib, link=link(), lead=1)).fitted
    assert first is not None

    def resumed(each: nn.Module) -> Fitted:
        fitted = smpkit.fit(each, device_gib=gib, link=link())
        fitted.load_state_dict(first.state_dict())
        return fitted

    second = train(model, resumed).fitted
    assert second is not None
    assert second.choices == first.choices


def on_ranks(wrapper: str, share: float) -> list[str]:
    """Compare a wrapped model with the same one that is fitted; return what was chosen."""
    dist.init_process_group("gloo")

    def sharded(model: Any) -> Any:
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)

    wrap: Any = {"DDP": DistributedDataParallel, "together": DistributedDataParallel, "fully_shard": sharded}[wrapper]
    group = dist.group.WORLD if wrapper == "together" else None
    torch.manual_seed(0)
    model = Transformer()
    expected = train(model, wrap=wrap)
    gib = some_gib(model, share, wrap=wrap)
    if group is not None:
        gib *= 1 + dist.get_rank()  # rank 1 alone would keep more
    found = train(model, lambda each: smpkit.fit(each, device_gib=gib, link=link(), lead=1, group=group), wrap=wrap)
    assert_same(found, expected)
    assert found.fitted is not None
    dist.destroy_process_group()
    return [str(each) for each in found.fitted.choices.values()]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("wrapper", ["DDP", "together", "fully_shard"])
def test_beside_torchs_data_parallelism(wrapper: str) -> None:
    found = run_ranks(on_ranks, 2, wrapper, 0.5)
    for chosen in found:
        assert set(chosen) == {"keep", "offload"}
    if wrapper == "together":
        assert found[0] == found[1]


def test_in_hugging_faces_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=4, n_embd=32, n_head=4, vocab_size=99, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    tokens = torch.randint(0, 99, (32, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": each, "labels": each} for each in tokens]

    def trained(callbacks: list[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[],
            use_cpu=True, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
        return [each.detach() for each in model.parameters()]

    fits = trainer_callback(device_gib=0.5 / 1024, link=link())
    with pytest.warns(UserWarning, match="does not fit"):  # 0.5 MiB: weights and states alone are larger
        found = trained([fits])
    assert all(map(torch.equal, found, trained([])))
    assert Choice.KEEP not in fits.fitted.choices.values()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_in_lightning(tmp_path: Path) -> None:
    """`training_step` is no call of the module, and what it calls is a part of it."""
    lightning = pytest.importorskip("lightning.pytorch", reason="needs `pip install lightning`")
    model = Transformer()

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = copy.deepcopy(model)
            self.losses: list[float] = []

        def training_step(self, x: Tensor) -> Tensor:
            loss: Tensor = self.net(x).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    def run(callbacks: list[Any], checkpoint: str | None = None) -> Module:
        torch.manual_seed(1)
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=2 if checkpoint else 1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, callbacks=callbacks, default_root_dir=tmp_path,
        )  # fmt: skip
        data = torch.randn(4 * STEPS, 16, 32, generator=torch.Generator().manual_seed(2))
        trainer.fit(module, torch.utils.data.DataLoader(cast("Any", [*data]), batch_size=4), ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return module

    expected = run([])
    gib = some_gib(model, 0.5)
    fits = lightning_callback(device_gib=gib, link=link(), lead=1)
    found = run([fits])
    assert found.losses == expected.losses
    assert all(map(torch.equal, found.parameters(), expected.parameters()))
    assert "training_step" not in vars(found)
    chosen = fits.fitted.state_dict()
    assert {Choice.KEEP, Choice.OFFLOAD} <= set(fits.fitted.choices.values())
    again = lightning_callback(device_gib=gib, link=link(), lead=1)
    run([again], str(tmp_path / "last.ckpt"))
    assert again.fitted.state_dict() == chosen
    with pytest.raises(UsageError, match="nothing has been chosen yet"):  # it has not measured
        again.fitted.report()
