"""Record what this rank does, for `smpkit timeline`, and sum it up for the block at the end of the run.

While a step runs, an event is a tuple appended to a list, and stays one until it is a line of `events_<rank>.jsonl`.
GPU work is timed by the GPU: a span lies between two events of its stream, whose times are read when the step has
ended, so that nothing in it waits. The host, which only launches the work, would time the launch.

A sample of the steps is recorded: the first ones (`SMPKIT_EVENTS_STEPS`), then fewer and fewer (`run_meter.Sampling`),
so that a job of days does not fill the disk: an action or message takes about 60 bytes. They are written to the folder
of a run (`SMPKIT_RUN_DIR`) or the one that `SMPKIT_EVENTS_DIR` names; without either they are only summed up.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields
from operator import add, itemgetter
from pathlib import Path
from typing import Any, Final, ParamSpec, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from smpkit.errors import ConfigError, Problem
from smpkit.observe.events import (
    UNKNOWN,
    ActionSpan,
    Counter,
    EventsError,
    EventWriter,
    Header,
    HeldBytes,
    Mark,
    MemorySample,
    MessageSpan,
    PlannedSchedule,
    Row,
    StepSpan,
    WorkSpan,
)
from smpkit.observe.runs import EVENTS, RUN_DIR
from smpkit.observe.status import STATUS_DIR
from smpkit.observe.summary import KindBytes
from smpkit.plan.mesh import CommGroup
from smpkit.plan.remedy import best_remedy
from smpkit.plan.schedule.actions import Schedule, to_json
from smpkit.plan.schedule.graph import Kind
from smpkit.plan.schedule.templates import one_f_one_b
from smpkit.torch.core import devices, status
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.distributed.held_memory import Held, HeldMemory
from smpkit.torch.distributed.profiler import Profiler, profiler_of
from smpkit.torch.distributed.run_meter import WARM_UP, RunMeter, Sampling, parts_of
from smpkit.units import amount

__all__ = [
    "EVENTS_DIR",
    "EVENTS_STEPS",
    "QUIET",
    "Recorder",
    "Timestamp",
    "current_recorder",
    "latest_recorder",
    "note_memory",
    "note_training",
    "recorded_backward",
    "recorded_microbatch",
    "recorded_work",
    "start",
    "stop",
    "timed_optimizer",
]

_log = logging.getLogger("smpkit")
_P = ParamSpec("_P")
_T = TypeVar("_T")

EVENTS_DIR: Final = "SMPKIT_EVENTS_DIR"
"""The folder for the files of events, on every host; nothing is recorded without it."""
EVENTS_STEPS: Final = "SMPKIT_EVENTS_STEPS"
"""How many of the first steps are recorded; later ones now and then."""
QUIET: Final = "SMPKIT_SUMMARY"
"""`0`: print no block at the end of a run."""

_MANY_STEPS: Final = 1000
"""How many of the first steps are recorded for somebody who has asked for events."""
_NOTICEABLE: Final = 1.02
"""By how much more a rank must hold than its status page says for the page to be written again."""
_FORWARD, _BACKWARD = Kind.FORWARD.value, Kind.BACKWARD.value
_KINDS: Final = tuple(field.name for field in fields(KindBytes))
_HELD: Final = tuple(field.name for field in fields(HeldBytes))
_OFFLOADED: Final = itemgetter(_HELD.index("offloaded"))
Timestamp: TypeAlias = int | torch.Event
"""A time of the host's clock in nanoseconds, or an event of the device's."""
SpanCallback: TypeAlias = "Callable[[Recorder, int, int], object]"
"""Called with the begin and the end of a span."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class RecordedExecutor(Protocol):
    """Runs the actions and messages of a pipeline, and calls a hook for each: the executor, which lies above."""

    last_schedule: Schedule | None

    def record(self, on_action: Callable[..., object] | None, on_message: Callable[..., object] | None) -> None: ...


