"""`-p` and `-H`: short for `--set` below the modelparallel parameters and the hyperparameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from smpkit.config.load import LoadedJob, Override, load, load_job
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import ConfigError

FULL = "distribution: {smdistributed: {modelparallel: {enabled: true, parameters: {microbatches: 2}}}}\n"
SHORT = "distribution: {enabled: true, parameters: {microbatches: 2}}\n"
NONE = "distribution: {torch_distributed: {enabled: true}}\n"


def job(folder: Path, distribution: str, *overrides: Override) -> LoadedJob:
    (folder / "train.py").touch()
    (folder / "job.yaml").write_text(f"entry_point: train.py\nhyperparameters: {{lr: 1}}\n{distribution}")
    return load_job(folder / "job.yaml", overrides)


@pytest.mark.parametrize("distribution", [FULL, SHORT, NONE, ""], ids=["full", "short", "other", "none"])
def test_a_parameter_goes_where_the_file_has_them_and_switches_them_on(tmp_path: Path, distribution: str) -> None:
    loaded = job(tmp_path, distribution, ("-p", "pipeline_parallel_degree=4"), ("-p", "microbatches=8"))
    parameters = loaded.config.distribution.model_parallel
    assert parameters is not None
    assert (parameters.pipeline_parallel_degree, parameters.microbatches) == (4, 8)
    origin = loaded.origins["distribution", "smdistributed", "modelparallel", "parameters", "microbatches"]
    assert origin == "-p microbatches"


def test_a_file_of_parameters_alone_takes_them_at_its_root(tmp_path: Path) -> None:
    path = tmp_path / "parameters.yaml"
    path.write_text("microbatches: 2\n")
    config = load(path, [("-p", "microbatches=8")]).config
    assert isinstance(config, ModelParallelConfig)
    assert config.microbatches == 8


def test_a_problem_of_an_option_does_not_repeat_where_it_belongs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\n-p microbatches: must be at least 1, got 0$"):
        job(tmp_path, FULL, ("-p", "microbatches=0"))


def test_a_hyperparameter_may_have_dots_and_replaces_that_of_the_file(tmp_path: Path) -> None:
    loaded = job(tmp_path, "", ("-H", "lr=0.1"), ("-H", "model.size=3"))
    assert dict(loaded.config.hyperparameters) == {"lr": 0.1, "model.size": 3}


def test_ranks_are_those_of_all_hosts(tmp_path: Path) -> None:
    loaded = job(tmp_path, "compute: {instance_count: 2}\n", ("--ranks", "8"))
    assert loaded.config.distribution.processes_per_host == 4
    with pytest.raises(ConfigError, match="--ranks: 7 ranks cannot be spread evenly over 2 hosts"):
        job(tmp_path, "compute: {instance_count: 2}\n", ("--ranks", "7"))


@pytest.mark.parametrize(
    ("flag", "given", "said"),
    [
        ("-p", "microbatchs=8", "microbatches"),
        ("-p", "microbatches", "for example `microbatches=8`"),
        ("-H", "=3", "for example `steps=100`"),
    ],
)
def test_a_wrong_one_is_answered_with_the_flag_and_a_hint(tmp_path: Path, flag: str, given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=flag) as caught:
        job(tmp_path, FULL, (flag, given))
    assert said in str(caught.value)
