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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, ParamSpec, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from smpkit.errors import ConfigError, Problem
from smpkit.observe.events import (
    ActionSpan,
    Counter,
    EventsError,
    EventWriter,
    Header,
    Mark,
    MemorySample,
    MessageSpan,
    PlannedSchedule,
    Row,
    StepSpan,
    WorkSpan,
)
from smpkit.observe.runs import EVENTS, RUN_DIR
from smpkit.observe.status import STATUS_DIR, Levers
from smpkit.observe.summary import KindBytes
from smpkit.plan.mesh import CommGroup
from smpkit.plan.schedule.actions import Schedule, to_json
from smpkit.plan.schedule.graph import Kind
from smpkit.plan.schedule.templates import one_f_one_b
from smpkit.torch.core import devices, status
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.recording.held_memory import HELD, Held, HeldMemory, MostHeld, bytes_on_device
from smpkit.torch.recording.profiler import Profiler, profiler_of
from smpkit.torch.recording.run_meter import STALL, WARM_UP, RunMeter, Sampling, parts_of

_log = logging.getLogger("smpkit")
_P = ParamSpec("_P")
_T = TypeVar("_T")

EVENTS_DIR: Final = "SMPKIT_EVENTS_DIR"
"""The folder for the files of events, on every host."""
EVENTS_STEPS: Final = "SMPKIT_EVENTS_STEPS"
"""How many of the first steps are recorded; later ones now and then."""
QUIET: Final = "SMPKIT_SUMMARY"
"""`0`: print no block at the end of a run."""

_MANY_STEPS: Final = 1000
"""How many of the first steps are recorded for somebody who has asked for events."""
_SHORTEST_STALL_NS: Final = 20_000
"""What the report of offloading counts as a stall, too."""
_NOTICEABLE: Final = 1.02
"""By how much more a rank must hold than its status page says for the page to be written again."""
_FORWARD, _BACKWARD = Kind.FORWARD.value, Kind.BACKWARD.value
_KINDS: Final = frozenset(field.name for field in fields(KindBytes))
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

Timestamp: TypeAlias = int | torch.Event
"""A time of the host's clock in nanoseconds, or an event of the device's."""


class RecordedExecutor(Protocol):
    """The executor, which lies above: it runs the actions and messages of a pipeline, and calls a hook for each."""

    last_schedule: Schedule | None

    def record(self, on_action: Callable[..., object] | None, on_message: Callable[..., object] | None) -> None: ...


