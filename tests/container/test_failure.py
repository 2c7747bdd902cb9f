from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smpkit.observe.status import Levers, RankStatus
from smpkit.observe.summary import KindBytes
from smpkit_container.failure import Failure, explain, mpirun_failure, rank_failure, stop_failure
from smpkit_container.peers import News
from smpkit_container.root_cause import RankEnd, RankError, RootCause
from smpkit_container.supervise import Outcome, Timeouts
from smpkit_container.topology import Topology

CODE = Path("/job/code")
TOPOLOGY = Topology(("algo-1",), 0, 8, "torchrun")
TRACEBACK = """Traceback (most recent call last):
  File "/job/code/train.py", line 41, in build_model
    raise ValueError("hidden size 2050 is not divisible by tensor degree 4")
ValueError: hidden size 2050 is not divisible by tensor degree 4
"""
ERROR = RankError(
    name="ValueError",
    message="ValueError: hidden size 2050 is not divisible by tensor degree 4",
    traceback=TRACEBACK,
    frames=(
        ("/job/code/train.py", 90, "<module>"),
        ("/job/code/train.py", 41, "build_model"),
        ("/usr/lib/python3/site-packages/torch/nn.py", 7, "check"),
    ),
)


def outcome(*ends: RankEnd, missing: tuple[int, ...] = (), status: int = 0, **how: Any) -> Outcome:
    return Outcome(ends, missing, status, "", seconds=252.0, **how)


def failure_of(end: RankEnd, topology: Topology = TOPOLOGY, **others: Any) -> Failure:
    """What a job that this rank ended tells; `others` are the root cause's other ranks."""
    return rank_failure(RootCause(end, **others), outcome(), topology, CODE)


@pytest.mark.parametrize(("seconds", "who"), [(9.0, "on algo-2; algo-1 ended"), (11.0, "rank 5 on algo-1, exit 137")])
def test_news_that_come_after_a_rank_was_killed_are_not_the_cause(seconds: float, who: str) -> None:
    """On a busy machine the first host, whose ranks lost their connections to this rank, may say so first."""
    news = News("algo-2", "rank 9: ConnectionResetError: connection closed by peer", seconds=seconds)
    failure = explain(outcome(RankEnd(5, -signal.SIGKILL, 10.0)), TOPOLOGY, CODE, Timeouts(), news)
    assert failure is not None
    assert who in failure.reason


def test_screen_has_the_form_of_the_ux_rules() -> None:
    assert failure_of(RankEnd(5, 1, 1.0, ERROR), followers=(0, 1, 2, 7)).screen == (
        "Failed after 4 m 12 s (rank 5, exit 1)\n"
        "\n"
        "    Traceback (most recent call last):\n"
        '      File "/job/code/train.py", line 41, in build_model\n'
        '        raise ValueError("hidden size 2050 is not divisible by tensor degree 4")\n'
        "    ValueError: hidden size 2050 is not divisible by tensor degree 4\n"
        "\n"
        "ranks 0–2, 7 stopped because of it"
    )


def test_the_screen_names_the_host_of_a_job_that_has_several() -> None:
    """Of one host it does not, as the form above shows: a laptop was called `algo-1`."""
    two = replace(TOPOLOGY, hosts=("algo-1", "algo-2"))
    assert "(rank 5 on algo-1, exit 1)" in failure_of(RankEnd(5, 1, 1.0, ERROR), two).screen


