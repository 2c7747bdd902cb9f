"""Tell why a run failed: in full for the screen, in 1,024 characters for the platform."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from smpkit.config.words import duration, plain
from smpkit.observe.status import RankStatus
from smpkit.observe.summary import KindBytes
from smpkit.units import amount
from smpkit_container.peers import News
from smpkit_container.root_cause import RankEnd, RootCause, find_root_cause, signal_name
from smpkit_container.supervise import Outcome, Timeouts
from smpkit_container.topology import Topology

_MAX_REASON_CHARACTERS = 1024
"""SageMaker returns this much of `/opt/ml/output/failure` as FailureReason, so the news must come first."""
_MAX_MESSAGE_CHARACTERS = 600
_MAX_NAME_CHARACTERS = 256
_STACK_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_OUR_FOLDER = str(Path(__file__).parent)

_MEMORY_HINT = (
    "use more microbatches, checkpoint or offload activations, or raise a degree; `smpkit plan --model` shows what a"
    " rank needs"
)
_NO_GPU_HINT = (
    'torch has no GPU here: leave `.to("cuda")` out, as `smp.DistributedModel` moves the model and the step its inputs'
    " to the rank's device, or write `.to(smp.state.device)`"
)
_NO_GPU = re.compile(r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available")
_QUOTED = re.compile(r"'([^'\n]+)'")
_OUT_OF_MEMORY = re.compile(r"(?:^|\.)OutOfMemoryError$|^MemoryError$|DefaultCPUAllocator: can't allocate memory")
_ASKED_FOR = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNKNOWN_ARGUMENT = re.compile(r"(?:unrecognized arguments|[Nn]o such option):? (--?[\w-]+)")
_MISSING_ARGUMENT = re.compile(r"error: the following arguments are required: (--?[\w-]+)")


@dataclass(frozen=True)
class Failure:
    """What went wrong, in both forms, and the exit code of the launcher."""

    exit_code: int
    reason: str
    """For the failure file; the exception first, then who, then where."""
    screen: str
    """For stderr; with the whole traceback."""


def explain(
    outcome: Outcome,
    topology: Topology,
    code: Path,
    timeouts: Timeouts,
    news: News | None = None,
    checkpoints: Path = Path(),
    lost_code: int = 1,
) -> Failure | None:
    """Return why a run failed; None if every rank ended with 0, whatever the exit code of mpirun.

    Args:
        code: the script's folder; frames in it are the user's.
        checkpoints: the folder in which `smp.save_checkpoint` keeps the name of the newest one.
        lost_code: the exit code if another host was lost.
    """
    cut_short = news is not None and any(end.stopped for end in outcome.ends)  # though they may have ended with 0
    if outcome.clean and not cut_short:
        return None
    cause = find_root_cause(outcome.ends)
    if news is not None and (cause is None or not cause.is_older_than(news.seconds)):
        return peer_failure(news, outcome, topology, lost_code)
    if outcome.stop_signal and (cause is None or cause.culprit.error is None):
        return stop_failure(outcome, topology, timeouts.grace, checkpoints)
    if cause is None:
        return mpirun_failure(outcome, timeouts.start)
    return rank_failure(cause, outcome, topology, code)


def stop_words(outcome: Outcome, checkpoints: Path) -> str:
    """Say that a run was stopped, and with which checkpoint if it saved one."""
    newest, saved = checkpoints / "newest", ""
    try:
        if newest.stat().st_mtime >= time.time() - outcome.seconds:  # else it is of an earlier run
            with newest.open(encoding="utf-8", errors="replace") as file:
                name = file.read(_MAX_NAME_CHARACTERS).strip().removesuffix("_partial")
            saved = f" with checkpoint `{plain(name)}`"
    except OSError:
        pass
    return f"Stopped after {duration(outcome.seconds)}{saved}"


def write_failure(path: Path, reason: str) -> None:
    """Leave the reason where the platform looks for it, unless the script has left its own."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(_fitted([reason]), encoding="utf-8", errors="replace")
    except OSError as error:  # such as of a full disk: the job has its own end
        sys.stderr.write(f"the failure file could not be written: {error}\n")


# ---- the four stories ----------------------------------------------------------------------------------------------


def rank_failure(cause: RootCause, outcome: Outcome, topology: Topology, code: Path) -> Failure:
    """Describe a run that ended because a rank failed."""
    end = cause.culprit
    story = _story(end)
    notes = [*_notes(cause, code), *_memory_lines(end)]
    hints = [f"hint: {hint}" for hint in (_hint_of(end, code),) if hint]
    where = _frame_lines(end, code) or [f"  | {line}" for line in reversed(end.last_lines)]
    place = f"rank {end.rank} on {topology.host}, exit {end.exit_code}"
    # A machine alone is called `algo-1` for scripts that ask; who reads the screen sits before it.
    shown = f"rank {end.rank}, exit {end.exit_code}" if topology.single_host else place
    reason = [_cut(plain(end.headline), _MAX_MESSAGE_CHARACTERS), place, *hints, *notes, *where]
    screen = [
        f"Failed after {duration(outcome.seconds)} ({shown})",
        "",
        *(f"    {line}" for line in story),
        "",
        *notes,
        *([f"{_ranks(cause.followers)} stopped because of it"] if cause.followers else []),
        *(line for line in hints if line not in story),  # Python has printed that of smpkit's own errors
    ]
    return Failure(end.exit_code, _fitted(reason), "\n".join(screen).rstrip())