class Recorder:
    """Collects the events of one step at a time and hands them to the file of this rank, if there is one."""

    def __init__(self, writer: EventWriter | None, sampling: Sampling, profiler: Profiler) -> None:
        self._writer = writer
        self._sampling = sampling
        self._profiler = profiler
        self._recording = sampling.first > 0
        self._size = 0, 0
        """Samples and tokens of the latest step that trains."""
        self._executor: RecordedExecutor | None = None
        self._peers = state.group(CommGroup.PP_GROUP)
        self.meter = RunMeter()
        self.memory = HeldMemory()
        self.most = MostHeld()
        self._shown = 0
        """The bytes from which on the status page is written again."""
        self._schedules: dict[str, str] = {}
        """By text, the keys of the schedules that have been written."""
        self._step = -1
        self._name = ""
        self._began_ns = 0
        self._is_training = False
        self.has_failed = False
        """Whether the latest step has ended with an exception."""
        self._clear()

    def _clear(self) -> None:
        """Forget what has been noted of a step."""
        self._rows: list[Row] = []
        """Events without those of the lists below."""
        self._messages: list[tuple[str, int, int, int, int, int]] = []
        # The times of these are Timestamps until `_read_times`.
        self._works: list[tuple[str, Any, Any]] = []
        self._actions: list[tuple[str, int, int, Any, Any]] = []
        self._backwards: list[tuple[Any, Any]] = []
        self._held: list[tuple[Any, Held]] = []

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

    def on_work(self, name: str, start: Timestamp, end: Timestamp) -> None:
        """Note something else that took time."""
        self._works.append((name, start, end))

    def on_counter(self, name: str, value: int, at_ns: int) -> None:
        """Note a figure of the step."""
        self._rows.append((Counter, (name, value, at_ns)))

    def on_backward(self, start: Timestamp, end: Timestamp) -> None:
        """Note a backward of the current microbatch, where there is no pipeline."""
        self._backwards.append((start, end))

    def on_microbatch(self, index: int, start: Timestamp, end: Timestamp) -> None:
        """Note a whole microbatch, where there is no pipeline: what comes before its backward is its forward."""
        backwards, self._backwards = self._backwards, []
        forward_end = backwards[0][0] if backwards else end
        self._actions.append((_FORWARD, 0, index, start, forward_end))
        if backwards:
            self._actions.append((_BACKWARD, 0, index, forward_end, backwards[-1][1]))

    @contextmanager
    def timing(self, note: Callable[[Timestamp, Timestamp], object]) -> Iterator[None]:
        """Time the block and pass its begin and end to `note`, unless it raises; note what is in memory at both."""
        start = self.note_memory()
        yield
        note(start, self.note_memory())

    def note_memory(self) -> Timestamp:
        """Note what is in memory now, and return when that is."""
        event = devices.record_event(state.device, keeps_time=True)
        now = time.perf_counter_ns() if event is None else event
        self._hold(now, self.memory.now())
        return now

    def _hold(self, at: Timestamp, held: Held) -> None:
        """Keep a sample, and let the status page have it if it is the largest so far."""
        self._held.append((at, held))
        weights, gradients, states, activations, parked, *_ = held
        if (size := weights + gradients + states + activations + parked) > self._shown:
            self._shown = round(size * _NOTICEABLE)
            _show(held)

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
        self._recording = self._sampling.next(name) or self._profiler.wants(self._step)
        if was_recording or self._recording:
            self._clear()
            self._listen()
            # Else what the device has left to do of the step before, such as the optimizer's part, counts here.
            devices.wait_for_stream(state.device)
        self._profiler.begin_step(self._step)
        self._began_ns = time.perf_counter_ns()
        if self._recording:
            self._hold(self._began_ns, self.memory.begin_step())

    def note_training(self, samples: int, tokens: int) -> None:
        """Note that the present step trains, and how much it takes in on this rank; 0 where that is unknown."""
        self._is_training = True
        self._size = samples, tokens

    def end_step(self) -> None:
        """Add the step to the sums of the run, and write its events, after a wait for the GPU."""
        self._profiler.end_step()
        if self._recording:
            self._end_recorded_step()
        elif self._is_training:
            self.meter.add_step(self._began_ns, time.perf_counter_ns(), None)
        if (page := status.current_page()) is not None:
            page.end_step(self.meter.num_steps, self.meter.step_seconds or 0.0)

    def _end_recorded_step(self) -> None:
        end_ns = self._read_times()
        if self._is_training:
            self._sum_up(end_ns)
        if self._writer is not None:
            key = self._schedule_key()
            self._rows.append((Counter, ("memory, bytes", _memory_bytes(), end_ns)))
            call = self._sampling.latest(self._name)
            self._rows.append((StepSpan, (self._step, self._name, key, self._began_ns, end_ns, call)))
            self._write()
            self._profiler.after_step(self._step)
        self._clear()

    def abandon_step(self, error: BaseException) -> None:
        """Write what was recorded of a step that an exception ended.

        Spans that the GPU times are left out: its kernels may never end, and nothing may wait for them.
        """
        self._profiler.end_step()
        self.has_failed = True
        with suppress(Exception):  # there may be no memory for this, and the error itself must get out
            _show(max([*(held for _, held in self._held), self.memory.now()], key=bytes_on_device))
        if self._recording and self._writer is not None:
            self._rows.append((Mark, (f"{type(error).__name__} in step {self._step}", time.perf_counter_ns())))
            self._write()
        self._clear()

    def close(self) -> None:
        self._recording = False
        self._listen()
        self._executor = None
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

        works = [(name, on_host(start), on_host(end)) for name, start, end in self._works]
        self._works = [
            work for work in works if work[2] - work[1] >= _SHORTEST_STALL_NS or not work[0].startswith(STALL)
        ]
        if last is not None:
            self._actions = [(*action[:3], on_host(action[3]), on_host(action[4])) for action in self._actions]
            self._held = [(on_host(at), held) for at, held in self._held]
        return end_ns

    def _sum_up(self, end_ns: int) -> None:
        actions = [action[3:] for action in self._actions]
        messages = [(direction, start, end) for direction, _, _, _, start, end in self._messages]
        pipeline = self._executor is not None
        parts = parts_of(self._began_ns, end_ns, actions, messages, self._works, is_pipeline=pipeline)
        self.meter.add_step(self._began_ns, end_ns, parts, self._size)
        if self.meter.num_steps == WARM_UP + 1:
            # Until its first step, a rank of a pipeline holds the whole model.
            self.most, self._shown = MostHeld(), 0
        self.most.add([held for _, held in self._held])

    # --- the file -----------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Write what has a time of the host; if the disk is full, training goes on without a record."""
        assert self._writer is not None
        step, peers = self._step, self._peers
        rows: list[Row] = [(MemorySample, (*held, step, at)) for at, held in self._held if isinstance(at, int)]
        rows += [(WorkSpan, (step, *work)) for work in self._works if isinstance(work[-1], int)]
        rows += [(ActionSpan, (step, *action)) for action in self._actions if isinstance(action[-1], int)]
        rows += [
            (MessageSpan, (step, direction, peers[peer], tag, num_bytes, start, end))
            for direction, peer, num_bytes, tag, start, end in self._messages
        ]
        try:
            self._writer.write_rows(rows + self._rows)  # a step's own row comes last
        except OSError as error:
            _log.warning("recording ended: events cannot be written: %s", error.strerror)
            with suppress(OSError):
                self._writer.close()
            self._writer = None

    def _schedule_key(self) -> str:
        """Return the key of the step's schedule, and record a new schedule; an empty key if there is none."""
        if self._executor is not None:
            schedule = self._executor.last_schedule
        else:  # microbatches run one after the other, each with its backward if the step has one
            has_backward = any(kind == _BACKWARD for kind, *_ in self._actions)
            schedule = one_f_one_b(1, state.cfg.microbatches) if has_backward else None
        if schedule is None:
            return ""
        text = to_json(schedule)
        if text not in self._schedules:
            self._schedules[text] = str(len(self._schedules))
            self._rows.append((PlannedSchedule, (self._schedules[text], text)))
        return self._schedules[text]