@pytest.mark.parametrize(("text", "helps"), [("data/x.txt", True), ("{code}/data/x.txt", True), ("data/y.txt", False)])
def test_a_path_from_where_the_launcher_was_started_is_explained(
    text: str, helps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`smpkit run pkg/train.py` works in `pkg`, where `python pkg/train.py` does not."""
    monkeypatch.chdir(tmp_path)
    for folder in ("data", "pkg"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data" / "x.txt").touch()
    message = f"FileNotFoundError: [Errno 2] No such file or directory: '{text.format(code=tmp_path / 'pkg')}'"
    error = RankError("FileNotFoundError", message, message, exit_code=1)
    screen = rank_failure(RootCause(RankEnd(0, 1, 1.0, error)), outcome(), TOPOLOGY, tmp_path / "pkg").screen
    hint = f"hint: the script works in its own folder, {tmp_path}/pkg: name `{tmp_path}/data/x.txt`"
    assert (hint in screen) == helps


def test_memory_that_runs_out_between_steps_runs_out_in_none() -> None:
    """It had been in `backward of microbatch 3`, the last action of the step before."""
    doing = RankStatus(9, held=KindBytes(weights=2**20), has_ended=True)
    screen = failure_of(RankEnd(5, -9, 1.0, doing=doing)).screen
    assert "\ntensors held 1.0 MiB: weights 1.0 MiB\nwas in no step: step 9 had ended" in screen


OF_A_GPU = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"
OF_THE_HOST = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.parametrize(
    ("text", "has_ended", "helps"),
    [
        (f"{OF_A_GPU} 32.00 MiB. GPU 0 has", False, True),
        (f"{OF_A_GPU} 32.00 MiB. GPU 0 has", True, False),
        (f"{OF_A_GPU} 32.00 GiB. GPU 0 has", False, False),
        (f"{OF_THE_HOST} 4503 bytes.", False, True),
        (f"{OF_THE_HOST} 4503599627370496 bytes.", False, False),
        ("MemoryError", False, True),
    ],
    ids=["little", "between steps", "much", "little of the host", "much of the host", "unknown"],
)
def test_a_setting_is_named_only_if_it_saves_what_was_asked_for(text: str, has_ended: bool, helps: bool) -> None:
    """Of 4 PB between steps, `smp.set_activation_checkpointing(layers)` was said to save most: up to 131.0 KiB."""
    levers = Levers(1, {"checkpointing": "smp.set_activation_checkpointing(layers)"})
    doing = RankStatus(3, held=KindBytes(activations=2**30), levers=levers, has_ended=has_ended)
    error = RankError(text.partition(":")[0], text, text, exit_code=1)
    screen = failure_of(RankEnd(0, 1, 1.0, error, doing=doing)).screen
    assert ("hint: `smp.set_activation_checkpointing(layers)` saves most: up to 1.0 GiB" in screen) == helps
    assert ("hint: use more microbatches" in screen) != helps


def test_failure_file_has_the_exception_first_and_the_users_frames_before_libraries() -> None:
    assert failure_of(RankEnd(5, 1, 1.0, ERROR)).reason == (
        "ValueError: hidden size 2050 is not divisible by tensor degree 4\n"
        "rank 5 on algo-1, exit 1\n"
        '  File "train.py", line 41, in build_model\n'
        '  File "train.py", line 90, in <module>\n'
        '  File "/usr/lib/python3/site-packages/torch/nn.py", line 7, in check'
    )


@pytest.mark.parametrize("character", ["x", "ß", "名", "😀"])
def test_failure_file_has_at_most_1024_characters_and_still_the_rank(character: str) -> None:
    long = RankError("ValueError", f"ValueError: {character * 3000}", "", frames=[*ERROR.frames] * 30)
    reason = failure_of(RankEnd(5, 1, 1.0, long)).reason
    assert len(reason) == 1024
    assert "\nrank 5 on algo-1, exit 1\n" in reason
    assert "line 41" in reason
    reason.encode("utf-8")


def test_failure_file_controls_no_terminal() -> None:
    text = "ValueError: \x1b[31mred\x1b[0m \x1b]0;title\x07"
    reason = failure_of(RankEnd(5, 1, 1.0, replace(ERROR, message=text, traceback=text))).reason
    assert reason.startswith("ValueError: red \\x1b]0;title\\x07\nrank 5 on algo-1, exit 1\n")


def test_hint_is_shown_once_in_both_forms() -> None:
    hinted = RankError("smpkit.errors.UsageError", "x: y\nhint: z", "smpkit.errors.UsageError: y\nhint: z\n", hint="z")
    failure = failure_of(RankEnd(0, 1, 1.0, hinted))
    assert failure.screen.count("hint: z") == 1
    assert "hint: z" in failure.reason


def test_last_lines_stand_in_for_a_missing_exception() -> None:
    failure = failure_of(RankEnd(2, 7, 1.0, last_lines=("a", "b")))
    assert failure.reason == "the script exited with code 7\nrank 2 on algo-1, exit 7\n  | b\n  | a"
    assert "its last lines:\n      a\n      b" in failure.screen


def test_killed_rank_may_be_out_of_memory() -> None:
    failure = failure_of(RankEnd(2, -9, 1.0))
    assert failure.exit_code == 137
    assert failure.reason.startswith("the process was killed by SIGKILL (the machine may be out of memory)")
    assert "hint: use more microbatches, checkpoint or offload activations" in failure.screen
    measured = failure_of(RankEnd(2, -9, 1.0, peak_bytes=3 << 30))
    assert "SIGKILL (the machine may be out of memory; its process took up to 3.0 GiB)" in measured.screen


@pytest.mark.parametrize(
    ("name", "text", "last_lines", "hint"),
    [
        ("SystemExit", "SystemExit: 2", ("train.py: error: unrecognized arguments: --steps 3",), "remove `steps` from"),
        ("SystemExit", "SystemExit: 2", ("Error: No such option: --steps",), "let the script take `--steps`"),
        ("SystemExit", "SystemExit: 2", ("error: the following arguments are required: --num-steps",), "{num_steps: "),
        ("AssertionError", "AssertionError: Torch not compiled with CUDA enabled", (), 'leave `.to("cuda")` out'),
        ("RuntimeError", "RuntimeError: Found no NVIDIA driver on your system.", (), 'leave `.to("cuda")` out'),
        ("torch.OutOfMemoryError", "torch.OutOfMemoryError: CUDA out of memory.", (), "use more microbatches"),
    ],
)
def test_errors_without_a_remedy_get_a_hint(name: str, text: str, last_lines: tuple[str, ...], hint: str) -> None:
    code = 2 if name == "SystemExit" else 1
    error = RankError(name, text, f"{text}\n", exit_code=code)
    assert hint in failure_of(RankEnd(0, code, 1.0, error, last_lines=last_lines)).screen.partition("\nhint: ")[2]


def test_an_error_without_a_known_remedy_gets_no_hint() -> None:
    assert "hint" not in failure_of(RankEnd(0, 1, 1.0, ERROR)).screen
    plain = RankError("SystemExit", "SystemExit: 2", "", exit_code=2)
    assert "hint" not in failure_of(RankEnd(0, 2, 1.0, plain)).screen


def test_a_rank_that_is_waited_for_shows_the_scripts_lines_below_those_of_libraries() -> None:
    libraries = "".join(f'  File "/usr/lib/python3.11/x.py", line {line} in inner\n' for line in range(9))
    stack = f'{libraries}  File "/job/code/train.py", line 7 in forgotten\n  File "<frozen runpy>", line 88 in _run\n'
    end, running = RankEnd(0, 1, 1.0, ERROR), RankEnd(2, -15, 9.0, stopped=True, stack=stack)
    said = failure_of(end, still_running=(running, RankEnd(3, -15, 9.0))).screen
    assert 'rank 2 was still running, here:\n  File "train.py", line 7, in forgotten\nrank 3 was still running' in said
    assert "inner" not in said
    alone = failure_of(end, still_running=(replace(running, stack=libraries),))
    assert alone.screen.count("in inner") == 4


@pytest.mark.parametrize(
    ("late", "reason"),
    [(False, "did not start; mpirun was killed by SIGTERM"), (True, "did not start within 900 s of starting mpirun")],
)
def test_ranks_that_never_started_are_named(late: bool, reason: str) -> None:
    finished = outcome(RankEnd(0, -15, 1.0, stopped=True), missing=(1, 2), status=-15)
    failure = mpirun_failure(replace(finished, late=late), 900)
    assert (failure.reason, failure.exit_code) == (f"ranks 1, 2 {reason}", 143)


@pytest.mark.parametrize(
    ("finished", "text", "code"),
    [
        (outcome(RankEnd(0, -15, 1.0), stop_signal=signal.SIGTERM), "the script did not handle SIGTERM", 143),
        (outcome(RankEnd(0, -9, 1.0), stop_signal=signal.SIGTERM, overdue=True), "within 110 s and had to be", 137),
        (outcome(RankEnd(0, 4, 1.0), stop_signal=signal.SIGTERM), "rank 0 did not end with exit code 0", 4),
        (outcome(missing=(0,), stop_signal=signal.SIGTERM), "the ranks had not all started", 143),
        (outcome(RankEnd(0, 4, 1.0), stop_signal=signal.SIGINT), "stopped by SIGINT", 130),
        (outcome(RankEnd(0, -9, 1.0), stop_signal=signal.SIGINT), "SIGKILL ended rank 0 before the script did", 130),
    ],
    ids=["no handler", "overdue", "exit code", "starting", "ctrl-c", "ctrl-c twice"],
)
def test_stops_that_were_not_clean(finished: Outcome, text: str, code: int) -> None:
    failure = stop_failure(finished, TOPOLOGY, 110, Path("nowhere"))
    assert text in failure.reason
    assert failure.exit_code == code
