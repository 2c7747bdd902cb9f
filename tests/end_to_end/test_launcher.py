"""The launcher with real ranks, real mpirun: what it shows, returns and leaves when ranks fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.launcher_job import LAUNCHERS, Job

MakeJob = Callable[..., Job]

RANK = "import os, sys, time\nrank = int(os.environ['RANK'])\n"
READY = "open(f'ready-{rank}', 'w').close()\n"
GLOO = RANK + "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"


@pytest.fixture(params=LAUNCHERS)
def make_job(request: pytest.FixtureRequest, tmp_path: Path) -> MakeJob:
    """Make a job for each of the launchers."""
    return partial(Job, tmp_path / "base", request.param)


@pytest.fixture(params=["mpirun", pytest.param("torchrun", marks=pytest.mark.slow)])
def make_any_job(request: pytest.FixtureRequest, tmp_path: Path) -> MakeJob:
    """Make a job for one of the launchers, for what is the same code for both."""
    return partial(Job, tmp_path / "base", request.param)


@pytest.fixture
def make_mpi_job(tmp_path: Path) -> MakeJob:
    """Make a job for mpirun, which starts fast; for what has nothing to do with the launcher."""
    return partial(Job, tmp_path / "base", "mpirun")


# ---- success -------------------------------------------------------------------------------------------------------


def test_output_is_whole_lines_with_the_rank_before_them(make_job: MakeJob) -> None:
    job = make_job(
        RANK
        + """
print("before", end=" ")
print("after")
print("to stderr", file=sys.stderr)
print(os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], os.environ["SM_HP_LR"], sys.argv[1:])
""",
        hyperparameters={"lr": 0.1},
        arguments=("--extra", "--", "-x"),
    )
    done = job.run()
    assert (done.code, done.failure) == (0, "")
    for rank in range(2):
        arguments = ["--lr", "0.1", "--extra", "--", "-x"]
        assert done.lines(rank) == ["before after", f"2 {rank} 0.1 {arguments}"]
        assert f"[rank {rank}] to stderr" in done.err.splitlines()


def test_script_runs_as_python_would_run_it(make_job: MakeJob) -> None:
    """Main module, path, pickling, worker processes, exit handlers: all as with `python train.py`."""
    job = make_job(
        """
import atexit, multiprocessing, os, pickle, sys
from helper import value

class Thing:
    pass

def work(number):
    return number + 1

if __name__ == "__main__":
    import __main__
    assert __main__.Thing is Thing and __main__.__file__ == __file__ and __spec__ is None, __spec__
    assert os.path.isabs(__file__) and sys.argv[0] == "train.py"
    assert sys.path[0] == os.path.dirname(os.path.realpath(__file__)), sys.path
    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
    assert not {"SMPKIT_LAUNCHER", "SMPKIT_RANK_LINK"} & set(os.environ)
    assert sys.stdin.read() == ""
    atexit.register(print, "exit handler ran")
    if os.environ["RANK"] == "0":
        for method in ("spawn", "fork"):
            process = multiprocessing.get_context(method).Process(target=print, args=(method, work(value)))
            process.start()
            process.join()
