from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from smpkit.config.distribution import Distribution
from smpkit.config.job import JobConfig
from smpkit.config.load import Loaded, LoadedJob, load, load_job
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import ConfigError
from tests.config.strategies import anything, patient
from tests.config.test_distribution import MPI, block
from tests.config.test_modelparallel import SEED

JOB = """\
entry_point: train.py
hyperparameters: {lr: 1e-3, on: yes}
compute:
  instance_count: 2
distribution:
  smdistributed:
    modelparallel:
      enabled: true
      parameters:
        partitions: 2
        microbatches: 4
  mpi: {enabled: true, processes_per_host: 8}
"""
PARAMETERS = "distribution.smdistributed.modelparallel.parameters"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def write(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, [("--set", each) for each in overrides])
    return [str(problem).replace(f"{path.parent}/", "") for problem in caught.value.problems]


def test_a_job_file_becomes_a_job(folder: Path) -> None:
    job = load_job(folder / "job.yaml")
    assert isinstance(job, LoadedJob)
    assert job.config.hyperparameters == {"lr": 1e-3, "on": "yes"}
    assert (job.config.compute.instance_count, job.config.distribution.processes_per_host) == (2, 8)
    assert job.notices == ()
    assert job.folder == folder


def test_the_seed_job_is_the_same_in_json(folder: Path) -> None:
    data = {"entry_point": "train.py", "distribution": {**block(), "mpi": MPI}}
    path = write(folder, json.dumps(data, indent=2), "job.json")
    assert load_job(path).config == JobConfig.model_validate(data)
    assert repr(load_job(path)) == f"LoadedJob({str(path)!r})"


def test_later_sources_win(folder: Path) -> None:
    overrides = [("--set", "compute.instance_count=4"), ("--set", "hyperparameters.a.b=[1, x]")]
    overrides += [("-p", "_match_weights=true"), ("-H", "a.c=no"), ("--set", "compute.instance_count=8")]
    job = load_job(folder / "job.yaml", overrides)
    assert job.config.compute.instance_count == 8
    assert job.config.hyperparameters == {"lr": 1e-3, "on": "yes", "a.b": [1, "x"], "a.c": "no"}
    parameters = job.config.distribution.model_parallel
    assert parameters is not None
    assert parameters.match_weights is True
    assert load_job(folder / "job.yaml", [("--set", "environment.A=1")]).config.environment == {"A": "1"}
    path = write(folder, "entry_point: train.py\ncompute:\n")
    assert load_job(path, [("--set", "compute.spot=true")]).config.compute.spot is True


def test_origins_say_where_each_value_came_from(folder: Path) -> None:
    write(folder, JOB + "checkpoints: s3://bucket\n")
    job = load_job(folder / "job.yaml", [("--set", "compute.spot=true")])
    origins = {".".join(map(str, key)): value.replace(f"{folder}/", "") for key, value in job.origins.items()}
    expected = {
        "entry_point": "job.yaml:1",
        "hyperparameters.lr": "job.yaml:2",
        "compute.instance_count": "job.yaml:4",
        "compute.spot": "--set compute.spot",
        "compute.max_run_seconds": "default",
        f"{PARAMETERS}.pipeline_parallel_degree": "job.yaml:10",
        f"{PARAMETERS}.optimize": "default",
        "checkpoints.uri": "job.yaml:13",
        "checkpoints.local_path": "default",
    }
    assert {key: origins[key] for key in expected} == expected
    path = write(folder, "entry_point: train.py\ndistribution:\n  enabled: true\n  parameters: {microbatches: 2}\n")
    assert load_job(path).origins[*PARAMETERS.split("."), "microbatches"] == f"{path}:4"


def test_every_problem_is_told_with_its_line_and_excerpt(folder: Path) -> None:
    text = "name: my_job\ncompute:\n  instance_cuont: 2\ndistribution:\n  enabled: true\n"
    path = write(folder, text + "  parameters: {tensor_parallel_degree: 0}\n")
    assert "\n\n".join(problems(path, "compute.spot=1", "nmae=x", "foo")) == EVERY_PROBLEM


EVERY_PROBLEM = """\
job.yaml:1: name: must have 1 to 63 letters, digits and hyphens, the first and last no hyphen, got `my_job`
    1 | name: my_job

    hint: for example `my-job`

job.yaml:1: entry_point: is required

job.yaml:3: compute.instance_cuont: unknown field
    3 |   instance_cuont: 2

    hint: did you mean `instance_count`?

job.yaml:6: distribution.parameters.tensor_parallel_degree: must be at least 1, got 0
    6 |   parameters: {tensor_parallel_degree: 0}

--set compute.spot: must be true or false, got 1

--set nmae: unknown field
    hint: did you mean `name`?

--set foo: must have the form `key=value`
    hint: for example `compute.spot=true`"""


