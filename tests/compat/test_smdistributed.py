"""The `smdistributed` package: its paths, who gets it, and who does not."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from smpkit.cli.main import cli
from smpkit.drop_in import DROP_IN_PATH, STARTUP_PATH, asks_for_it, installed_one, with_drop_in
from smpkit_container.console import Console
from smpkit_container.environment import Environment, Folders
from smpkit_container.launch import launch
from tests.compat.commands import run_compat, run_on_ranks


def test_every_import_path_of_the_original_is_there() -> None:
    run_on_ranks("paths.py", ranks=1, parameters={})


def test_nobody_finds_it_who_has_not_asked() -> None:
    assert importlib.util.find_spec("smdistributed") is None


# ---- the search path -------------------------------------------------------------------------------------------------


def test_the_drop_in_comes_last_and_once() -> None:
    environ = with_drop_in({"PYTHONPATH": "/a:/b", "HOME": "/h"})
    assert environ == {"PYTHONPATH": f"{STARTUP_PATH}:/a:/b:{DROP_IN_PATH}", "HOME": "/h"}
    assert with_drop_in(environ) == environ
    assert with_drop_in({}) == {"PYTHONPATH": f"{STARTUP_PATH}:{DROP_IN_PATH}"}
    assert "apex" not in sys.modules  # nothing is replaced in processes that have not been started so


def test_a_real_library_is_noticed_and_ours_is_none(tmp_path: Path) -> None:
    assert installed_one([str(tmp_path)]) is None
    assert installed_one([str(DROP_IN_PATH)]) is None
    other = tmp_path / "smdistributed" / "dataparallel"
    other.mkdir(parents=True)
    assert installed_one([str(tmp_path)]) is None  # the data-parallel product shares the name
    real = tmp_path / "smdistributed" / "modelparallel"
    real.mkdir()
    assert installed_one([str(DROP_IN_PATH), str(tmp_path)]) == real


# ---- who asks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "parameters", "asks"),
    [
        ("import smdistributed.modelparallel.torch as smp", {}, True),
        ("if True:\n    from smdistributed.modelparallel.torch.nn import FusedLayerNorm", {}, True),
        ("import importlib\nimportlib.util.find_spec('smdistributed')", {}, True),
        ("# this used smdistributed once", {}, False),
        ("import smpkit.torch as smp", {"partitions": 2}, False),
        ("from transformers import AutoModel, Trainer", {"partitions": 2}, True),
        ("from transformers import (\n    AutoModel,\n    TrainingArguments,\n)", {"partitions": 2}, True),
        ("import transformers\ntrainer = transformers.Seq2SeqTrainer()", {"partitions": 2}, True),
        ("from transformers import AutoModel, Trainer", {"pipeline_parallel_degree": 2}, False),
        ("from transformers import AutoModel  # no Trainer", {"partitions": 2}, False),
        ("from transformers import AutoModel\nclass Trainer: ...", {"partitions": 2}, False),
    ],
)
def test_a_script_that_asks_is_found(tmp_path: Path, source: str, parameters: dict[str, Any], asks: bool) -> None:
    (tmp_path / "helpers").mkdir()
    (tmp_path / "train.py").write_text("import helpers.model")
    (tmp_path / "helpers" / "model.py").write_text(source)
    assert (asks_for_it(tmp_path, parameters) is not None) is asks


def test_installed_and_hidden_folders_are_not_searched(tmp_path: Path) -> None:
    for folder in (".venv", "venv", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("import smdistributed")
    assert asks_for_it(tmp_path, {}) is None


def _launched(base: Path, script: str) -> tuple[int, str]:
    (base / "code").mkdir()
    (base / "code" / "train.py").write_text(script)
    err = io.BytesIO()
    framework = {"sagemaker_program": "train.py", "sagemaker_torch_distributed_enabled": True}
    environment = Environment(Folders(base), framework=framework)
    code = launch(environment, os.environ, Console(io.BytesIO(), err, terminal=False, colour=False))
    return code, err.getvalue().decode()


def test_the_launcher_gives_it_to_those_who_ask(tmp_path: Path) -> None:
    """With the stand-ins, as under `smpkit compat`."""
    script = "import smdistributed.modelparallel as m, apex_C; assert m.__version__ == '1.15.0' and apex_C.unflatten"
    code, said = _launched(tmp_path, script)
    assert code == 0, said
    assert "`train.py` asks for smdistributed: smpkit's is on PYTHONPATH" in said


def test_the_launcher_gives_it_to_nobody_else(tmp_path: Path) -> None:
    script = "from importlib.util import find_spec as f; assert f('smdi' + 'stributed') is None"
    code, said = _launched(tmp_path, script)
    assert code == 0, said
    assert "smdistributed" not in said


def test_the_launcher_leaves_a_real_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib" / "smdistributed" / "modelparallel").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "lib")])
    code, said = _launched(tmp_path, "import sys\nif 0:\n import smdistributed\nassert 'drop_in' not in str(sys.path)")
    assert code == 0, said
    assert "is installed, and used instead of smpkit's" in said


# ---- `smpkit compat` -------------------------------------------------------------------------------------------------


Executed = list[tuple[str, list[str], dict[str, str]]]
"""Programs, with their arguments and environment, that would have taken this process's place."""


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Executed:
    calls: Executed = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    return calls


def test_the_command_is_run_with_the_path_and_the_parameters(executed: Executed, tmp_path: Path) -> None:
    parameters = tmp_path / "smp.json"
    # A rule wants `ddp`, too, which the script may give to `smp.init`.
    parameters.write_text('{"partitions": 2, "tensor_parallel_degree": 2}')
    given = ["compat", "--parameters", str(parameters), "--", sys.executable, "train.py", "--epochs", "3"]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 0, done.output
    ((program, command, environ),) = executed
    assert (program, command) == (sys.executable, [sys.executable, "train.py", "--epochs", "3"])
    assert environ["PYTHONPATH"].split(os.pathsep)[-1] == str(DROP_IN_PATH)
    assert environ["SM_HP_MP_PARAMETERS"] == '{"partitions": 2, "tensor_parallel_degree": 2}'
    assert environ["SM_FRAMEWORK_PARAMS"] == '{"sagemaker_mpi_enabled": true}'  # Hugging Face asks for it


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--", "no-such-program"], 1, "`no-such-program` cannot be run"),
        (["--parameters", '{"partitions": 0}', "--", "true"], 2, "partitions: must be at least 1, got 0"),
        (["--parameters", "no.json", "--", "true"], 2, "`--parameters no.json` cannot be read"),
        (["--parameters", sys.executable, "--", "true"], 2, "cannot be read: it is not UTF-8 text"),
        ([], 2, "missing argument"),
    ],
)
def test_what_cannot_be_meant_is_said_before_anything_runs(
    executed: Executed, arguments: list[str], code: int, message: str
) -> None:
    done = CliRunner().invoke(cli, ["compat", *arguments])
    assert done.exit_code == code
    assert message in done.output
    assert executed == []


@pytest.mark.parametrize(("job", "local_ranks"), [({}, "1 2"), ({"PMIX_NAMESPACE": "prterun-1"}, "None None")])
def test_a_rank_of_torchrun_has_mpiruns_variables(job: dict[str, str], local_ranks: str) -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("LOCAL_RANK", "LOCAL_SIZE")]
    asking = f"import os; print('local', *map(os.environ.get, {names}))"
    assert f"local {local_ranks}" in run_compat(sys.executable, "-c", asking, env={**torchrun, **job})