def _on_device(held: Held) -> int:
    weights, gradients, states, activations, parked, _, other, _, _ = held
    if activations < 0 or other < 0:
        activations, other = max(0, activations), max(0, other)
    return weights + gradients + states + activations + parked + other


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


class MostHeld:
    """The most bytes that a rank has held in a step: of each kind, and at once with offloaded ones and without."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}
        """The moments of these may differ."""
        self.on_device = 0
        self.with_offloaded = 0
        """What it would have been with everything kept on the device."""

    def add(self, samples: Sequence[Held]) -> None:
        """Take in what was measured during a step."""
        for name, values in zip(_HELD, zip(*samples, strict=True), strict=False):
            if (value := max(values)) != UNKNOWN:
                self.kinds[name] = max(value, self.kinds.get(name, 0))
        on_device = [_on_device(held) for held in samples]
        self.on_device = max(self.on_device, *on_device)
        self.with_offloaded = max(self.with_offloaded, *map(add, on_device, map(_OFFLOADED, samples)))


class Recorder:
    """Collects the events of one step at a time and hands them to the file.

    Args:
        writer: the file of this rank; None: nothing is written.
        sampling: chooses the steps to record.
        profiler: profiles some of them.
    """

    def __init__(
        self,
        writer: EventWriter | None,
        sampling: Sampling,
        profiler: Profiler | None = None,
    ) -> None:
        self._writer = writer
        self._profiler = profiler
        self._mark: AbstractContextManager[Any] | None = None
        self._sampling = sampling
        self._recording = sampling.first > 0
        self._is_training = False
        self._shown = 0
        self.has_failed = False
        """Whether the latest step has ended with an exception."""
        self.meter = RunMeter()
        self.most = MostHeld()
        self._peers = state.group(CommGroup.PP_GROUP)
        self._step = -1
        self._name = ""
        self._began_ns = 0
        self._executor: RecordedExecutor | None = None
        self._rows: list[Row] = []
        """Events without those of the lists below."""
        self._works: list[tuple[str, int, int]] = []
        self._actions: list[tuple[str, int, int, int, int]] = []
        self._messages: list[tuple[str, int, int, int, int, int]] = []
        self._backwards: list[tuple[int, int]] = []
        self._timed: list[tuple[SpanCallback, Timestamp, Timestamp]] = []
        """Spans whose times are read at the end of the step, in the order in which they ended."""
        self.memory = HeldMemory()
        self._held: list[tuple[Timestamp, Held]] = []
        self._schedules: dict[str, str] = {}
        """By text, the keys of the schedules that have been written."""
        self._latest_schedule: tuple[Schedule | None, str] = None, ""
        """The one of the latest step that was written, and its key."""

    @property
    def active(self) -> bool:
        """Whether the present step is recorded; between steps, the latest one."""
        return self._recording

    # --- hooks of a running step --------------------------------------------------------------------------------------

    def on_action(self, kind: str, segment: int, microbatch: int, start_ns: int, end_ns: int) -> None:
        """Note an action, and what it has left in memory (the executor's hook)."""
        self._actions.append((kind, segment, microbatch, start_ns, end_ns))
        self._hold(end_ns, self.memory.now(gradients_may_be_new=kind != _FORWARD))

    def on_message(self, direction: str, peer: int, num_bytes: int, tag: int, start_ns: int, end_ns: int) -> None:
        """Note a message to or from a rank of this pipeline (the transport's hook)."""
        self._messages.append((direction, peer, num_bytes, tag, start_ns, end_ns))

    def on_work(self, name: str, start_ns: int, end_ns: int) -> None:
        """Note something else that took time."""
        self._works.append((name, start_ns, end_ns))

    def on_counter(self, name: str, value: int, at_ns: int) -> None:
        """Note a figure of the step."""
        self._rows.append((Counter, (name, value, at_ns)))

    def on_backward(self, start_ns: int, end_ns: int) -> None:
        """Note a backward of the current microbatch, where there is no pipeline."""
        self._backwards.append((start_ns, end_ns))

    def on_microbatch(self, index: int, start_ns: int, end_ns: int) -> None:
        """Note a whole microbatch, where there is no pipeline: what comes before its backward is its forward."""
        backwards, self._backwards = self._backwards, []
        forward_end_ns = backwards[0][0] if backwards else end_ns
        self._actions.append((_FORWARD, 0, index, start_ns, forward_end_ns))
        if backwards:
            self._actions.append((_BACKWARD, 0, index, forward_end_ns, backwards[-1][1]))

    def note_memory(self) -> None:
        """Note what is in memory now."""
        self._hold(_now(), self.memory.now())

    def _hold(self, at: Timestamp, held: Held) -> None:
        """Keep a sample, and let the status page have it if it is the largest so far."""
        self._held.append((at, held))
        weights, gradients, states, activations, parked, *_ = held
        size = weights + gradients + states + activations + parked
        if size > self._shown:
            self._shown = round(size * _NOTICEABLE)
            self._show(held)

    def _show(self, held: Held) -> None:
        page = status.current_page()
        if page is not None:
            kinds = {name: max(0, value) for name, value in zip(_HELD, held, strict=True) if name in _KINDS}
            planned = None if status.planner is None else status.planner()
            page.write(KindBytes(**kinds), planned, self._remedy(kinds))

    def _remedy(self, kinds: Mapping[str, int]) -> str:
        """Say which setting would save most of what this rank holds."""
        model_kinds = {name: kinds[name] for name in ("weights", "gradients", "states", "activations")}
        replicas = state.dp_size
        best = best_remedy(state.cfg, replicas, **model_kinds, is_checkpointed=status.checkpoints)
        if best is None:
            return ""
        most = "up to " if best.is_bound else ""
        return f"`{best.setting}` saves most: {most}{amount(best.saved_bytes)} of this rank's memory"

    @contextmanager
    def timing(self, callback: SpanCallback) -> Iterator[None]:
        """Time the block, and call `callback` with its times at the end of the step; not after an exception.

        What is in memory before and after it is noted, too.
        """
        start = _now()
        self._hold(start, self.memory.now())
        yield
        end = _now()
        self._hold(end, self.memory.now())
        self.note_times(callback, start, end)

    def note_times(self, callback: SpanCallback, start: Timestamp, end: Timestamp) -> None:
        """Call `callback` with these times at the end of the step, when those of the device are known."""
        self._timed.append((callback, start, end))

    # --- the life of a step -------------------------------------------------------------------------------------------

    def attach(self, executor: RecordedExecutor) -> None:
        """Record the actions and messages of a pipeline's executor from now on."""
        self._executor = executor
        self._listen()

    def _listen(self) -> None:
        """Hear of actions and messages while a step is recorded, and only then: each costs a little."""
        if self._executor is not None:
            hooks = (self.on_action, self.on_message) if self._recording else (None, None)
            self._executor.record(*hooks)

    def begin_step(self, name: str) -> None:
        """Start a step; its events are kept until `end_step` or `abandon_step`, one of which must follow."""
        self._step += 1
        self._name = name
        if (page := status.current_page()) is not None:
            page.begin_step(self._step)
        self._is_training = self.has_failed = False
        was_recording = self._recording
        self._recording = self._is_wanted(name)
        if was_recording:
            self._clear()
        if was_recording or self._recording:
            self._listen()
            # Else what the device has left to do of the step before, such as the optimizer's part, counts here.
            devices.wait_for_stream(state.device)
        if self._profiler is not None:
            self._profiler.before(self._step)
        self._began_ns = time.perf_counter_ns()
        if self._recording:
            self._hold(self._began_ns, self.memory.begin_step())
        if self._profiler is not None:
            self._mark = self._profiler.step(self._step)
            self._mark.__enter__()

    def _end_mark(self, mark: AbstractContextManager[Any]) -> None:
        """End the mark of the step in a profile."""
        self._mark = None
        mark.__exit__(None, None, None)

    def _is_wanted(self, name: str) -> bool:
        return self._sampling.next(name) or (self._profiler is not None and self._profiler.wants(self._step))

    def end_step(self) -> None:
        """Write the events of the step, after a wait for the GPU."""
        if self._mark is not None:
            self._end_mark(self._mark)
        if not self._recording:
            if self._is_training:
                self.meter.add_step(self._began_ns, time.perf_counter_ns(), None)
            return
        end_ns = self._read_times()
        self._sum_up(end_ns)
        if self._writer is None:
            self._clear()
            return
        key = self._schedule_key()
        self._rows.append((Counter, ("memory, bytes", _memory_bytes(), end_ns)))
        self._rows.append((StepSpan, (self._step, self._name, key, self._began_ns, end_ns)))
        self._write(self._all_rows())
        self._clear()
        if self._profiler is not None:
            self._profiler.after(self._step)

    def _sum_up(self, end_ns: int) -> None:
        """Add the step to the sums of the run, if it was one that trains."""
        if not self._is_training:
            return
        actions = [(start, end) for _, _, _, start, end in self._actions]
        messages = [(direction, start, end) for direction, _, _, _, start, end in self._messages]
        pipeline = self._executor is not None
        parts = parts_of(self._began_ns, end_ns, actions, messages, self._works, is_pipeline=pipeline)
        self.meter.add_step(self._began_ns, end_ns, parts)
        if self.meter.num_steps == WARM_UP + 1:
            self.most = MostHeld()  # until its first step, a rank of a pipeline holds the whole model
        self.most.add([held for _, held in self._held])

    def _all_rows(self) -> list[Row]:
        """Return all that was noted of the step; a step's own row comes last."""
        step, peers = self._step, self._peers
        rows: list[Row] = [(MemorySample, (*held, step, at)) for at, held in self._held if isinstance(at, int)]
        rows += [(WorkSpan, (step, *work)) for work in self._works]
        rows += [(ActionSpan, (step, *action)) for action in self._actions]
        rows += [
            (MessageSpan, (step, direction, peers[peer], tag, num_bytes, start, end))
            for direction, peer, num_bytes, tag, start, end in self._messages
        ]
        return rows + self._rows

    def note_training(self, samples: int, tokens: int) -> None:
        """Note that the present step trains, and how much it takes in on this rank; 0 where that is unknown."""
        self._is_training = True
        if samples:
            self.meter.samples, self.meter.tokens = samples, tokens

    def abandon_step(self, error: BaseException) -> None:
        """Write what was recorded of a step that an exception ended.

        Spans that the GPU times are left out: its kernels may never end, and nothing may wait for them.
        """
        if self._mark is not None:
            self._end_mark(self._mark)
        self.has_failed = True
        if _is_out_of_memory(error):
            with suppress(Exception):  # there may be no memory for this either, and the error itself must get out
                self._show(self._largest())
        if not self._recording or self._writer is None:
            self._clear()
            return
        for callback, start, end in self._timed:
            if isinstance(start, int) and isinstance(end, int):
                callback(self, start, end)
        self._rows.append((Mark, (f"{type(error).__name__} in step {self._step}", time.perf_counter_ns())))
        self._write(self._all_rows())
        self._clear()

    def _largest(self) -> Held:
        """Return what was held when it was most in the present step, or is now."""
        samples = [*(held for _, held in self._held), self.memory.now()]
        return max(samples, key=_on_device)

    def close(self) -> None:
        """Close the file."""
        self._recording = False
        self._listen()
        self._executor = None
        if self._profiler is not None:
            self._profiler.close()
        if self._writer is not None:
            with suppress(OSError):  # of a full disk, about which `_write` has warned
                self._writer.close()

    def _read_times(self) -> int:
        """Wait for the GPU, convert the times of its events to the host's clock, and return the end of its work."""
        last = devices.record_event(state.device, keeps_time=True)
        devices.wait_for_stream(state.device)
        end_ns = time.perf_counter_ns()  # at this moment, and at no other, both clocks are known

        def on_host(timestamp: Timestamp) -> int:
            if isinstance(timestamp, int):
                return timestamp
            assert last is not None, "this device has no events"
            return end_ns - round(timestamp.elapsed_time(last) * 1e6)

        for callback, start, end in self._timed:
            callback(self, on_host(start), on_host(end))
        if last is not None and self._writer is not None:
            self._held = [(on_host(at), held) for at, held in self._held]
        return end_ns

    def _write(self, rows: Iterable[Row]) -> None:
        """Write events to the file; if the disk is full, training goes on without a record."""
        if self._writer is None:
            return
        try:
            self._writer.write_rows(rows)
        except OSError as error:
            _log.warning("recording ended: events cannot be written: %s", error.strerror)
            with suppress(OSError):
                self._writer.close()
            self._writer = None

    def _clear(self) -> None:
        self._rows, self._works, self._actions, self._messages, self._backwards = [], [], [], [], []
        self._timed, self._held = [], []

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _schedule_key(self) -> str:
        """Return the key of the step's schedule, and record a new schedule; an empty key if there is none."""
        schedule = self._followed_schedule()
        if schedule is None:
            return ""
        known, key = self._latest_schedule
        if known is not schedule:
            text = to_json(schedule)
            if text not in self._schedules:
                self._schedules[text] = str(len(self._schedules))
                self._rows.append((PlannedSchedule, (self._schedules[text], text)))
            key = self._schedules[text]
            self._latest_schedule = schedule, key
        return key

    def _followed_schedule(self) -> Schedule | None:
        if self._executor is not None:
            return self._executor.last_schedule
        # Without a pipeline microbatches run one after the other, each with its backward if the step has one.
        backward = any(kind == _BACKWARD for kind, *_ in self._actions)
        return one_f_one_b(1, state.cfg.microbatches) if backward else None


# --- the recorder of this process -------------------------------------------------------------------------------------

_recorder: Recorder | None = None


def current_recorder() -> Recorder | None:
    """Return the recorder of this process, if it records."""
    return _recorder if _recorder is not None and _recorder.active else None


def latest_recorder() -> Recorder | None:
    """Return the recorder of this process, whether or not it records at the moment; None before `smp.init()`."""
    return _recorder


def start(environ: Mapping[str, str] | None = None) -> None:
    """Record from now on; every rank calls this, from `smp.init()`.

    Raises:
        ConfigError: SMPKIT_EVENTS_STEPS is not a positive number.
        EventsError: the file in SMPKIT_EVENTS_DIR cannot be made.
        DeadlineError, RemoteError: a rank did not come to the barrier that aligns the clocks.
    """
    global _recorder  # noqa: PLW0603 - one per process, like the ranks that it records
    stop()
    variables = os.environ if environ is None else environ
    status.open_page(state.rank, variables)
    text = variables.get(EVENTS_STEPS)
    if text is not None:
        sampling = Sampling(_steps(text))
    else:
        sampling = Sampling(_MANY_STEPS) if variables.get(EVENTS_DIR) else Sampling()
    writer = _writer(variables)
    if writer is None and variables.get(QUIET) == "0" and not variables.get(STATUS_DIR):
        sampling = Sampling(0)  # nobody is told of what steps did
    profiler = None if writer is None else profiler_of(variables, writer.path.parent)
    _recorder = Recorder(writer, sampling, profiler)
    if stop not in state.reset_hooks:
        state.reset_hooks.append(stop)


def _writer(variables: Mapping[str, str]) -> EventWriter | None:
    if folder := variables.get(EVENTS_DIR):
        return EventWriter(Path(folder), _header())
    if not (run := variables.get(RUN_DIR)):
        return None
    header = _header()
    try:
        return EventWriter(Path(run) / EVENTS, header)
    except EventsError as error:  # nobody asked for events: training is worth more
        _log.warning("%s", error)
        return None


def stop() -> None:
    """Stop recording, and close the file."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


def note_training(size: Callable[_P, tuple[int, int]], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Note in a step that it trains.

    Args:
        size: returns how many samples and tokens it takes in on this rank; called, with what follows, if the step is
            recorded.
    """
    if _recorder is not None:
        _recorder.note_training(*size(*args, **kwargs) if _recorder.active else (0, 0))


def timed_optimizer(update: Callable[_P, _T]) -> Callable[_P, _T]:
    """Time the optimizer after the steps that are recorded."""

    @functools.wraps(update)
    def timed(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        recorder = _recorder
        if recorder is None or not recorder.active:
            return update(*args, **kwargs)
        devices.wait_for_stream(state.device)
        start_ns = time.perf_counter_ns()
        result = update(*args, **kwargs)
        devices.wait_for_stream(state.device)
        recorder.meter.add_optimizer(start_ns, time.perf_counter_ns())
        return result

    return timed


def _now() -> Timestamp:
    event = devices.record_event(state.device, keeps_time=True)
    return time.perf_counter_ns() if event is None else event


def _timed(callback: SpanCallback) -> AbstractContextManager[None]:
    recorder = current_recorder()
    return nullcontext() if recorder is None else recorder.timing(callback)


def recorded_microbatch(index: int) -> AbstractContextManager[None]:
    """Record a microbatch that runs here from end to end."""
    return _timed(lambda recorder, start_ns, end_ns: recorder.on_microbatch(index, start_ns, end_ns))


def recorded_backward() -> AbstractContextManager[None]:
    """Record a backward inside of `recorded_microbatch`."""
    return _timed(Recorder.on_backward)


def note_memory() -> None:
    """Record what is in memory at this point of a step, where it is likely to be much: after a recomputation."""
    recorder = current_recorder()
    if recorder is not None and state.step is not None and not state.tracing:
        recorder.note_memory()


def recorded_work(name: str) -> AbstractContextManager[None]:
    """Record something else that takes time in a step."""
    return _timed(lambda recorder, start_ns, end_ns: recorder.on_work(name, start_ns, end_ns))


# --- starting ---------------------------------------------------------------------------------------------------------


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError([Problem((EVENTS_STEPS,), f"`{text}` is not a positive number")], subject="environment")
    return int(text)


def _header() -> Header:
    """Agree on a name for the run with the other ranks, and read both clocks right after a barrier."""
    name = torch.tensor([secrets.randbits(62)], device="cpu")
    with waiting("the start of recording", state.object_group):
        dist.broadcast(name, group=state.object_group, group_src=0)
        dist.barrier(group=state.object_group)
    anchor_ns, anchor_unix_ns = time.perf_counter_ns(), time.time_ns()
    mesh, place = state.mesh, state.mesh.coordinates(state.rank)
    host = socket.gethostname()
    return Header(
        rank=state.rank,
        host=host,
        run=f"{int(name.item()):x}",
        clock=_clock_name(host),
        anchor_ns=anchor_ns,
        anchor_unix_ns=anchor_unix_ns,
        pp=place.pp,
        tp=place.tp,
        rdp=place.rdp,
        pp_size=mesh.pp_size,
        tp_size=mesh.tp_size,
        rdp_size=mesh.rdp_size,
        placement_strategy=mesh.strategy,
    )


def _clock_name(host: str) -> str:
    """Return a name for this kernel's monotonic clock, which containers of one machine share under other host names."""
    return _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else host


def _memory_bytes() -> int:
    """Return the bytes of tensors on the GPU, or without a GPU the resident bytes of this process."""
    device = devices.current_device()
    if devices.is_asynchronous(device):
        return devices.memory_bytes(device)
    statm = Path("/proc/self/statm")
    return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
