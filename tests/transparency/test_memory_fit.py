"""`smpkit.fit` changes memory and time, and no bit of losses and weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import smpkit
from smpkit.plan.tune.chain import Choice
from smpkit.testing import EmulatedLink
from smpkit.torch.memory import Fitted
from tests.models import CASES as MODELS
from tests.models import DROPOUT, WIDTH, Case, Dropping, autocast_step, mse_step, singles
from tests.ranks import run_ranks
from tests.train import Way, build, check_same, train_plainly


def contrastive_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Call forward twice before backward."""
    loss = functional.mse_loss(model(x), model(y))
    model.backward(loss)
    return loss


def disturbed_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Call forward without backward, and one that fails: neither is a step."""
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shape"):
        model(x[:, 1:])
    model(x)
    torch.set_rng_state(state)
    return mse_step(model, x, y)


class Shared(Dropping):
    """Layers that are called several times, as in ALBERT."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


ALIKE = replace(DROPOUT, build=partial(Dropping, 8))
WAY = Way(microbatches=1, batches=(8,) * 8, optimizer="AdamW")
GROWING = replace(WAY, batches=(4, 4, 4, 8, 8, 4, 12, 16, 16))
CASES: dict[str, tuple[Case, Way]] = {
    "alike layers": (ALIKE, WAY),
    "layers used twice": (replace(DROPOUT, build=partial(Shared, 2)), WAY),
    "running statistics": (MODELS["BatchNorm"], WAY),
    "accumulated": (ALIKE, replace(WAY, microbatches=2)),
    "autocast": (replace(ALIKE, batch=singles, step=autocast_step, dtype=torch.float32), WAY),
    "growing batches": (MODELS["BatchNorm"], GROWING),
    "two forwards before a backward": (replace(ALIKE, step=contrastive_step), WAY),
}


# --- fitted and not ---------------------------------------------------------------------------------------------------


def link() -> EmulatedLink:
    """Return a link that is never the slower part, however loaded the machine is."""
    return EmulatedLink(1e13, latency_seconds=1e-6)


class Fit:
    """Fits a model before it is trained."""

    fitted: Fitted

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, module: nn.Module) -> None:
        self.fitted = smpkit.fit(module, **self.options)


def roomy() -> Fit:
    return Fit(device_gib=64, link=link(), lead=1)


def tight(first: Fit, **options: Any) -> Fit:
    """Leave so much memory that half of what layers would save fits besides the least they can hold."""
    found = first.fitted.report()
    kept = sum(each.saved_bytes for each in found.layers)
    once = max(each.saved_bytes for each in found.layers) + 3 * max(each.input_bytes for each in found.layers)
    half_gib = float((found.other_bytes + (once + kept) / 2) / 2**30)
    return Fit(**{"device_gib": half_gib, "link": link(), "lead": 1, **options})


def check(case: Case, way: Way, *, plain: Case | None = None, **options: Any) -> Fitted:
    """Compare a training with room for half of what layers would save with one that is not fitted."""
    first = roomy()
    train_plainly(case, replace(way, prepare=first))
    fits = tight(first, **options)
    [found] = train_plainly(case, replace(way, prepare=fits))
    [expected] = train_plainly(plain or case, way)
    check_same(found, expected, 0)
    return fits.fitted


@pytest.mark.parametrize("name", CASES)
def test_no_bit_changes(name: str) -> None:
    chosen = list(check(*CASES[name]).choices.values())
    assert set(chosen) != {Choice.KEEP}
    if name == "alike layers":  # the first ones wait longest
        assert set(chosen) == {Choice.OFFLOAD, Choice.KEEP}
        assert chosen == sorted(chosen, key=[Choice.OFFLOAD, Choice.KEEP].index)


def test_without_a_link_layers_are_recomputed() -> None:
    assert Choice.RECOMPUTE in check(*CASES["running statistics"], link=None).choices.values()


def test_forwards_without_backward_and_failed_ones_are_no_steps() -> None:
    check(replace(ALIKE, step=disturbed_step), WAY, plain=ALIKE)


def test_choices_of_an_earlier_run() -> None:
    first = check(ALIKE, WAY)
    second = smpkit.fit(build(ALIKE), device_gib=64, link=link())
    second.load_state_dict(first.state_dict())
    assert second.choices == first.choices
    assert second.has_chosen
    assert "this one has measured nothing" in str(second.report())


# --- beside torch's data parallelism, and in trainers -----------------------------------------------------------------


def wrapped(wrapper: str, fits: Fit | None = None) -> nn.Module:
    model: Any = Dropping(8).double()
    if fits is not None:
        fits(model)
    if wrapper != "fully_shard":
        return DistributedDataParallel(model)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def on_ranks(wrapper: str) -> list[str]:
    """Compare a wrapped model with the same one that is fitted; return what was chosen."""
    dist.init_process_group("gloo")
    first = roomy()
    traces = [train_plainly(replace(DROPOUT, build=partial(wrapped, wrapper, fits)), WAY)[0] for fits in (None, first)]
    last = tight(first)
    if wrapper == "together":  # rank 1 alone would keep more
        last.options |= {"device_gib": last.options["device_gib"] * (1 + dist.get_rank()), "group": dist.group.WORLD}
    traces += train_plainly(replace(DROPOUT, build=partial(wrapped, wrapper, last)), WAY)
    for found in traces[1:]:
        check_same(found, traces[0], 0)
    dist.destroy_process_group()
    return [str(each) for each in last.fitted.choices.values()]


@pytest.mark.parametrize(
    "wrapper", ["together", *[pytest.param(each, marks=pytest.mark.slow) for each in ("DDP", "fully_shard")]]
)
def test_beside_torchs_data_parallelism(wrapper: str) -> None:
    found = run_ranks(on_ranks, 2, wrapper)
    for chosen in found:
        assert set(chosen) == {"keep", "offload"}
    if wrapper == "together":
        assert found[0] == found[1]


def test_in_hugging_faces_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=99, n_positions=32)
    tokens = torch.randint(0, 99, (32, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip

    def trained(fits: Fit | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        if fits is not None:
            fits(model)
        trainer.train()
        return [parameter.detach() for parameter in model.parameters()]

    small = Fit(device_gib=0.5 / 1024, link=link())
    with pytest.warns(UserWarning, match="does not fit"):  # 0.5 MiB: weights and states alone are larger
        found = trained(small)
    assert all(map(torch.equal, found, trained(None)))
    assert small.fitted.has_chosen
    assert Choice.KEEP not in [*small.fitted.choices.values()][:-1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_in_lightning(tmp_path: Path) -> None:
    """`training_step` is no call of the module, and what it calls is a part of it."""
    lightning = pytest.importorskip("lightning.pytorch", reason="needs `pip install lightning`")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        fits: Fit | None = None

        def __init__(self) -> None:
            super().__init__()
            self.net = build(ALIKE)

        def on_fit_start(self) -> None:
            if self.fits is not None:
                self.fits(self)
                self.__dict__["training_step"] = self.fits.fitted.as_forward(self.training_step)

        def training_step(self, x: Tensor) -> Any:
            return self.net(x).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    def trained(fits: Fit | None) -> list[Tensor]:
        torch.manual_seed(1)
        module = Module()
        module.fits = fits
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        data: Any = [*torch.randn(64, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))]
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
        return [parameter.detach() for parameter in module.parameters()]

    first = roomy()
    train_plainly(ALIKE, replace(WAY, prepare=first))
    half = tight(first)
    assert all(map(torch.equal, trained(half), trained(None)))
    assert {Choice.KEEP, Choice.OFFLOAD} <= set(half.fitted.choices.values())