def test_keys_written_twice_are_told_beside_other_problems(folder: Path) -> None:
    path = write(folder, "entry_point: train.py\ncompute: {spot: 1}\nentry_point: train.py\n")
    first, second = problems(path)
    assert first.startswith("job.yaml:2: compute.spot: must be true or false, got 1")
    assert second.startswith("job.yaml:3: entry_point: is written twice, first on line 1")
    (alone,) = problems(write(folder, "entry_point: train.py\nname: a\nname: b\n"))
    assert alone.startswith("job.yaml:3: name: is written twice, first on line 2")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name", "--set name: must have the form `key=value`"),
        ("=3", "--set : must have the form `key=value`"),
        ("a..b=3", "--set a..b: must have the form `key=value`"),
        ("entry_point.x=3", "--set entry_point.x: cannot be set inside `train.py`, which is no mapping"),
        ("name=[", "--set name:1:2: is not YAML"),
    ],
    ids=ascii,
)
def test_overrides_that_cannot_be_meant_are_refused(override: str, message: str, folder: Path) -> None:
    (problem,) = problems(folder / "job.yaml", override)
    assert message in problem


def test_what_text_alone_stands_for_can_be_added_to(folder: Path) -> None:
    """`backend: slurm` and `--set backend.slurm.partition=low`, or a folder of data and its content type."""
    path = write(folder, "entry_point: train.py\nbackend: slurm\ninputs: {data: ./d}\nsecrets: {KEY: entry}\n")
    changes = {"backend.slurm.partition": "low", "inputs.data.mode": "File", "secrets.KEY.variable": "MINE"}
    loaded = load_job(path, [("--set", f"{key}={value}") for key, value in changes.items()])
    backend, channel, secret = loaded.config.backend, loaded.config.inputs["data"], loaded.config.secrets["KEY"]
    assert (backend.name, backend.slurm.partition) == ("slurm", "low")
    assert (channel.uri, channel.mode) == ("./d", "File")
    assert (secret.entry, secret.variable) == ("entry", "MINE")
    for origins in (loaded.origins, load_job(path).origins):
        assert origins["backend", "name"] == f"{path}:2"
        assert origins["inputs", "data", "uri"] == f"{path}:3"


def job_with_parameters(folder: Path) -> Path:
    text = "entry_point: train.py\ndistribution:\n  smdistributed:\n    modelparallel: "
    return write(folder, text + "{enabled: true, parameters: smp.json}\n")


def test_parameters_may_be_the_path_of_a_json_file(folder: Path) -> None:
    write(folder, json.dumps(SEED), "smp.json")
    job = load_job(job_with_parameters(folder), [("--set", f"{PARAMETERS}.microbatches=8")])
    assert job.config.distribution.parameters_as_written == {**SEED, "microbatches": 8}
    job = load_job(write(folder, JOB), [("--set", f"{PARAMETERS}=smp.json")])
    assert job.config.distribution.parameters_as_written == SEED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, f"job.yaml:4: {PARAMETERS}: names a file that cannot be read: no such file"),
        ("[]", f"job.yaml:4: {PARAMETERS}: `smp.json` must hold a mapping of parameters, got a list"),
        ("{", "smp.json:1:2: is not JSON"),
        ('{\n  "microbatches": 0\n}', f"smp.json:2: {PARAMETERS}.microbatches: must be at least 1, got 0"),
    ],
)
def test_a_problem_of_a_parameters_file_names_its_place(text: str | None, message: str, folder: Path) -> None:
    if text is not None:
        write(folder, text, "smp.json")
    (problem,) = problems(job_with_parameters(folder))
    assert problem.startswith(message)


@pytest.mark.parametrize("block", ["{smdistributed: {modelparallel: %s}}", "%s"], ids=["full", "bare"])
def test_a_distribution_may_name_a_file_of_parameters_too(block: str, folder: Path) -> None:
    write(folder, '{"microbatches": 2}', "smp.json")
    loaded = load(write(folder, block % "{enabled: true, parameters: smp.json}", "distribution.yaml"))
    assert isinstance(loaded.config, Distribution)
    assert loaded.config.parameters_as_written == {"microbatches": 2}


@pytest.mark.parametrize(
    ("data", "kind", "model"),
    [
        (SEED, "modelparallel", ModelParallelConfig),
        ({"partitions": 2}, "modelparallel", ModelParallelConfig),
        ({**block(), "mpi": MPI}, "distribution", Distribution),
        ({"enabled": True, "parameters": SEED}, "distribution", Distribution),
    ],
    ids=["parameters", "alias", "distribution", "bare block"],
)
def test_parts_of_a_job_are_recognised(data: dict[str, Any], kind: str, model: type, folder: Path) -> None:
    path = write(folder, json.dumps(data), "part.json")
    loaded = load(path)
    assert isinstance(loaded, Loaded)
    assert (loaded.kind, type(loaded.config)) == (kind, model)
    with pytest.raises(ConfigError, match="not a job file"):
        load_job(path)


