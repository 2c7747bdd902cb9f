"""Record what this rank does where `SMPKIT_EVENTS_DIR` names a folder, for `smpkit timeline`.

While a step runs, an event is a tuple appended to a list; it becomes a line of `events_<rank>.jsonl` after the step.
GPU work is timed by the GPU: a span lies between two events of its stream, whose times are read when the step has
ended, so that nothing in it waits. The host, which only launches the work, would time the launch.

Recording ends after `SMPKIT_EVENTS_STEPS` steps (1000), so that a job of days does not fill the disk: an action or
message takes about 120 bytes.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import torch
import torch.distributed as dist

from smpkit.errors import ConfigError, Problem
from smpkit.observe.events import (
    ActionSpan,
    Counter,
    Event,
    EventWriter,
    Header,
    Mark,
    MessageSpan,
    PlannedSchedule,
    StepSpan,
    WorkSpan,
)
from smpkit.plan.mesh import CommGroup
from smpkit.plan.schedule.actions import Schedule, to_json
from smpkit.plan.schedule.graph import Kind
from smpkit.plan.schedule.templates import one_f_one_b
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.distributed.profiler import Profiler, profiler_of

__all__ = [
    "EVENTS_DIR",
    "EVENTS_STEPS",
    "Recorder",
    "current_recorder",
    "recorded_backward",
    "recorded_microbatch",
    "recorded_step",
    "recorded_work",
    "start",
    "stop",
]

_log = logging.getLogger("smpkit")

EVENTS_DIR: Final = "SMPKIT_EVENTS_DIR"
"""The folder for the files of events, on every host; nothing is recorded without it."""
EVENTS_STEPS: Final = "SMPKIT_EVENTS_STEPS"
"""How many steps are recorded."""

_DEFAULT_STEPS: Final = 1000
Timestamp: TypeAlias = int | torch.Event
"""A time of the host's clock in nanoseconds, or an event of the device's."""
SpanCallback: TypeAlias = "Callable[[Recorder, int, int], object]"
"""Called with the begin and the end of a span."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class RecordedTransport(Protocol):
    """Sends and receives messages of a pipeline, and calls `recorder` for each."""

    recorder: Callable[[str, int, int, int, int, int], object] | None


class RecordedStage(Protocol):
    @property
    def transport(self) -> RecordedTransport: ...


class RecordedExecutor(Protocol):
    """Runs the actions of a pipeline and calls `recorder` for each: the executor, which lies above this module."""

    recorder: Callable[[str, int, int, int, int], object] | None

    @property
    def stage(self) -> RecordedStage: ...
    @property
    def last_schedule(self) -> Schedule | None: ...


