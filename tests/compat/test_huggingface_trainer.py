"""Hugging Face's own `Trainer` trains a pipeline: one script, which does not know of SMP, alone and over ranks."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import smpkit.torch as smp
from smpkit.errors import CheckpointError, UnsupportedError
from smpkit.torch.compat.trainer import SmpTrainer, _configure_accelerate, _dispatch_batches, adapt_accelerator
from tests.compat.commands import run_on_ranks, run_script
from tests.torch.steps import on_ranks, train_step

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="Trainer needs accelerate, of the `dev` extra"
)

SCRIPT = "huggingface_trainer.py"
PIPELINE = {"partitions": 2, "ddp": True, "microbatches": 2}


def _train(
    folder: Path,
    *arguments: str,
    ranks: int = 1,
    parameters: Mapping[str, Any] = MappingProxyType({}),
    run: Callable[..., None] = run_on_ranks,
) -> dict[str, Any]:
    report = folder / f"report-{ranks}-{len(list(folder.glob('report*')))}.json"
    given = ("--output_dir", str(folder / f"out-{ranks}"), "--report", str(report), *arguments)
    run(SCRIPT, *given, ranks=ranks, parameters=parameters)
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Losses, norms and metrics are equal; the logged training loss is summed up in float32 by `Trainer`."""
    names = {"loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_count"}
    for entry, against in zip(one["history"], other["history"], strict=True):
        for name in entry.keys() & names:
            assert against[name] == pytest.approx(entry[name], rel=3e-7 if name == "loss" else 1e-12), (name, entry)


def _same_weights(one: Path, other: Path) -> None:
    from safetensors.torch import load_file

    saved = [load_file(folder / "model.safetensors") for folder in (one, other)]
    assert saved[0].keys() == saved[1].keys()
    for name, weight in saved[0].items():
        torch.testing.assert_close(saved[1][name], weight, rtol=1e-10, atol=1e-12)


def test_a_pipeline_with_replicas_trains_as_one_process(tmp_path: Path) -> None:
    """Losses, gradient norms and evaluations over pipeline 2 × data 2 are those of one process with the whole batch."""
    alone = _train(tmp_path)
    over_ranks = _train(tmp_path, "--batch_size", "4", ranks=4, parameters=PIPELINE)
    assert (alone["wrapped"], over_ranks["wrapped"]) == ("BertForSequenceClassification", "DistributedModel")
    assert len(alone["history"]) == 9
    _same(alone, over_ranks)
    _same_weights(tmp_path / "out-1", tmp_path / "out-4")


@pytest.mark.slow
def test_a_pipeline_of_divided_modules_trains_and_saves_as_one_process(tmp_path: Path) -> None:
    alone = _train(tmp_path)
    divided = {**PIPELINE, "tensor_parallel_degree": 2, "prescaled_batch": True, "_match_weights": True}
    _same(alone, _train(tmp_path, "--tensor_parallel", "1", ranks=4, parameters=divided, run=run_script))
    _same_weights(tmp_path / "out-1", tmp_path / "out-4")


@pytest.mark.slow
def test_a_pipeline_resumes_from_its_checkpoint_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole = _train(tmp_path, "--accumulate", "2", ranks=2, parameters=PIPELINE)
    resume = ("--resume", str(tmp_path / "out-2" / "checkpoint-3"))
    _same(whole, _train(tmp_path, "--accumulate", "2", *resume, ranks=2, parameters=PIPELINE))
    _same(_train(tmp_path, "--accumulate", "2"), whole)


class _Original:
    """What a `transformers.Trainer` is to the mixin, with three batches left of an epoch."""

    create_optimizer: Any = None
    current_gradient_accumulation_steps = 3

    def __init__(self, model: nn.Module, _args: Any) -> None:
        self.args = SimpleNamespace(gradient_accumulation_steps=4, device="cpu", should_save=smp.rank() == 0)
        self.model = model
        self.optimizer: Any = None

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def compute_loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return 6 * model(inputs["x"]).sum()

    def _save_checkpoint(self, file: Path) -> None:
        if smp.rank() == 1:  # which is late with its file
            time.sleep(0.5)
            file.touch()

    def _save_optimizer_and_scheduler(self, folder: Any) -> None:
        states = self.optimizer.local_state_dict(gather_if_shard=False)
        smp.barrier()
        if smp.rdp_rank() == 0 or smp.state.cfg.shard_optimizer_state:
            smp.save(states, folder / "optimizer.pt", partial=True, v3=smp.state.cfg.shard_optimizer_state)

    def _load_optimizer_and_scheduler(self, folder: Any) -> None:
        self.optimizer = smp.load(folder / "optimizer.pt")

    def _save_rng_state(self, folder: Any) -> None:  # of the process, which is not what dropout draws from
        (folder / f"rng_state_{smp.dp_rank()}.pth").touch()

    def _load_rng_state(self, _folder: Any) -> None: ...