def mpirun_failure(outcome: Outcome, start_seconds: float) -> Failure:
    """Describe a run in which no rank failed, but mpirun did, or ranks never started."""
    status = outcome.mpirun_status
    ended = f"ended with exit code {status}" if status >= 0 else f"was killed by {signal_name(-status)}"
    if outcome.late:
        headline = f"{_ranks(outcome.missing)} did not start within {start_seconds:g} s of starting mpirun"
    elif outcome.missing and outcome.ends:
        headline = f"{_ranks(outcome.missing)} did not start; mpirun {ended}"
    elif outcome.missing:
        headline = f"mpirun could not start the ranks; it {ended}"
    else:
        headline = f"mpirun {ended}, though no rank failed"
    words = outcome.mpirun_output.splitlines()
    screen = [
        f"Failed after {duration(outcome.seconds)}: {headline}",
        *(["", "mpirun said:", *(f"    {line}" for line in words)] if words else []),
    ]
    exit_code = 128 - status if status < 0 else status or 1
    return Failure(exit_code, _fitted([headline, *(line for line in words if line.strip("- \t"))]), "\n".join(screen))


def peer_failure(news: News, outcome: Outcome, topology: Topology, lost_code: int) -> Failure:
    """Describe a run that ended here because it failed on another host, or that was lost."""
    what = f"the run failed on another host, {news}"
    screen = f"Failed after {duration(outcome.seconds)}: {what}"
    code = lost_code if news.lost else 1
    return Failure(code, _fitted([news.reason, f"on {news.host}; {topology.host} ended because of it"]), screen)


def stop_failure(outcome: Outcome, topology: Topology, grace_seconds: float, checkpoints: Path) -> Failure:
    """Describe a run that was asked to stop, and in which ranks did not end with exit code 0."""
    name = signal.Signals(outcome.stop_signal).name
    unclean = [end for end in outcome.ends if end.status != 0]
    who = _ranks([end.rank for end in unclean])
    hints: list[str] = []
    if not unclean:
        what = "the ranks had not all started"
    elif outcome.overdue:
        what = f"{who} did not end within {grace_seconds:g} s and had to be killed"
        hints = ["hint: save less, save faster, or raise SMPKIT_GRACE_SECONDS where the platform allows it"]
    elif all(end.status == -signal.SIGKILL for end in unclean):  # by a second Ctrl-C, or for want of memory
        what = f"SIGKILL ended {who} before the script did"
    elif all(end.status in (-signal.SIGTERM, -signal.SIGKILL) for end in unclean):
        what = f"ended {who}; the script did not handle SIGTERM"
        hints = ["hint: handle SIGTERM in the script to save its state, for example with `smp.stop_requested()`"]
    else:
        what = f"{who} did not end with exit code 0"
    exit_code = unclean[0].exit_code if unclean else 143
    if outcome.stop_signal == signal.SIGINT:
        exit_code = 130
    reason = [f"stopped by {name}: {what}", f"on {topology.host}", *hints]
    screen = [f"{stop_words(outcome, checkpoints)}: {what}", *hints]
    return Failure(exit_code, _fitted(reason), "\n".join(screen))


# ---- their words ---------------------------------------------------------------------------------------------------


def _story(end: RankEnd) -> list[str]:
    """Return what happened in the rank, as Python prints it where it can."""
    if end.error is not None:
        story = end.error.traceback.splitlines()
        return story if end.error.name != "SystemExit" else [end.headline, *story[1:-1]]
    stack = [f"  {line}" for line in _stack_lines(end.stack, Path())]
    lines = ["its last lines:", *(f"  {line}" for line in end.last_lines)] if end.last_lines else []
    return [end.headline, *(["it was here, innermost first:", *stack] if stack else lines)]


def _notes(cause: RootCause, code: Path) -> list[str]:
    """Name the ranks that others waited for, if the culprit's error only says that a rank is gone or silent."""
    lines = [f"rank {end.rank} ended with exit code 0 while others still waited for it" for end in cause.left_early]
    for end in cause.still_running:
        lines.append(f"rank {end.rank} was still running" + (", here:" if end.stack else ""))
        lines += [f"  {line}" for line in _own_lines(end.stack, code)]
    return lines


def _memory_lines(end: RankEnd) -> list[str]:
    """Say what a rank that ran out of memory held, what was planned, and where it was."""
    doing = end.doing
    if doing is None or not _ran_out_of_memory(end):
        return []
    lines = []
    if doing.held is not None:
        lines.append(f"tensors held {_kinds(doing.held)}")
    if doing.planned is not None:
        lines.append(f"plan {_kinds(doing.planned)}")
    return [*lines, f"was in {_whereabouts(doing)}"]


