from __future__ import annotations

import json
import subprocess
import sys

import pytest

from smpkit.cli.main import COMMANDS, cli
from smpkit.config.schema import MODELS, json_schema
from smpkit.version import commit
from tests.cli.conftest import Smpkit, process

HELP = """\
Usage: smpkit [OPTIONS] COMMAND [ARGS]...

  Train PyTorch models that do not fit on one GPU.

Options:
  --version      Show the version and exit.
  -v, --verbose  Say more.
  -q, --quiet    Say nothing but errors.
  -h, --help     Show this message and exit.

Commands:
  init       Write a job file, and a script that trains where there is none.
  run        Run a job on this machine, with the launcher of the training
             image or in the image itself.
  plan       Show what a job would do: ranks, schedule, parts, memory.
  report     Write a run as one HTML file, or two side by side.
  doctor     Check this machine, the cloud or cluster, and everything the job
             file refers to.

More:
  validate   Check a job file and report every problem, with its line.
"""


def test_help_shows_five_commands_and_then_more(smpkit: Smpkit) -> None:
    result = smpkit("--help")
    assert " ".join(result.stdout.split()).startswith(" ".join(HELP.split()))  # folded as the terminal is wide
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_what_the_command_says(name: str) -> None:
    command = cli.get_command(cli.make_context("smpkit", ["schema"]), name)
    assert command is not None
    assert command.name == name
    assert (command.help or "").split("\n\n")[0].replace("\n", " ") == COMMANDS[name]


WRONG_USAGE = {
    "valdate": "no such command: `valdate`\nhint: did you mean `validate`?",
    "zebra": "no such command: `zebra`\nhint: `smpkit --help` shows the usage",
    "--verison": "no such option: `--verison`\nhint: did you mean `--version`?",
    "run -n 2 train.py": "no such option: `-n`\nhint: did you mean `--ranks`?",
    "run -m a.train": "no such option: `-m`\nhint: name a script that holds "
    "`import runpy; runpy.run_module('NAME', run_name='__main__')`",
    "run train.py --steps 3": "no such option: `--steps`\n"
    "hint: did you mean `--hosts`? `smpkit run SCRIPT -- --steps ...` gives it to the script",
    "run train.py --pp 2": "no such option: `--pp`\nhint: did you mean `-p pipeline_parallel_degree=...`?",
    "validate --jsn x": "no such option: `--jsn`\nhint: did you mean `--json`?",
    "plan-offload-model --params 7b": "invalid value for `--params`: `7b` is not a number from 1 to "
    "1,000,000,000,000,000\nhint: `smpkit plan-offload-model --help` shows the usage",
    "validate": "missing argument `FILE`\nhint: `smpkit validate --help` shows the usage",
    "\x1b[31m": "no such command: `\\x1b[31m`\nhint: `smpkit --help` shows the usage",
}


@pytest.mark.parametrize(("arguments", "error"), WRONG_USAGE.items(), ids=WRONG_USAGE)
def test_wrong_usage_is_one_sentence_and_a_hint(arguments: str, error: str, smpkit: Smpkit) -> None:
    result = smpkit(*arguments.split(), code=2)
    assert (result.stdout, result.stderr) == ("", f"error: {error}\n")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("submit job.yaml --dry-run --follow --wait", "`--follow` and `--wait` cannot be given beside `--dry-run`"),
        ("submit job.yaml --follow --wait", "`--wait` cannot be given beside `--follow`"),
        ("resume job --dry-run --wait", "`--wait` cannot be given beside `--dry-run`"),
        ("doctor --report job.yaml --write", "`FILE` and `--write` cannot be given beside `--report`"),
        ("doctor --write", "`--write` cannot be given without a job file"),
        ("report --json -o x.html --open", "`--output` and `--open` cannot be given beside `--json`"),
        ("runs some -n 3", "`--last` cannot be given beside the name of a run"),
        ("jobs --backend slurm --profile a --region b", "`--profile` and `--region` cannot be given for Slurm"),
        ("logs --backend slurm", "`--backend` cannot be given without the name of a job"),
        ("report --backend slurm", "`--backend` cannot be given without the name of a job\nhint: `smpkit jobs"),
    ],
)
def test_an_option_that_a_command_cannot_use_is_refused(arguments: str, error: str, smpkit: Smpkit) -> None:
    """It was taken without a word."""
    result = smpkit(*arguments.split(), code=2)
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {error}")


def test_version_is_that_of_the_package() -> None:
    import smpkit

    source = commit()
    expected = f"smpkit, version {smpkit.__version__}" + (f" (commit {source})" if source else "")
    assert process("--version").stdout == f"{expected}\n"


@pytest.mark.parametrize("kind", MODELS)
def test_the_schema_of_each_kind_is_printed(kind: str, smpkit: Smpkit) -> None:
    result = smpkit("schema", kind)
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == json_schema(kind)


SERVICES = ("torch", "boto3", "botocore")
HEAVY = (*SERVICES, "pydantic", "ruamel", "numpy")


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import smpkit", HEAVY),
        ("from smpkit.cli.main import cli; cli.main(['--help'], standalone_mode=False)", HEAVY),
        ("from smpkit.cli.main import cli; cli.main(['validate', '--help'], standalone_mode=False)", HEAVY),
        ("from smpkit.cli.main import cli; cli.main(['schema'], standalone_mode=False)", SERVICES),
    ],
    ids=["import smpkit", "smpkit --help", "smpkit validate --help", "smpkit schema"],
)
def test_starting_imports_nothing_heavy(statement: str, unwanted: tuple[str, ...]) -> None:
    script = f"import sys; {statement}; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