class _Trainer(SmpTrainer, _Original):
    """Trainer as SMP has it."""


class _Own(_Trainer):
    """A public fork's, with `create_optimizer` in the form that Trainer itself had since 4.4."""

    def create_optimizer(self) -> Any:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = smp.DistributedOptimizer(self.optimizer)
        return self.optimizer


@on_ranks(1)
def test_a_subclass_that_wraps_its_optimizer_is_asked_for_it_once() -> None:
    smp.init()
    trainer: Any = _Own(nn.Linear(1, 1))
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, smp.DistributedOptimizer)
    assert trainer.create_optimizer() is optimizer


def _one_weight() -> tuple[Any, nn.Parameter]:
    model = smp.DistributedModel(nn.Linear(1, 1, bias=False))
    [weight] = model.parameters()
    nn.init.ones_(weight)  # of random ones a sixth is rounded otherwise by 6 and 3 than by 2
    return model, weight


@on_ranks(1)
def test_a_batch_trains_by_the_trainers_loss_divided_by_the_batches_of_its_update() -> None:
    # Label smoothing, and `compute_loss` of a script, changed evaluations only.
    smp.init()
    model, weight = _one_weight()
    trainer: Any = _Trainer(model)
    modes = list[str]()
    trainer.optimizer = SimpleNamespace(train=lambda: modes.append("train"))  # as those without a schedule have it
    loss = trainer.training_step(model, {"x": torch.ones(1, 1)})
    assert loss == 2
    assert weight.grad == 2
    assert modes == ["train"]


class _Counts(_Original):
    """Has a loss per item of the update, as transformers' causal models and label smoothing have since 4.46."""

    can_return_loss = model_accepts_loss_kwargs = True

    def _get_num_items_in_batch(self, batches: list[Any], _device: Any) -> torch.Tensor:
        return sum((batch["x"] != 0).sum() for batch in batches)

    def prediction_step(self, model: Any, inputs: dict[str, Any]) -> Any:
        return smp.step(lambda model, inputs: model(**inputs))(model, inputs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits = model(inputs["x"])
        loss = logits.sum() / num_items_in_batch
        return (loss, {"logits": logits}) if return_outputs else loss


@on_ranks(1)
def test_each_item_of_an_update_counts_alike_in_whichever_microbatch_it_is() -> None:
    smp.init({"microbatches": 2})
    model, weight = _one_weight()
    trainer: Any = type("Counting", (SmpTrainer, _Counts), {})(model)
    batch = {"x": torch.tensor([[2.0], [0.0], [4.0], [6.0]])}
    assert trainer.training_step(model, batch, torch.tensor(3)) == 4
    assert weight.grad == 4
    for trainer.label_names in (("x",), ()):  # labels, or a trainer that needs none, such as TRL's for rewards
        outputs = trainer.prediction_step(model, batch)
        assert outputs["loss"].reduce_mean() == 4
        assert outputs["logits"].concat().sum() == 12


def _of_trl(name: str, module: str) -> type[Any]:
    """Return a trainer that says it is TRL's, with a loss and an evaluation of its own."""

    def own(*_: Any) -> None: ...

    own.__module__ = f"trl.trainer.{module}"
    names = {"compute_loss": own, "prediction_step": own, "__module__": own.__module__}
    return type(name, (SmpTrainer, _Counts), names)


@on_ranks(1)
def test_trl_trains_by_its_own_loss_or_not_at_all() -> None:
    smp.init({"microbatches": 2})
    with pytest.raises(UnsupportedError, match="`microbatches` is 2, but DPOTrainer compares"):
        _of_trl("DPOTrainer", "dpo_trainer")(None)
    sft = _of_trl("SFTTrainer", "sft_trainer")
    with pytest.raises(UnsupportedError, match='`loss_type` is "dft"'):
        sft(None, SimpleNamespace(loss_type="dft"))
    # Its own evaluation calls the model outside a step.
    assert sft(None).prediction_step.func is SmpTrainer.prediction_step


@on_ranks(2)
def test_a_head_that_trl_computes_beside_the_model_is_refused_over_a_pipeline() -> None:
    smp.init({"partitions": 2, "microbatches": 1})
    dpo = _of_trl("DPOTrainer", "dpo_trainer")
    sys.modules[dpo.__module__] = module = ModuleType(dpo.__module__)
    dpo(None)  # as earlier releases are, which call the model's own head
    vars(module)["add_fused_lm_head"] = lambda model: model
    with pytest.raises(UnsupportedError, match=r"`partitions` is 2, but DPOTrainer multiplies by .* `lm_head`"):
        dpo(None)


class _Stream(IterableDataset[int]):
    """Numbers that only replica 0 may read."""

    def __iter__(self) -> Iterator[int]:
        assert smp.dp_rank() == 0
        yield from range(7)


@on_ranks(2)
def test_replicas_get_their_batches_of_a_dataset_without_a_length() -> None:
    smp.init({"partitions": 1, "microbatches": 1, "ddp": True})
    _configure_accelerate()
    _dispatch_batches()
    from accelerate.data_loader import prepare_data_loader

    loader = prepare_data_loader(DataLoader(_Stream(), batch_size=2), put_on_device=True)
    # As without SMP: numbers of the first batches complete the last one.
    assert [batch.tolist() for batch in loader] == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]][smp.dp_rank()]