def _show(held: Held) -> None:
    """Write on the status page what this rank holds, and what its launcher needs to say what would help."""
    page = status.current_page()
    if page is not None:
        kinds = {name: max(0, value) for name, value in zip(HELD, held, strict=True) if name in _KINDS}
        planned = None if status.planner is None else status.planner()
        levers = Levers.of(state.cfg, state.dp_size, is_checkpointed=status.checkpoints)
        page.write(KindBytes(**kinds), planned, levers)


def _memory_bytes() -> int:
    """Return the bytes of tensors on the GPU, or without a GPU the resident bytes of this process."""
    device = devices.current_device()
    if devices.is_asynchronous(device):
        return devices.memory_bytes(device)
    statm = Path("/proc/self/statm")
    return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


# --- the recorder of this process -------------------------------------------------------------------------------------

_recorder: Recorder | None = None


def current_recorder() -> Recorder | None:
    """Return the recorder of this process, if it records."""
    return _recorder if _recorder is not None and _recorder.active else None


def latest_recorder() -> Recorder | None:
    """Return the recorder of this process, whether or not it records at the moment; None before `smp.init()`."""
    return _recorder


def start() -> None:
    """Record from now on; every rank calls this, from `smp.init()`, and meets the others to align the clocks."""
    global _recorder  # noqa: PLW0603 - one per process, like the ranks that it records
    stop()
    status.open_page(state.rank, (state.mesh.pp_size, state.mesh.tp_size, state.mesh.rdp_size), os.environ)
    sampling = Sampling(_MANY_STEPS) if os.environ.get(EVENTS_DIR) else Sampling()
    if (text := os.environ.get(EVENTS_STEPS)) is not None:
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError([Problem((EVENTS_STEPS,), f"`{text}` is not a positive number")], subject="environment")
        sampling = Sampling(int(text))
    writer = _open_writer()
    if writer is None and os.environ.get(QUIET) == "0" and not os.environ.get(STATUS_DIR):
        sampling = Sampling(0)  # nobody is told of what steps did
    profiler = Profiler() if writer is None else profiler_of(os.environ, writer.path.parent)
    _recorder = Recorder(writer, sampling, profiler)


