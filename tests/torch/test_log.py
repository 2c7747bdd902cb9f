"""`smp.log`: what comes into the file of a run, and into TensorBoard, W&B and MLflow, read back with their own code."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.observe.values import Logged, ValueWriter, read_values
from smpkit.torch.log import _Log
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks, train_step, wrap

TRACKERS = "tensorboard,wandb,mlflow"


def train(steps: int) -> None:
    """Two pipelines of two ranks, whose losses differ."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    for _ in range(steps):
        loss = train_step(model, torch.randn(4, 4, generator=torch.Generator().manual_seed(smp.dp_rank())))
        smp.log({"loss": loss, "lr": 0.5}, mean_over=smp.DP_GROUP)
    if smp.rank() == 0:
        (Path(os.environ["SMPKIT_RUN_DIR"]) / "own").write_text(str(loss.reduce_mean().item()))
    smp.log({"rank": smp.rank(), "bad": float("inf")}, 7)
    smp.shutdown()


def test_values_go_to_the_run_and_to_every_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    env = {
        "SMPKIT_RUN_DIR": str(tmp_path),
        "SMPKIT_TRACK": TRACKERS,
        "TRAINING_JOB_NAME": "my-job",
        "SM_HPS": json.dumps({"steps": 2, "api_token": "hush-hush-12", "text": "a,b"}),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }
    run_ranks(train, 4, 2, env=env)
    first, second, last = read_values(tmp_path)
    assert (first.step, second.step, last.step) == (1, 2, 7)
    assert last.values == {"rank": 0, "bad": math.inf}
    assert first.values == second.values
    own = float((tmp_path / "own").read_text())
    assert first.values["loss"] != own  # that of another replica is in it
    logged = {1: first.values["loss"], 2: second.values["loss"]}
    assert from_tensorboard(tmp_path) == pytest.approx(logged)
    for read in (from_wandb, from_mlflow):
        values, settings = read(tmp_path)
        assert values == pytest.approx(logged)
        assert {"steps": "2", "text": "a,b", "api_token": "(hidden)"}.items() <= settings.items()
        assert settings["pipeline_parallel_degree"] == "2"
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"hush-hush" not in path.read_bytes(), path