def test_parts_can_be_changed_with_set_and_have_notices(folder: Path) -> None:
    path = write(folder, "partitions: 2\nuse_times: 3\n", "smp.yaml")
    loaded = load(path, [("--set", "microbatches=4")])
    assert [notice.place.replace(f"{folder}/", "") for notice in loaded.notices] == ["smp.yaml:2"]
    assert loaded.origins[("pipeline_parallel_degree",)] == f"{path}:1"
    assert loaded.origins[("microbatches",)] == "--set microbatches"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- a", "must be a mapping of settings, got a list"),
        ("x", "got `x`"),
        ("entry_point: other.py", "job.yaml:1: entry_point: no such file: `"),
        ("entry_point: train.py\nsource_dir: src", "job.yaml:2: source_dir: no such folder"),
        ("entry_point: train.py\ndependencies: [s3://bucket/lib, lib]", "job.yaml:2: dependencies[1]: no such file"),
        ("entry_point: trian.py", "hint: did you mean `train.py`?"),
        ("entry_point: train.py\nsource_dir: sourcse", "hint: did you mean `sources`?"),
        ("entry_point: xyz.py", "hint: it is relative to the folder of the job file, or to `source_dir`"),
    ],
    ids=lambda text: text[-30:].replace("\n", " "),
)
def test_what_is_no_job_or_names_no_source_is_refused(text: str, message: str, folder: Path) -> None:
    (folder / "sources").mkdir()
    (problem,) = problems(write(folder, text))
    assert message in problem


def test_sources_in_s3_are_not_looked_for(folder: Path) -> None:
    load_job(write(folder, "entry_point: other.py\nsource_dir: s3://bucket/src"))


def test_a_job_file_whose_name_is_nearly_right_is_suggested(folder: Path) -> None:
    (problem,) = problems(folder / "jobs.yaml")
    assert "hint: did you mean `job.yaml`?" in problem


NAMES = (*JobConfig.keys(), *ModelParallelConfig.keys(), *PARAMETERS.split(".")[1:], "mpi", "enabled")


def survives(path: Path, *overrides: str) -> None:
    with suppress(ConfigError):
        load(path, [("--set", each) for each in overrides])


@patient
@given(st.one_of(st.binary(), st.text("{}[]:,-*&!#|>'\"%@`<\n\t x1")))
def test_no_bytes_make_anything_but_a_config_error(tmp_path_factory: pytest.TempPathFactory, data: bytes | str) -> None:
    folder = tmp_path_factory.getbasetemp()
    for name in ("x.yaml", "x.json"):
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        survives(folder / name)


@patient
@given(st.dictionaries(st.sampled_from(NAMES), anything(*NAMES)))
def test_no_document_makes_anything_but_a_config_error(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "x.yaml"
    path.write_bytes(yaml.dump(data, allow_unicode=True).encode("utf-8", "surrogatepass"))
    survives(path)


@patient
@given(st.lists(st.one_of(st.text(), st.builds("{}={}".format, st.sampled_from(NAMES), st.text())), max_size=3))
def test_no_override_makes_another_error(tmp_path_factory: pytest.TempPathFactory, overrides: list[str]) -> None:
    (tmp_path_factory.getbasetemp() / "train.py").touch()
    survives(write(tmp_path_factory.getbasetemp(), JOB), *overrides)


@pytest.mark.parametrize("block", ["{smdistributed: {modelparallel: %s}}", "%s"], ids=["full", "bare"])
def test_a_degree_beside_parameters_is_sent_there(folder: Path, block: str) -> None:
    distribution = block % "{enabled: true, parameters: {}, pipeline_parallel_degree: 2}"
    (problem,) = problems(write(folder, f"entry_point: train.py\ndistribution: {distribution}"))
    assert "pipeline_parallel_degree: belongs to `parameters`" in problem
    assert problem.endswith("hint: write `parameters: {pipeline_parallel_degree: ...}`")


def test_a_required_name_that_is_misspelt_is_one_problem(folder: Path) -> None:
    (problem,) = problems(write(folder, "entrypoint: train.py"))
    assert "entrypoint: unknown field" in problem
    assert problem.endswith("hint: did you mean `entry_point`?")
    (problem,) = problems(write(folder, "entry_point: train.py\ndistribution: {mpi: {enable: true}}"))
    assert "distribution.mpi.enable: unknown field" in problem


def test_several_problems_on_one_line_are_marked(folder: Path) -> None:
    text = "entry_point: train.py\ncompute: {instance_count: two, spot: 3}"
    first, second = problems(write(folder, text))
    assert first.startswith("job.yaml:2:11: compute.instance_count")
    assert second.startswith("job.yaml:2:32: compute.spot")
    assert [text.splitlines()[2] for text in (first, second)] == [f"      | {' ' * 10}^", f"      | {' ' * 31}^"]


def test_a_missing_script_is_reported_beside_every_other_problem(tmp_path: Path) -> None:
    first, second = problems(write(tmp_path, "entry_point: trian.py\ncompute:\n  instance_cuont: 2\n"))
    assert first.startswith("job.yaml:1: entry_point: no such file")
    assert second.startswith("job.yaml:3: compute.instance_cuont: unknown field")
