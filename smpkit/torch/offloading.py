"""Who offloads what checkpointed layers keep: `smpkit.offload_activations(model)` for any model and training loop, and
the key `offload_activations` for the one of smp.DistributedModel, with `smp.offload_report()`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core import devices, offloader
from smpkit.torch.core.arguments import check_module, check_num_bytes, check_positive, device_of
from smpkit.torch.core.microbatches import StepProgress
from smpkit.torch.core.module_call import ModuleCall
from smpkit.torch.core.offloader import KEEPING, install
from smpkit.torch.core.runtime import state
from smpkit.torch.core.step_participants import StepParticipant
from smpkit.torch.core.warn import warn_user
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.offload.engine import ActivationEngine, make_engine
from smpkit.torch.offload.link import Link
from smpkit.torch.offload.order import Lead, check_lead
from smpkit.torch.offload.report import OffloadReport, StepReport
from smpkit.torch.recompute.layer import ModuleCheckpoint
from smpkit.torch.recompute.torch_checkpoint import patch_torch_checkpoint
from smpkit.torch.recording import recorder
from smpkit.torch.recording.run_meter import STALL


class offload_activations:  # noqa: N801 - used as a function
    """Keep on the host what checkpointed layers of `model` keep for backward: asynchronously, and in eager mode.

    ::

        offload = smpkit.offload_activations(model)
        for batch in loader:
            loss = model(batch).sum()
            loss.backward()
            ...
        print(offload.report())

    From now on, in every forward of `model`, the inputs of calls under `torch.utils.checkpoint` or `smp.checkpoint`
    leave the device, and come back before backward needs them. So do the outputs of operators for which the policy of a
    selective checkpoint returns `CheckpointPolicy.MUST_CPU_OFFLOAD` or `PREFER_CPU_OFFLOAD`; these operators run once.
    Without checkpointing it has no effect, and warns. Copies run beside the computation, in both directions; each
    storage leaves once, however many calls keep it. Gradients are the same bits as without. Parameters never leave.

    What MUST leave and cannot (a view of a weight, a tensor on another device, no host memory left) is an error that
    names the operator and the layer; other tensors stay on the device then, with one line in the log.

    Args:
        model: whose forwards offload; all of its parameters on one device.
        lead: how many layers ahead of backward loads are issued; "auto" takes the smallest number without a stall.
        min_bytes: smaller tensors stay; None: 1 MiB on a GPU, 0 on the CPU.
        host_budget_bytes: of host memory; what does not fit stays on the device. None: three quarters of what is free.
        link: another link than the device's own, such as `smpkit.testing.EmulatedLink`.
        deadline_seconds: no wait of this thread for a copy lasts longer; then DeadlineError says for what. On a GPU its
            streams wait, and this thread only where memory of the host is freed.

    Raises:
        UsageError: an argument of a wrong type or value, or a model without parameters or on several devices.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lead: Lead = "auto",
        min_bytes: int | None = None,
        host_budget_bytes: int | None = None,
        link: Link | None = None,
        deadline_seconds: float = 600.0,
    ) -> None:
        check_module("offload_activations", model)
        check_lead(lead)
        check_num_bytes("min_bytes", min_bytes, of_none="1 MiB on a GPU, 0 on the CPU")
        check_num_bytes("host_budget_bytes", host_budget_bytes, of_none="three quarters of what is free")
        check_positive("deadline_seconds", deadline_seconds, "seconds", hint="the default is 600")
        if link is not None and not isinstance(getattr(link, "device", None), torch.device):
            raise UsageError(f"link is {link!r}; it must be a link, such as `smpkit.testing.EmulatedLink()`, or None")
        self._engine = make_engine(
            device_of(model) if link is None else link.device,
            lead=lead,
            min_bytes=min_bytes,
            host_budget_bytes=host_budget_bytes,
            link=link,
            deadline_seconds=deadline_seconds,
        )
        self._is_counting = self._has_begun = self._has_checked = False
        patch_torch_checkpoint()
        self._hooks = [
            model.register_forward_pre_hook(self._begin_forward),
            model.register_forward_hook(self._end_forward, always_call=True),
        ]
        if (weight := next((param for param in model.parameters() if param.requires_grad), None)) is not None:
            hook = weight.register_post_accumulate_grad_hook(self._see_gradient)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def report(self) -> OffloadReport:
        """Return what was moved, held and waited for so far; each forward of the model begins a step."""
        self._end_step()
        return self._engine.stats.report()

    def close(self) -> None:
        """Offload nothing any more, and free the host memory when the last graph has ended."""
        for hook in self._hooks:
            hook.remove()
        offloader.end_forward(self._engine)
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave everything out: a copy or a pickle of the model has hooks that do nothing."""
        return {"_hooks": []}

    def _begin_forward(self, module: nn.Module, _args: Any) -> None:
        if not self._is_concerned():
            return
        if getattr(module, "_is_replica", False):
            raise UsageError(
                "torch.nn.DataParallel runs a model with offload_activations in several threads, and one thread may"
                " copy its activations",
                hint="start one process per GPU with torchrun, or show this one a single GPU (CUDA_VISIBLE_DEVICES=0)",
            )
        if torch.is_grad_enabled():
            self._end_step()
            self._is_counting = self._has_begun = True
        offloader.begin_forward(self._engine)

    def _end_forward(self, module: nn.Module, _args: Any, output: Any) -> None:
        if not self._is_concerned():
            return
        offloader.end_forward(self._engine)
        if not self._has_checked and module.training and torch.is_grad_enabled() and output is not None:
            self._has_checked = True
            if not self._engine.num_calls:
                warn_user(
                    "offload_activations has no effect: this forward called no checkpointed layer in eager mode; use"
                    " torch.utils.checkpoint, smp.checkpoint, or gradient_checkpointing_enable() of the model"
                )

    def _see_gradient(self, _weight: torch.Tensor) -> None:
        self._hooks.pop().remove()  # of the first weight: the first gradient tells
        if not self._has_begun:
            warn_user(
                "offload_activations has no effect: the model got a gradient, but its forward has not been called; give"
                " it the module that is called: of a LightningModule, what its training_step calls"
            )

    def _is_concerned(self) -> bool:
        # A copy has no hooks; and a forward that backward runs again keeps nothing, and may end by no hook.
        return bool(self._hooks) and torch._C._current_graph_task_id() == -1

    def _end_step(self) -> None:
        if self._is_counting:
            self._is_counting = False
            self._engine.end_step()


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
        self.engine = make_engine(
            state.device,
            horizon=horizon,
            deadline_seconds=cfg.timeout_seconds,
            rank=state.rank,
            num_sharers=state.local_size,
        )
        self.engine.on_stall = _record_stall
        self._has_checked = False
        install(self.engine)
        patch_torch_checkpoint()
        if _close_engine not in state.reset_hooks:
            state.reset_hooks.append(_close_engine)

    def begin_microbatch(self, index: int) -> None:
        self.engine.begin_microbatch(index)

    def end_step(self, step: StepProgress) -> None:
        """Close the step's statistics; after the first step that trains, warn if there is nothing to offload."""
        _record(self.engine.end_step())
        if step.total_backwards and not self._has_checked:
            self._has_checked = True
            if not self._any_layer_is_checkpointed():
                warn_user(
                    "offload_activations has no effect: no layer is checkpointed; "
                    "call smp.set_activation_checkpointing(layers) or smp.checkpoint(layer, ...)",
                )

    def abandon_step(self, error: BaseException) -> None:  # noqa: ARG002 - that of all parts
        self.engine.abandon_step()

    def _any_layer_is_checkpointed(self) -> bool:
        """Return whether any rank of this pipeline has checkpointed layers. Collective over the pipeline, once."""
        # Layers with `strategy="auto"` count although all of them may be kept.
        marked = sum(isinstance(ModuleCall.of(part).checkpointing, ModuleCheckpoint) for part in self._module.modules())
        num_checkpointed = torch.tensor([self.engine.num_calls + marked], device="cpu")
        if state.pp_size > 1:
            group = state.process_group(CommGroup.PP_GROUP)
            with waiting("the first step with offloading", group):
                dist.all_reduce(num_checkpointed, group=group)
        return bool(num_checkpointed.item())


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
    return offloading.engine.stats.report()


def _record(step: StepReport) -> None:
    """Record a step's figures as events, if events are recorded."""
    if (current_recorder := recorder.current_recorder()) is not None:
        at_ns = time.perf_counter_ns()
        for name, count in (
            ("out", step.bytes_out),
            ("back", step.bytes_back),
            ("peak on device", step.peak_device_bytes),
            ("peak on host", step.peak_host_bytes),
            ("kept for want of host memory", step.kept_bytes),
        ):
            current_recorder.on_counter(f"offload {name}, bytes", count, at_ns)
        seconds: defaultdict[str, float] = defaultdict(float)
        for stall in step.stalls:
            seconds[stall.layer] += stall.seconds
        for layer, stalled in seconds.items():
            current_recorder.on_counter(f"offload stall of {layer}, ns", round(1e9 * stalled), at_ns)


def _record_stall(label: str, start: recorder.Timestamp, end: recorder.Timestamp) -> None:
    if (current_recorder := recorder.current_recorder()) is not None:
        current_recorder.on_work(f"{STALL}{label}", start, end)


def _close_engine() -> None:
    if isinstance(engine := install(KEEPING), ActivationEngine):
        engine.close()