"""
    )
    (job.base / "code" / "helper.py").write_text("value = 41\n")
    (job.base / "code" / "json.py").write_text("raise ImportError('a file of the user stands in the way')\n")
    done = job.run()
    assert done.code == 0, done.err
    assert done.lines(0) == ["spawn 42", "fork 42", "exit handler ran"]


@pytest.mark.slow
def test_ranks_of_a_local_job_meet_and_listen_at_the_loopback_address_alone(make_job: MakeJob) -> None:
    """Without a port race or a host name."""
    meets = "import smpkit.torch as smp\nsmp.init({'ddp': True})\nprint(sum(smp.allgather(1 + rank)))\n"
    ends = "while not os.path.exists('end'): time.sleep(0.05)\n"
    job = make_job(RANK + meets + READY + ends)
    with job.running() as process:
        listening = job.listening()
        (job.base / "code" / "end").touch()
        done = job.finish(process)
    assert done.code == 0, done.err
    assert done.lines(0) == done.lines(1) == ["3"]
    # Open MPI's own daemon listens everywhere, and no option of it says otherwise.
    ours = {address: command for address, command in listening.items() if "prterun" not in command.split()[0]}
    assert len(ours) > 1
    assert [command for address, command in ours.items() if not address.startswith("0100007F:")] == []


TAKEN = [*"log local master node rdzv nproc start run max h np x host : *".split(), "a b"]  # noqa: SIM905
"""Options of torchrun or mpirun, or beginnings of some."""
AWKWARD = {
    **dict.fromkeys(TAKEN, "1"),
    "colon": ":",
    "option": "--nproc",
    "empty": "",
    "long": "x" * 20_000,
    "apostrophe": "it's",
    "quotes": 'say "hi"',
    "lines": "a\nb",
    "unicode": "größe 名",
    "dollar": "$HOME `id` ; ls * \\",
    "blank": "a b  c",
    "nested": {"a": [1, {"b": None}]},
    "mp_parameters": {"ddp": True, "microbatches": 4},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_awkward_hyperparameters_and_folders_arrive_unchanged(tmp_path: Path, launcher: str) -> None:
    source = """
import json, os, sys
if os.environ["RANK"] == "0":
    names = ("SM_HP_APOSTROPHE", "SM_HP_LINES", "SM_HP_MP_PARAMETERS", "SM_HPS")
    json.dump([sys.argv[1:], {name: os.environ[name] for name in names}, os.getcwd()], open("seen.json", "w"))
"""
    folder = tmp_path / "a b's ; $x"
    folder.mkdir()
    job = Job(folder, launcher, source, hyperparameters=AWKWARD)
    done = job.run()
    assert done.code == 0, done.err
    arguments, variables, cwd = json.loads((folder / "code" / "seen.json").read_text())
    pairs = dict(zip(arguments[::2], arguments[1::2], strict=True))
    texts = {name: value for name, value in AWKWARD.items() if isinstance(value, str)}
    expected = {f"-{name}" if len(name) == 1 else f"--{name}": value for name, value in texts.items()}
    assert pairs == expected | {"--nested": '{"a": [1, {"b": null}]}'}
    assert variables["SM_HP_LINES"] == "a\nb"
    assert variables["SM_HP_MP_PARAMETERS"] == '{"ddp":true,"microbatches":4}'
    assert json.loads(variables["SM_HPS"]) == AWKWARD
    assert cwd == str(folder / "code")


def test_huge_lines_and_binary_garbage_pass(make_mpi_job: MakeJob) -> None:
    job = make_mpi_job(
        RANK
        + r"""