def reduce_without_a_log() -> list[float]:
    """Train with two functions, evaluate, log a name of its own; return the losses that the script saw."""
    smp.init({"microbatches": 2})
    torch.manual_seed(0)
    model = smp.DistributedModel(torch.nn.Linear(4, 4).to(smp.state.device))

    @smp.step
    def first(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        output = model(x)
        loss = output.square().mean()
        model.backward(loss)
        return loss, output, loss * 2

    @smp.step
    def second(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).abs().mean()
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": model(x).square().mean(), "right": (model(x) > 0).sum()}

    seen = []
    for number in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
        loss, output, double = first(model, x)
        seen.append(loss.reduce_mean())
        output.reduce_mean()  # no scalar
        if number == 1:
            smp.log({"first[2]": double})
        double.reduce_mean().zero_()  # as `dist.all_reduce` changes it
        second(model, x).reduce_mean()
    with torch.no_grad():
        evaluated, other = evaluate(model, x), evaluate(model, -2 * x)
    seen += [(evaluated["loss"].reduce_mean() + other["loss"].reduce_mean()) / 2, evaluated["right"].reduce_mean()]
    smp.shutdown()
    return [each.item() for each in seen]


@pytest.mark.also_on("sim:lazy:0")
def test_scalars_that_a_script_reduces_are_recorded_without_a_log(tmp_path: Path) -> None:
    [seen] = run_ranks(reduce_without_a_log, 1, env={"SMPKIT_RUN_DIR": str(tmp_path)})
    points: dict[str, dict[int, float]] = {}
    for logged in read_values(tmp_path):
        for name, value in logged.values.items():
            points.setdefault(name, {})[logged.step] = value
    assert points.pop("loss") == {0: seen[0], 2: seen[1], 4: seen[2]}
    assert points.pop("evaluate/loss") == {6: pytest.approx(seen[3])}
    assert points.pop("evaluate/right") == {6: seen[4]}
    assert {name: sorted(steps) for name, steps in points.items()} == {"first[2]": [0, 1], "second": [1, 3, 5]}
    assert points["first[2]"] == {0: pytest.approx(2 * seen[0]), 1: pytest.approx(2 * seen[1])}


def reduce_with_no_place(folder: str) -> float:
    model = wrap(torch.nn.Linear(4, 1), microbatches=2)
    for _ in range(3):
        loss = train_step(model, torch.ones(4, 4)).reduce_mean().item()
    with pytest.raises(OSError, match=Path(folder).name):
        smp.log({"lr": 0.1})
    return float(loss)


def test_a_folder_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    place = tmp_path / "a file"
    place.touch()
    environ = {"SMPKIT_RUN_DIR": str(place), "SMPKIT_SUMMARY": "0"}
    [loss] = run_ranks(reduce_with_no_place, 1, str(place), env=environ)
    assert math.isfinite(loss)


def from_tensorboard(run: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    return {event.step: event.value for event in found.Scalars("loss")}


def from_wandb(run: Path) -> tuple[dict[int, float], dict[str, str]]:
    from wandb.proto import wandb_internal_pb2

    [file] = run.glob("wandb/wandb/offline-run-*/*.wandb")
    values: dict[int, float] = {}
    settings: dict[str, str] = {}
    for data in records_of(file.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        if "loss" in items:
            values[int(items["_step"])] = float(items["loss"])
        configs = [*record.config.update, *record.run.config.update]
        settings |= {item.key or "/".join(item.nested_key): str(json.loads(item.value_json)) for item in configs}
    return values, settings


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of a file in the form of LevelDB's log: blocks of 32 KiB, parts of records with 7 bytes before."""
    assert data.startswith(b":W&B")
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def from_mlflow(run: Path) -> tuple[dict[int, float], dict[str, str]]:
    import mlflow

    client = mlflow.MlflowClient((run / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("smpkit")
    assert experiment is not None
    [made] = client.search_runs([experiment.experiment_id])
    assert (made.info.run_name, made.info.status) == ("my-job", "FINISHED")
    return {each.step: each.value for each in client.get_metric_history(made.info.run_id, "loss")}, made.data.params


@on_ranks(2)
def test_what_is_no_value_is_refused() -> None:
    smp.init({"ddp": True})
    wrong: list[tuple[Any, str]] = [
        ({"loss": [1.0]}, "smp.log cannot take `loss`: it is a list"),
        ({"loss": torch.zeros(2)}, r"smp.log cannot take `loss`: it is a Tensor of shape \(2,\)"),
        (1.0, "smp.log was given a float"),
        ({f"loss{smp.rank()}": 1.0}, r"the first rank of the group has \['loss0'\], number 1 has \['loss1'\]"),
    ]
    for values, said in wrong:
        with pytest.raises(UsageError, match=said):
            smp.log(values, mean_over=smp.WORLD)


def logs_alone() -> None:
    smp.init({"ddp": True})
    if smp.rank() == 0:  # no other rank is waited for
        for value in (1, torch.tensor([2.0])):
            smp.log({"value": value})
    smp.shutdown()


def test_a_run_that_goes_on_counts_on(tmp_path: Path) -> None:
    writer = ValueWriter(tmp_path)
    writer.write(Logged(41, 0.0, {"value": float("nan")}))
    writer.close()
    with (tmp_path / "values.jsonl").open("a") as file:
        file.write('{"step": 42, "ti')  # killed while it wrote
    run_ranks(logs_alone, 2, env={"SMPKIT_RUN_DIR": str(tmp_path)})
    found = read_values(tmp_path)
    assert [(each.step, each.values["value"]) for each in found[1:]] == [(42, 1.0), (43, 2.0)]
    assert math.isnan(found[0].values["value"])
    assert json.loads((tmp_path / "values.jsonl").read_text().splitlines()[0])["values"] == {"value": "NaN"}
    run_ranks(logs_alone, 1)  # without a folder nothing is written


def starts() -> None:
    smp.init({})
    smp.log({"loss": 1.0})


@pytest.mark.parametrize(
    ("track", "said"),
    [
        ("nonsense", "`nonsense` is no tracker of accelerate"),
        ("aim", "`aim` is not installed"),
        ("mlflow", "mlflow did not start: "),
        ("tensorboard:without", "SMPKIT_TRACK is set, and SMPKIT_RUN_DIR is not"),
    ],
)
def test_a_tracker_that_does_not_start_is_named(tmp_path: Path, track: str, said: str) -> None:
    name, _, without = track.partition(":")
    env = {"SMPKIT_TRACK": name, "MLFLOW_TRACKING_URI": "nowhere://x"}
    env |= {} if without else {"SMPKIT_RUN_DIR": str(tmp_path)}
    with pytest.raises(AssertionError, match=said):
        run_ranks(starts, 1, env=env)


def test_a_tracker_that_fails_later_is_left_out_with_a_warning() -> None:
    class Broken:
        name = "broken"

        def log(self, values: object, step: int) -> None:
            raise OSError("no network")

    log = _Log()
    log._trackers = [Broken()]
    with pytest.warns(UserWarning, match="broken failed, and gets no more values: OSError: no network"):
        log.take({}, 1)
    log.take({}, 2)
    with pytest.raises(UsageError, match=r"smp.init\(\) has not been called"):
        smp.log({"loss": 1})