def stop() -> None:
    """Stop recording, and close the file."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


state.start_hooks.append(start)
state.reset_hooks.append(stop)


def _open_writer() -> EventWriter | None:
    if folder := os.environ.get(EVENTS_DIR):
        return EventWriter(Path(folder), _header())
    if not (run := os.environ.get(RUN_DIR)):
        return None
    header = _header()
    try:
        return EventWriter(Path(run) / EVENTS, header)
    except EventsError as error:  # nobody asked for events: training is worth more
        _log.warning("%s", error)
        return None


def _header() -> Header:
    """Agree on a name for the run with the other ranks, and read the clock right after a barrier."""
    name = torch.tensor([secrets.randbits(62)], device="cpu")
    with waiting("the start of recording", state.object_group):
        dist.broadcast(name, group=state.object_group, group_src=0)
        dist.barrier(group=state.object_group)
    anchor_ns = time.perf_counter_ns()
    mesh, place, host = state.mesh, state.mesh.coordinates(state.rank), socket.gethostname()
    return Header(
        rank=state.rank,
        host=host,
        run=f"{int(name.item()):x}",
        # This kernel's monotonic clock, which containers of one machine share under other host names.
        clock=_BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else host,
        anchor_ns=anchor_ns,
        pp=place.pp,
        tp=place.tp,
        rdp=place.rdp,
        pp_size=mesh.pp_size,
        tp_size=mesh.tp_size,
        rdp_size=mesh.rdp_size,
        placement_strategy=mesh.strategy,
    )


# --- what the runtime calls -------------------------------------------------------------------------------------------


def note_training(size: Callable[_P, tuple[int, int]], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Note in a step that it trains; `size` returns its samples and tokens on this rank, if the step is recorded."""
    if _recorder is not None:
        _recorder.note_training(*size(*args, **kwargs) if _recorder.active else (0, 0))


def timed_optimizer(update: Callable[_P, _T]) -> Callable[_P, _T]:
    """Time the optimizer after the steps that are recorded."""

    @functools.wraps(update)
    def timed(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        recorder = current_recorder()
        if recorder is None:
            return update(*args, **kwargs)
        devices.wait_for_stream(state.device)
        start_ns = time.perf_counter_ns()
        result = update(*args, **kwargs)
        devices.wait_for_stream(state.device)
        recorder.meter.add_optimizer(start_ns, time.perf_counter_ns())
        return result

    return timed


def recorded_microbatch(index: int) -> AbstractContextManager[None]:
    """Record a microbatch that runs here from end to end."""
    recorder = current_recorder()
    return nullcontext() if recorder is None else recorder.timing(functools.partial(recorder.on_microbatch, index))


def recorded_backward() -> AbstractContextManager[None]:
    """Record a backward inside of `recorded_microbatch`."""
    recorder = current_recorder()
    return nullcontext() if recorder is None else recorder.timing(recorder.on_backward)


def recorded_work(name: str) -> AbstractContextManager[None]:
    """Record something else that takes time in a step."""
    recorder = current_recorder()
    return nullcontext() if recorder is None else recorder.timing(functools.partial(recorder.on_work, name))


def note_memory() -> None:
    """Record what is in memory at this point of a step, where it is likely to be much: after a recomputation."""
    recorder = current_recorder()
    if recorder is not None and state.step is not None and not state.tracing:
        recorder.note_memory()