print("x" * 1_000_000)
sys.stdout.buffer.write(b"\xff\xfe\x00 garbage\n" + bytes(range(256)) + b"\n")
sys.stdout.write("no end of line")
""",
        ranks=1,
    )
    done = job.run()
    assert done.code == 0, done.err
    assert "[rank 0] " + "x" * 1_000_000 + "\n" in done.out
    assert "garbage" in done.out
    assert done.out.endswith("[rank 0] no end of line\n")


# ---- failure -------------------------------------------------------------------------------------------------------


FAILURES = {
    "raises": ("raise ValueError('boo')", 1, "ValueError: boo"),
    "exits": ("sys.exit(3)", 3, "the script exited with code 3"),
    "exits_with_words": ("sys.exit('no data')", 1, "the script exited with code 1: no data"),
    "argparse": ("import argparse; argparse.ArgumentParser().parse_args(['--no'])", 2, "the script exited with code 2"),
    "leaves_at_once": ("print('last words', flush=True); os._exit(7)", 7, "the script exited with code 7"),
    "killed": (
        "os.kill(os.getpid(), 9)",
        137,
        "the process was killed by SIGKILL (the machine may be out of memory; its process took up to 0.0 GiB)",
    ),
    "crashes": (
        "import ctypes; ctypes.string_at(0)",
        139,
        "the process was killed by SIGSEGV (a crash in compiled code)",
    ),
    "import_error": ("import no_such_module", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
}


@pytest.mark.parametrize(
    ("launcher_name", "kind"),
    [
        *(("mpirun", kind) for kind in FAILURES),
        ("torchrun", "raises"),
        pytest.param("torchrun", "killed", marks=pytest.mark.slow),
    ],
)
def test_first_failing_rank_wins(tmp_path: Path, launcher_name: str, kind: str) -> None:
    """Rank 1 fails at once; rank 0 would run for long. The run ends in seconds, with rank 1's story and exit code."""
    body, code, headline = FAILURES[kind]
    source = RANK + f"if rank == 0:\n    time.sleep(600)\nelse:\n    {body}\n"
    done = Job(tmp_path / "base", launcher_name, source).run()
    assert done.code == code, done.err
    assert f"{done.failure}\n".startswith(f"{headline}\nrank 1 on algo-1, exit {code}\n")
    assert done.err.count(headline) == 1 if kind != "exits_with_words" else 2
    assert f"(rank 1, exit {code})" in done.err
    assert "rank 0 stopped because of it" in done.err
    assert done.err.count("Traceback") == (1 if kind in ("raises", "import_error") else 0)
    assert "smpkit_container" not in done.err
    assert "argparse.py" not in done.err
    assert done.seconds < 300


def test_where_it_happened_is_told_innermost_first(make_mpi_job: MakeJob) -> None:
    done = make_mpi_job("def inner():\n    raise KeyError('x')\ndef outer():\n    inner()\nouter()\n", ranks=1).run()
    assert done.failure == (
        "KeyError: 'x'\nrank 0 on algo-1, exit 1\n"
        '  File "train.py", line 2, in inner\n'
        '  File "train.py", line 4, in outer\n'
        '  File "train.py", line 5, in <module>'
    )


def test_syntax_error_in_the_script_names_its_line(make_mpi_job: MakeJob) -> None:
    done = make_mpi_job("x = 1\nif x\n    pass\n").run()
    assert done.code == 1
    assert done.failure.startswith('File "') and "line 2" in done.failure and "SyntaxError" in done.failure  # noqa: PT018
    assert done.err.count("SyntaxError") == 1


def test_lost_connections_are_consequences(make_any_job: MakeJob) -> None:
    """Rank 1 is killed; rank 0, waiting for it in a collective, gets an exception, which is not the story."""
    source = GLOO + "if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()\n"
    done = make_any_job(source, environ={"SMPKIT_SETTLE_SECONDS": "60"}).run()
    assert done.code == 137, done.err
    assert "(rank 1, exit 137)" in done.err
    assert "rank 0 stopped because of it" in done.err
    assert "Traceback" not in done.err


def test_rank_that_left_early_is_named(make_any_job: MakeJob) -> None:
    """A rank that ends with 0 makes the others fail; their error says nothing about it, so we do."""
    source = GLOO + "if rank == 1: sys.exit()\ndist.barrier()\n"
    done = make_any_job(source, environ={"SMPKIT_SETTLE_SECONDS": "60"}).run()
    assert done.code == 1, done.err
    assert "(rank 0, exit 1)" in done.err
    assert "rank 1 ended with exit code 0 while others still waited for it" in done.err
    assert "rank 1 ended with exit code 0 while others still waited for it" in done.failure


def test_rank_that_hangs_is_named_with_the_place(make_any_job: MakeJob) -> None:
    """The others' collective times out at the configured deadline; the hung rank is asked where it is."""
    # All ranks are there, however late they came; from here on nobody waits longer than two seconds.
    hang = """
import datetime
group = dist.new_group(); dist.barrier()
group.set_timeout(datetime.timedelta(seconds=2))
def forgotten():
    time.sleep(600)
if rank == 1: forgotten()
dist.barrier(group)
"""
    done = make_any_job(GLOO + hang).run()
    assert done.code == 1, done.err
    assert "(rank 0, exit 1)" in done.err
    assert 'rank 1 was still running, here:\n  File "train.py", line 10, in forgotten' in done.err
    assert done.seconds < 300  # far less than the sleep