class Recorder:
    """Collects the events of one step at a time and hands them to the file.

    Args:
        writer: the file of this rank.
        max_steps: how many steps to record.
        profiler: profiles some of them.
    """

    def __init__(self, writer: EventWriter, max_steps: int, profiler: Profiler | None = None) -> None:
        self._writer = writer
        self._profiler = profiler
        self._max_steps = max_steps
        self._peers = state.group(CommGroup.PP_GROUP)
        self._step = -1
        self._name = ""
        self._began_ns = 0
        self._executor: RecordedExecutor | None = None
        self._events: list[Event] = []
        self._actions: list[tuple[str, int, int, int, int]] = []
        self._messages: list[tuple[str, int, int, int, int, int]] = []
        self._backwards: list[tuple[int, int]] = []
        self._timed: list[tuple[SpanCallback, Timestamp, Timestamp]] = []
        """Spans whose times are read at the end of the step, in the order in which they ended."""
        self._schedules: dict[str, str] = {}
        """By text, the keys of the schedules that have been written."""

    @property
    def active(self) -> bool:
        """Whether steps are still recorded."""
        return self._step < self._max_steps

    # --- hooks of a running step --------------------------------------------------------------------------------------

    def on_action(self, kind: Kind | str, segment: int, microbatch: int, start_ns: int, end_ns: int) -> None:
        """Note an action (the executor's hook)."""
        self._actions.append((str(kind), segment, microbatch, start_ns, end_ns))

    def on_message(self, direction: str, peer: int, num_bytes: int, tag: int, start_ns: int, end_ns: int) -> None:
        """Note a message to or from a rank of this pipeline (the transport's hook)."""
        self._messages.append((direction, peer, num_bytes, tag, start_ns, end_ns))

    def on_work(self, name: str, start_ns: int, end_ns: int) -> None:
        """Note something else that took time."""
        self._events.append(WorkSpan(self._step, name, start_ns, end_ns))

    def on_counter(self, name: str, value: int, at_ns: int) -> None:
        """Note a figure of the step."""
        self._events.append(Counter(name, value, at_ns))

    def on_backward(self, start_ns: int, end_ns: int) -> None:
        """Note a backward of the current microbatch, where there is no pipeline."""
        self._backwards.append((start_ns, end_ns))

    def on_microbatch(self, index: int, start_ns: int, end_ns: int) -> None:
        """Note a whole microbatch, where there is no pipeline: what comes before its backward is its forward."""
        backwards, self._backwards = self._backwards, []
        forward_end_ns = backwards[0][0] if backwards else end_ns
        self.on_action(Kind.FORWARD, 0, index, start_ns, forward_end_ns)
        if backwards:
            self.on_action(Kind.BACKWARD, 0, index, forward_end_ns, backwards[-1][1])

    @contextmanager
    def timing(self, callback: SpanCallback) -> Iterator[None]:
        """Time the block, and call `callback` with its times at the end of the step; not after an exception."""
        start = _now()
        yield
        self._timed.append((callback, start, _now()))

    # --- the life of a step -------------------------------------------------------------------------------------------

    def attach(self, executor: RecordedExecutor) -> None:
        """Record the actions and messages of a pipeline's executor from now on."""
        self._executor = executor
        executor.recorder = self.on_action
        executor.stage.transport.recorder = self.on_message

    def begin_step(self, name: str) -> None:
        """Start a step; its events are kept until `end_step`."""
        self._clear()
        self._step += 1
        self._name = name
        if not self.active:
            self._finish()
        elif self._profiler is not None:
            self._profiler.before(self._step)
        self._began_ns = time.perf_counter_ns()

    def marked(self) -> AbstractContextManager[None]:
        """Mark the step in the profile, if it is profiled."""
        return nullcontext() if self._profiler is None else self._profiler.step(self._step)

    def end_step(self) -> None:
        """Write the events of the step, after a wait for the GPU."""
        if not self.active:
            return
        end_ns = self._read_times()
        key = self._schedule_key()
        step = self._step
        self._events += [ActionSpan(step, *action) for action in self._actions]
        self._events += [self._message(*message) for message in self._messages]
        self._events.append(Counter("memory, bytes", _memory_bytes(), end_ns))
        self._events.append(StepSpan(step, self._name, key, self._began_ns, end_ns))
        self._write(self._events)
        self._clear()
        if self._profiler is not None:
            self._profiler.after(self._step)

    def abandon_step(self, error: BaseException) -> None:
        """Write what was recorded of a step that an exception ended.

        Spans that the GPU times are left out: its kernels may never end, and nothing may wait for them.
        """
        if not self.active:
            return
        for callback, start, end in self._timed:
            if isinstance(start, int) and isinstance(end, int):
                callback(self, start, end)
        self._events += [ActionSpan(self._step, *action) for action in self._actions]
        self._events += [self._message(*message) for message in self._messages]
        self._events.append(Mark(f"{type(error).__name__} in step {self._step}", time.perf_counter_ns()))
        self._write(self._events)
        self._clear()

    def close(self) -> None:
        """Close the file."""
        self._detach()
        if self._profiler is not None:
            self._profiler.close()
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
        return end_ns

    def _write(self, events: Sequence[Event]) -> None:
        """Write events to the file; if the disk is full, training goes on without a record."""
        try:
            self._writer.write(events)
        except OSError as error:
            _log.warning("recording ended: events cannot be written: %s", error.strerror)
            self._max_steps = -1
            self._detach()

    def _message(self, direction: str, peer: int, num_bytes: int, tag: int, start_ns: int, end_ns: int) -> MessageSpan:
        return MessageSpan(self._step, direction, self._peers[peer], tag, num_bytes, start_ns, end_ns)

    def _clear(self) -> None:
        self._events, self._actions, self._messages, self._backwards, self._timed = [], [], [], [], []

    def _finish(self) -> None:
        """After the last step that is recorded, stop, and write that to the file."""
        if self._step == self._max_steps:
            self._write([Mark(f"recording ended after {self._max_steps} steps", time.perf_counter_ns())])
            self._detach()

    def _detach(self) -> None:
        if self._executor is not None:
            self._executor.recorder = None
            self._executor.stage.transport.recorder = None
            self._executor = None

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _schedule_key(self) -> str:
        """Return the key of the step's schedule, and record a new schedule; an empty key if there is none."""
        schedule = self._followed_schedule()
        if schedule is None:
            return ""
        text = to_json(schedule)
        if text not in self._schedules:
            self._schedules[text] = str(len(self._schedules))
            self._events.append(PlannedSchedule(self._schedules[text], text))
        return self._schedules[text]

    def _followed_schedule(self) -> Schedule | None:
        if self._executor is not None:
            return self._executor.last_schedule
        # Without a pipeline microbatches run one after the other, each with its backward if the step has one.
        backward = any(kind == str(Kind.BACKWARD) for kind, *_ in self._actions)
        return one_f_one_b(1, state.cfg.microbatches) if backward else None


# --- the recorder of this process -------------------------------------------------------------------------------------

_recorder: Recorder | None = None


def current_recorder() -> Recorder | None:
    """Return the recorder of this process, if it records."""
    return _recorder if _recorder is not None and _recorder.active else None


def start(environ: Mapping[str, str] | None = None) -> None:
    """Record from now on, if the environment asks for it; every rank calls this, from `smp.init()`.

    Raises:
        ConfigError: SMPKIT_EVENTS_STEPS is not a positive number.
        EventsError: the file cannot be made.
        DeadlineError, RemoteError: a rank did not come to the barrier that aligns the clocks.
    """
    global _recorder  # noqa: PLW0603 - one per process, like the ranks that it records
    stop()
    variables = os.environ if environ is None else environ
    if folder := variables.get(EVENTS_DIR):
        steps = _steps(variables.get(EVENTS_STEPS, str(_DEFAULT_STEPS)))
        profiler = profiler_of(variables, Path(folder))
        _recorder = Recorder(EventWriter(Path(folder), _header()), steps, profiler)
        if stop not in state.reset_hooks:
            state.reset_hooks.append(stop)


def stop() -> None:
    """Stop recording, and close the file."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


def recorded_step(name: str) -> AbstractContextManager[None]:
    """Record one call of a step function, if this process records."""
    recorder = current_recorder()
    return nullcontext() if recorder is None else _recorded_step(recorder, name)


@contextmanager
def _recorded_step(recorder: Recorder, name: str) -> Iterator[None]:
    recorder.begin_step(name)
    try:
        with recorder.marked():
            yield
    except BaseException as error:
        recorder.abandon_step(error)
        raise
    recorder.end_step()


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