@on_ranks(2)
def test_a_checkpoint_is_whole_before_any_rank_goes_on(tmp_path: Path) -> None:
    smp.init()
    trainer: Any = _Trainer(nn.Linear(1, 1))
    trainer._save_checkpoint(tmp_path / "optimizer.pt_1")
    assert (tmp_path / "optimizer.pt_1").exists()


@on_ranks(2)
def test_each_rank_loads_the_states_of_its_own_part_of_the_weights(tmp_path: Path) -> None:
    smp.init({"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0})
    trainer: Any = _Trainer(nn.Linear(1, 1))
    model = smp.DistributedModel(nn.Linear(4, 4))
    trainer.optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    train_step(model, torch.ones(2, 4))
    trainer.optimizer.step()
    (tmp_path / "optimizer.pt_1").touch()  # of an earlier run with two stages; that training resumes was refused
    smp.barrier()
    trainer._save_optimizer_and_scheduler(tmp_path)
    smp.barrier()
    assert {file.name for file in tmp_path.iterdir()} == {"optimizer.pt_0", "optimizer.pt_0_0_1"}
    own, loaded = trainer.optimizer.local_state_dict(), smp.load(tmp_path / "optimizer.pt")
    assert own["state"][0]["exp_avg"].shape == (2, 4)
    assert loaded["state"][0]["exp_avg"].equal(own["state"][0]["exp_avg"])


@on_ranks(1)
def test_dropout_goes_on_where_the_checkpoint_was_saved(tmp_path: Path) -> None:
    smp.init()
    trainer: Any = _Trainer(nn.Linear(1, 1))
    trainer.model_wrapped = model = smp.DistributedModel(nn.Dropout())
    draw = smp.step(lambda model: model(torch.ones(64)))
    draw(model)
    trainer._save_rng_state(tmp_path)
    drawn = draw(model).concat()
    assert not torch.equal(draw(model).concat(), drawn)
    trainer._load_rng_state(tmp_path)
    assert torch.equal(draw(model).concat(), drawn)


@on_ranks(2)
def test_dropout_goes_on_on_hosts_that_do_not_share_a_disk(tmp_path: Path) -> None:
    # The stages of the other hosts drew the masks of the first steps again.
    smp.init({"partitions": 2, "microbatches": 1})
    trainer: Any = _Trainer(nn.Linear(1, 1))
    trainer.model_wrapped = model = smp.DistributedModel(nn.Dropout())
    folder, kept = tmp_path / str(smp.rank()), {"seed": 3, "step": 5}
    folder.mkdir()
    model.load_random_state(kept)
    trainer._save_rng_state(folder)
    model.load_random_state({})
    trainer._load_rng_state(str(folder))
    assert model.random_state() == kept


@on_ranks(2)
def test_each_rank_with_data_of_its_own_saves_its_random_state(tmp_path: Path) -> None:
    # Without `prescaled_batch` tensor-parallel ranks draw the masks of their own batches.
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    trainer: Any = _Trainer(nn.Linear(1, 1))
    trainer.model_wrapped = smp.DistributedModel(nn.Dropout())
    trainer._save_rng_state(tmp_path)
    smp.barrier()
    assert {file.name for file in tmp_path.glob("rng*")} == {"rng_state_0.pth", "rng_state_1.pth"}


@pytest.mark.parametrize("names", [["optimizer.pt_0", "optimizer.pt_1"], ["optimizer.pt"]])
@on_ranks(1)
def test_optimizer_states_that_other_ranks_saved_are_refused(tmp_path: Path, names: list[str]) -> None:
    # Those of the second stage were lost, and of the file of one process everything: learning rates began again.
    smp.init()
    trainer: Any = _Trainer(nn.Linear(1, 1))
    for name in names:
        smp.save({"step": 1}, tmp_path / name, partial=False)
    with pytest.raises(CheckpointError, match=f"are {', '.join(names)}, but the ranks of this job read"):
        trainer._load_optimizer_and_scheduler(tmp_path)


@on_ranks(2)
def test_each_rank_loads_its_own_file_of_optimizer_states(tmp_path: Path) -> None:
    smp.init({"partitions": 2, "microbatches": 1})
    trainer: Any = _Trainer(nn.Linear(1, 1))
    smp.save({"rank": smp.rank()}, tmp_path / "optimizer.pt")
    smp.barrier()
    trainer._load_optimizer_and_scheduler(tmp_path)
    assert trainer.optimizer == {"rank": smp.rank()}


@on_ranks(2)
def test_the_states_of_another_part_of_the_weights_are_refused(tmp_path: Path) -> None:
    # A job that is killed while it saves may leave replica 0's file, whose parts have the same shapes.
    smp.init({"ddp": True, "sharded_data_parallel_degree": 2})
    trainer: Any = _Trainer(nn.Linear(1, 1))
    if smp.rank() == 0:
        smp.save({"step": 1}, tmp_path / "optimizer.pt")
    smp.barrier()
    with pytest.raises(CheckpointError, match=r"are optimizer.pt_0, but .* read optimizer.pt_0, optimizer.pt_0_0_1"):
        trainer._load_optimizer_and_scheduler(tmp_path)


@on_ranks(1)
def test_searches_are_refused() -> None:
    # Each rank drew learning rates of its own; the second trial ended, since a script has one DistributedModel.
    smp.init()
    trainer: Any = _Trainer(nn.Linear(1, 1))
    with pytest.raises(UnsupportedError, match="`hyperparameter_search` trains one model after another"):
        trainer.hyperparameter_search(n_trials=2)
    with pytest.raises(UnsupportedError, match="`auto_find_batch_size` is True"):
        _Trainer(nn.Linear(1, 1), SimpleNamespace(auto_find_batch_size=True))


@on_ranks(2)
def test_the_accelerator_reduces_and_gathers_objects_over_the_replicas() -> None:
    # Each replica got its own value back.
    smp.init({"partitions": 1, "ddp": True})
    _configure_accelerate()
    from accelerate import Accelerator

    accelerator = Accelerator()
    adapt_accelerator(accelerator)
    own = torch.tensor(1.0 + 2 * smp.dp_rank())
    reduced = [accelerator.reduce(own, reduction).item() for reduction in ("sum", "mean", "max")]
    assert reduced == [4, 2, 3]
    assert accelerator.gather_for_metrics([f"replica {smp.dp_rank()}"]) == ["replica 0", "replica 1"]


class _Operations(_Original):
    """Adds up the operations of one process."""

    current_flos, total = 3.0, 0.0

    def store_flos(self) -> None:
        self.total += self.current_flos


class _OperationsOfAll(SmpTrainer, _Operations):
    """Trainer as SMP has it."""


@on_ranks(2)
def test_operations_of_all_replicas_are_counted() -> None:
    smp.init({"partitions": 1, "ddp": True})
    trainer: Any = _OperationsOfAll(nn.Linear(1, 1))
    trainer.store_flos()
    assert trainer.total == 6


@on_ranks(1)
def test_the_adapter_of_a_checkpoint_is_loaded_by_its_names_in_the_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    smp.init()
    adapted = peft.get_peft_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), peft.LoraConfig(target_modules="0"))
    model = smp.DistributedModel(adapted)
    weight = adapted.base_model.model[0].lora_B["default"].weight
    nn.init.ones_(weight)
    adapted.save_pretrained(tmp_path)
    nn.init.zeros_(weight)
    trainer: Any = _Trainer(adapted)
    trainer.model_wrapped, results = model, list[Any]()
    trainer._issue_warnings_after_load = results.append
    trainer._load_from_checkpoint(str(tmp_path))
    assert weight.sum() == 16
    assert [tuple(result) for result in results] == [([], [])]


@on_ranks(1)
def test_trainer_says_which_weights_a_checkpoint_does_not_have(tmp_path: Path) -> None:
    # A model resumed from the folder of another one, without its head say, trained on from random weights.
    smp.init()
    layers: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    layers[1].weight = layers[0].weight
    trainer: Any = _Trainer(layers)
    trainer.model_wrapped, results = smp.DistributedModel(layers), list[Any]()
    trainer._issue_warnings_after_load = results.append
    save_file({"0.weight": torch.ones(2, 2), "head.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    trainer._load_from_checkpoint(str(tmp_path))
    [(missing, unexpected)] = results
    assert (missing, unexpected) == (["2.weight", "2.bias"], ["head.weight"])
    assert layers[1].weight.equal(torch.ones(2, 2))


@on_ranks(1)
def test_trainer_sees_the_class_of_the_model() -> None:
    # Label smoothing goes by it, and compared each token with itself instead of the one before.
    smp.init()
    model = smp.DistributedModel(nn.Linear(1, 1))
    accelerator: Any = SimpleNamespace(unwrap_model=lambda module: module)
    adapt_accelerator(accelerator)
    assert accelerator.unwrap_model(model) is model.get_module()