def _kinds(held: KindBytes) -> str:
    known = [f"{name} {amount(num_bytes)}" for name, num_bytes in vars(held).items() if num_bytes]
    return f"{amount(held.on_device)}: {', '.join(known)}"


def _whereabouts(doing: RankStatus) -> str:
    if doing.step < 0:
        return "no step: the first one had not begun"
    if doing.has_ended:
        return f"no step: step {doing.step} had ended"
    places = [f"step {doing.step}"]
    if doing.action:
        places.append(f"{doing.action} of microbatch {doing.microbatch}")
    if doing.layer:
        places.append(f"`{plain(doing.layer)}`")
    return ", ".join(places)


def _ranks(ranks: Sequence[int]) -> str:
    """Name ranks: `rank 3`, `ranks 0, 1, 3`, and for many, `ranks 0–6, 8`."""
    runs = groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])  # which neighbours have in common
    spans = [[rank for _, rank in run] for _, run in runs]
    words = [f"{span[0]}–{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans]
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(words)}"


def _frame_lines(end: RankEnd, code: Path) -> list[str]:
    """Return where it happened, innermost first, the user's own files before libraries."""
    if end.error is None:
        return [f"  {line}" for line in _stack_lines(end.stack, code)]
    innermost_first = end.error.frames[::-1]
    frames = sorted(innermost_first, key=lambda frame: not _is_below(frame[0], code))
    return [f'  File "{_short(file, code)}", line {line}, in {function}' for file, line, function in frames]


def _stack_lines(stack: str, code: Path) -> list[str]:
    """Return the frames of a faulthandler dump that are not ours, innermost first."""
    frames = ((match["file"], match["line"], match["function"]) for match in _STACK_FRAME.finditer(stack))
    return [
        f'File "{_short(file, code)}", line {line}, in {function}'
        for file, line, function in frames
        if not file.startswith((_OUR_FOLDER, "<frozen "))
    ]


def _own_lines(stack: str, code: Path) -> list[str]:
    """Return up to four frames of a dump: of the script, or where there are none, the innermost of its libraries."""
    own = "\n".join(match[0] for match in _STACK_FRAME.finditer(stack) if _is_below(match["file"], code))
    return _stack_lines(own or stack, code)[:4]


def _is_below(file: str, code: Path) -> bool:
    return file.startswith(f"{code}/") and "site-packages" not in file


def _short(file: str, code: Path) -> str:
    return file.removeprefix(f"{code}/") if code.name else file


def _fitted(lines: Iterable[str]) -> str:
    """Return lines as they go into the failure file, which is read on terminals: without control sequences."""
    return _cut(plain("\n".join(lines)), _MAX_REASON_CHARACTERS)


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 1]}…"


# ---- what to try ---------------------------------------------------------------------------------------------------


def _hint_of(end: RankEnd, code: Path) -> str | None:
    """Return the hint of the rank's own error, or what is known to help after such an end."""
    error = end.error
    if error is not None and error.hint:
        return error.hint
    if error is not None and error.name == "SystemExit" and end.exit_code == 2:
        return _argument_hint("\n".join(end.last_lines))
    if error is not None and error.name == "FileNotFoundError":
        return _place_hint(error.message, code)
    if error is not None and _NO_GPU.search(error.message):
        return _NO_GPU_HINT
    if not _ran_out_of_memory(end):
        return None
    remedy = "" if end.doing is None else end.doing.remedy(0 if error is None else _bytes_asked_for(error.message))
    return remedy or _MEMORY_HINT


def _place_hint(message: str, code: Path) -> str | None:
    """Explain a relative path that leads somewhere where the launcher was started, and nowhere beside the script."""
    for text in _QUOTED.findall(message):
        path = text.removeprefix(f"{code}/")
        if not path.startswith("/") and Path(path).exists() and not (code / path).exists():
            return f"the script works in its own folder, {code}: name `{Path(path).absolute()}`"
    return None


def _bytes_asked_for(message: str) -> int:
    """Return how many bytes could not be had, as torch says; 0 if this message does not."""
    asked = _ASKED_FOR.search(message)
    return 0 if asked is None else round(float(asked[1]) * 1024 ** "bKMG".index(asked[2][0]))


def _ran_out_of_memory(end: RankEnd) -> bool:
    """Tell whether a rank ended for want of memory, or probably did: the kernel kills without a word."""
    error = end.error
    if error is None:
        return end.status == -signal.SIGKILL
    return any(_OUT_OF_MEMORY.search(text) for text in (error.name, error.message))


def _argument_hint(output: str) -> str | None:
    """Explain an argument that the script does not know, or misses: the launcher made them of hyperparameters."""
    if (missing := _MISSING_ARGUMENT.search(output)) is not None:
        name = missing[1].lstrip("-").replace("-", "_")
        return f"the job's hyperparameters become arguments: write `hyperparameters: {{{name}: ...}}` in the job file"
    if (unknown := _UNKNOWN_ARGUMENT.search(output)) is not None:
        name = unknown[1].lstrip("-")
        return (
            f"the job's hyperparameters become arguments: let the script take `{unknown[1]}`, or remove `{name}` from"
            " `hyperparameters`"
        )
    return None
