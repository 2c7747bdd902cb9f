"""`offload_activations`: the engine of this process's DistributedModel, and `smp.offload_report()`."""

from __future__ import annotations

import time
from collections import defaultdict
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core import devices
from smpkit.torch.core import offload_hooks as active
from smpkit.torch.core.microbatches import StepProgress
from smpkit.torch.core.module_call import ModuleCall
from smpkit.torch.core.runtime import state
from smpkit.torch.core.step_participants import StepParticipant
from smpkit.torch.core.warn import warn_user
from smpkit.torch.distributed import recorder
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.distributed.run_meter import STALL
from smpkit.torch.offload.engine import ActivationEngine, make_engine
from smpkit.torch.offload.report import MIN_SECONDS, OffloadReport, StepReport
from smpkit.torch.offload.saved_storage import Group
from smpkit.torch.recompute.layer import ModuleCheckpoint
from smpkit.torch.recompute.torch_checkpoint import patch_torch_checkpoint

__all__ = ["Offloading", "offload_report", "offloads"]


def offloads() -> bool:
    """Return whether this process offloads activations: with `auto` only from a device that is not the host."""
    wanted = state.cfg.offload_activations
    return devices.has_streams(state.device) if wanted == "auto" else wanted


class Offloading(StepParticipant):
    """Offloads the inputs of checkpointed layers of `module`, for as long as the model is used."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        cfg = state.cfg
        horizon = None if cfg.activation_loading_horizon == "auto" else cfg.activation_loading_horizon
        self._engine = make_engine(
            state.device,
            horizon=horizon,
            deadline_seconds=cfg.timeout_seconds,
            rank=state.rank,
            num_sharers=state.local_size,
        )
        self._engine.on_step = _record
        self._engine.on_stall = _record_stall
        self._has_checked = False
        active.install(self._engine)
        patch_torch_checkpoint()
        if _close_engine not in state.reset_hooks:
            state.reset_hooks.append(_close_engine)

    def begin_step(self, step: StepProgress) -> None:  # noqa: ARG002 - that of all parts
        """Exclude the model's own tensors, which may have changed since the last step."""
        tensors = (*self._module.parameters(), *self._module.buffers())
        self._engine.exclude(tensor for tensor in tensors if tensor.device == self._engine.link.device)

    def begin_microbatch(self, index: int) -> None:
        """Note which microbatch runs, where there is no pipeline."""
        self._engine.begin_microbatch(index)

    def end_step(self, step: StepProgress) -> None:
        """Close the step's statistics; after the first step that trains, warn if there is nothing to offload."""
        self._engine.end_step()
        if step.total_backwards and not self._has_checked:
            self._has_checked = True
            if not self._any_layer_is_checkpointed():
                warn_user(
                    "offload_activations has no effect: no layer is checkpointed; "
                    "call smp.set_activation_checkpointing(layers) or smp.checkpoint(layer, ...)",
                )

    def abandon_step(self, error: BaseException) -> None:  # noqa: ARG002 - that of all parts
        """Forget a step that an exception ended."""
        self._engine.abandon_step()

    @property
    def engine(self) -> ActivationEngine:
        """What offloads."""
        return self._engine

    def report(self) -> OffloadReport:
        """Return what was moved, held and waited for so far."""
        return self._engine.stats.report()

    def _any_layer_is_checkpointed(self) -> bool:
        """Return whether any rank of this pipeline has checkpointed layers. Collective over the pipeline, once."""
        # Layers that are chosen for may all be kept.
        marked = sum(isinstance(ModuleCall.of(each).checkpointing, ModuleCheckpoint) for each in self._module.modules())
        found = torch.tensor([self._engine.num_checkpointed_calls + marked], device="cpu")
        if state.pp_size > 1:
            group = state.process_group(CommGroup.PP_GROUP)
            with waiting("the first step with offloading", group):
                dist.all_reduce(found, group=group)
        return bool(found.item())


def offload_report() -> OffloadReport:
    """Return what this rank has offloaded: bytes out and back, peaks, and stalls by layer, step by step.

    ::

        print(smp.offload_report())
        # rank 0: 100 steps, 12.5 GiB out, 12.5 GiB back; at most 96.0 MiB on the device, ...; stalled 0.0 ms

    Raises:
        UsageError: without `offload_activations: true`, or before `smp.DistributedModel(...)`.
    """
    offloading: Offloading | None = None if state.model is None else state.model.offloading
    if offloading is None:
        raise UsageError(
            "nothing is offloaded here", hint="set `offload_activations: true`, and wrap the model in DistributedModel"
        )
    return offloading.report()


def _record(step: StepReport) -> None:
    """Record a step's figures as events, if events are recorded."""
    if (current_recorder := recorder.current_recorder()) is not None:
        at_ns = time.perf_counter_ns()
        current_recorder.on_counter("offload out, bytes", step.bytes_out, at_ns)
        current_recorder.on_counter("offload back, bytes", step.bytes_back, at_ns)
        current_recorder.on_counter("offload peak on device, bytes", step.peak_device_bytes, at_ns)
        current_recorder.on_counter("offload peak on host, bytes", step.peak_host_bytes, at_ns)
        current_recorder.on_counter("offload kept for want of host memory, bytes", step.kept_bytes, at_ns)
        seconds: defaultdict[str, float] = defaultdict(float)
        for stall in step.stalls:
            seconds[stall.layer] += stall.seconds
        for layer, stalled in seconds.items():
            current_recorder.on_counter(f"offload stall of {layer}, ns", round(1e9 * stalled), at_ns)


def _record_stall(group: Group, start: recorder.Timestamp, end: recorder.Timestamp) -> None:
    if (current_recorder := recorder.current_recorder()) is not None:
        current_recorder.note_times(partial(_on_stall, name=f"{STALL}{group}"), start, end)


def _on_stall(current_recorder: recorder.Recorder, start_ns: int, end_ns: int, *, name: str) -> None:
    if end_ns - start_ns >= 1e9 * MIN_SECONDS:
        current_recorder.on_work(name, start_ns, end_ns)


def _close_engine() -> None:
    if isinstance(engine := active.install(None), ActivationEngine):
        engine.close()