def test_failed_rank_that_cannot_end_does_not_hold_up_the_run(make_mpi_job: MakeJob) -> None:
    """A thread keeps the process alive after the exception; the launcher counts from the exception."""
    source = "import threading\nthreading.Thread(target=time.sleep, args=(600,)).start()\nraise ValueError('boo')\n"
    done = make_mpi_job(RANK + source, ranks=1).run()
    assert done.code == 1
    assert done.failure.startswith("ValueError: boo")
    assert done.seconds < 300


def test_what_ranks_started_ends_with_them(make_mpi_job: MakeJob) -> None:
    source = RANK + "import subprocess\nsubprocess.Popen(['sleep', '600'])\nif rank: raise ValueError('boo')\n"
    assert make_mpi_job(source).run().code == 1  # `run` checks that nothing is left


UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc"]
ORPHANS = """
import pathlib, subprocess
if rank == 0:
    for _ in range(3): subprocess.run(["sh", "-c", "sleep 0.2 &"])
    time.sleep(1)
    states = [path.read_text().rpartition(")")[2].split()[0] for path in pathlib.Path("/proc").glob("[0-9]*/stat")]
    print(os.getppid(), "Z" in states)
"""


def can_unshare() -> bool:
    return shutil.which("unshare") is not None and subprocess.run([*UNSHARE, "true"], check=False).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="needs the right to make a PID namespace")
def test_the_first_process_of_a_container_reaps_what_ranks_have_orphaned(tmp_path: Path) -> None:
    job = Job(tmp_path / "base", "mpirun", RANK + ORPHANS)
    command = [*UNSHARE, sys.executable, "-m", "smpkit_container", "train"]
    environ = {**os.environ, "SMPKIT_BASE_DIR": str(job.base)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stdout) == (0, "[rank 0] 1 False\n"), done.stderr


# ---- stopping ------------------------------------------------------------------------------------------------------


def test_stop_signal_gives_the_script_time_to_save(make_job: MakeJob) -> None:
    """mpirun would have killed it after a second."""
    saving = """
import signal
def save(*_):
    time.sleep(3)
    open(f"saved-{rank}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
"""
    job = make_job(RANK + saving + READY + "time.sleep(600)\n")
    done = job.stopped_by(signal.SIGTERM)
    assert (done.code, done.failure) == (0, ""), done.err
    job.wait_for_files("saved", timeout=0)
    assert 3 <= done.seconds < 300
    assert done.err.startswith("SIGTERM: asked 2 ranks to end, waiting at most 110 s")


def test_a_signal_for_scripts_does_not_end_the_launcher(make_mpi_job: MakeJob) -> None:
    """Slurm sends those of `--signal=USR1@90` to all processes of a job: the launcher took its ranks with it."""
    warn = "import signal\nfor each in (signal.SIGUSR1, signal.SIGUSR2): os.kill(os.getppid(), each)\n"
    done = make_mpi_job(RANK + warn + "time.sleep(0.5)\nprint('on')\n").run()
    assert (done.code, sorted(done.out.splitlines())) == (0, ["[rank 0] on", "[rank 1] on"]), done.err


def test_script_without_a_handler_is_told_to_have_one(make_mpi_job: MakeJob) -> None:
    done = make_mpi_job(RANK + READY + "time.sleep(600)\n").stopped_by(signal.SIGTERM)
    assert done.code == 143
    assert done.failure.startswith("stopped by SIGTERM: ended ranks 0, 1; the script did not handle SIGTERM")


def test_ranks_that_ignore_the_signal_are_killed_after_the_grace_period(make_any_job: MakeJob) -> None:
    source = RANK + "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(600)\n"
    done = make_any_job(source, environ={"SMPKIT_GRACE_SECONDS": "1.5"}).stopped_by(signal.SIGTERM)
    assert done.code == 137
    assert done.failure.startswith("stopped by SIGTERM: ranks 0, 1 did not end within 1.5 s and had to be killed")
    assert 1.5 <= done.seconds < 300


def test_killed_launcher_leaves_no_rank_behind(make_job: MakeJob) -> None:
    job = make_job(RANK + "import subprocess\nsubprocess.Popen(['sleep', '600'])\n" + READY + "time.sleep(600)\n")
    with job.running() as process:
        assert len(job.processes()) > 4
        process.kill()
        process.communicate(timeout=60)
    job.assert_nothing_left()


def test_killed_mpirun_ends_the_run(make_mpi_job: MakeJob) -> None:
    job = make_mpi_job(RANK + READY + "time.sleep(600)\n")
    with job.running() as process:
        [mpirun] = [pid for pid, command in job.processes().items() if "--host localhost:2" in command]
        os.kill(mpirun, signal.SIGKILL)
        done = job.finish(process)
    assert done.code == 137, done.err
    assert "mpirun was killed by SIGKILL, though no rank failed" in done.err
    assert done.seconds < 300


# ---- mpi options ---------------------------------------------------------------------------------------------------


OPTIONS = "sagemaker_mpi_custom_mpi_options"


@pytest.mark.parametrize(
    "options",
    [
        "--mca btl_vader_single_copy_mechanism none ",
        "-verbose --mca orte_base_help_aggregate 0",
        "-x FOO=1 --bind-to none",
        "--NCCL_DEBUG=INFO",
    ],
    ids=["the documented one", "of the SDK's examples", "same as ours", "AWS's own form"],
)
def test_custom_mpi_options_work(make_mpi_job: MakeJob, options: str) -> None:
    done = make_mpi_job("print('hello')", hyperparameters={OPTIONS: options}).run()
    assert done.code == 0, done.err
    assert done.lines(0) == done.lines(1) == ["hello"]


def test_a_variable_that_an_mpi_option_sets_goes_before_ours(make_mpi_job: MakeJob) -> None:
    options = "-x OMP_NUM_THREADS=7 -x NCCL_SOCKET_IFNAME=^docker0,lo -x EMPTY="
    shown = "print(*map(os.environ.get, ['OMP_NUM_THREADS', 'NCCL_SOCKET_IFNAME', 'EMPTY']), sep=';')"
    done = make_mpi_job(RANK + shown, hyperparameters={OPTIONS: options}).run()
    assert done.lines(0) == done.lines(1) == ["7;^docker0,lo;"], done.err


def test_contradicting_mpi_options_are_refused_before_the_start(make_mpi_job: MakeJob) -> None:
    contradiction = "--mca btl self --mca btl tcp -np 4"
    done = make_mpi_job("print('hello')", hyperparameters={OPTIONS: contradiction}).run()
    assert done.code == 2
    assert "`--mca btl self` and `--mca btl tcp` contradict each other" in done.err
    assert "`-np 4` is set by smpkit" in done.err
    assert done.out == ""


def test_what_mpirun_says_is_shown_when_it_cannot_start(make_mpi_job: MakeJob) -> None:
    done = make_mpi_job("print('hello')", hyperparameters={OPTIONS: "--no-such-option-of-mpirun"}).run()
    assert done.code != 0
    assert "mpirun could not start the ranks" in done.err
    assert "no-such-option-of-mpirun" in done.err
    assert "mpirun could not start" in done.failure


def test_a_shell_script_runs_once_without_a_launcher(tmp_path: Path) -> None:
    source = 'echo "$@ rank=[$RANK] hosts=$SM_HOSTS"\npython -c "import sys; sys.exit(7)"\n'
    values = {"lr": 0.1}
    job = Job(tmp_path / "base", "torchrun", source, ranks=4, script="train.sh", hyperparameters=values)
    done = job.run()
    assert done.out == '[rank 0] --lr 0.1 rank=[] hosts=["algo-1"]\n'
    assert done.code == 7
    assert done.failure.startswith("the script exited with code 7\nrank 0 on algo-1, exit 7\n")
