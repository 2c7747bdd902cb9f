"""The plan of the model that runs: what `smpkit plan` would say of it, made by the ranks, which know the model.

Over a pipeline that cuts the model anew, the first rank has traced it and told the others what it found. Elsewhere each
rank knows the sizes of its tensors alone, and the plan says nothing of activations and compute.

So each rank can decide, as `smpkit plan` does. Rank 0 adds it to the plan in the run's folder before the first step,
and when the run ends, which may have made its optimizer late.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import SmpkitError
from smpkit.observe.runs import PLAN, RUN_DIR
from smpkit.observe.summary import KindBytes
from smpkit.plan.decide import Plan, decide
from smpkit.plan.memory import ModelFacts, half_of
from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.optimizers import OPTIMIZERS
from smpkit.plan.speed import Speed
from smpkit.plan.tune.calibration import CALIBRATION, measured_flops
from smpkit.plan.tune.instances import published_flops
from smpkit.plan.tune.predict import as_divided
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import WrappedModel, state
from smpkit.torch.placement.facts import model_facts
from smpkit.torch.placement.trace import measure_units
from smpkit.torch.placement.units import units_of

_SPEED: Final = Speed(150e12, LinkSpeed(25e9, 25e9))
"""What `smpkit plan` assumes; of memory only what offloading keeps on the device depends on it."""

_MORE_STATES: Final = ("momentum", "amsgrad", "centered")
"""Options for which torch's optimizers keep more than `OPTIMIZERS` says."""

_latest: tuple[ModelFacts, ModelParallelConfig, str, Plan | None] | None = None
"""The latest plan, behind what it was made for."""
_own_facts: WeakKeyDictionary[WrappedModel, ModelFacts] = WeakKeyDictionary()
"""Of models that no pipeline has traced."""


def begin_plan(model: WrappedModel) -> None:
    """Plan a model that is about to take its first step, in a run with a folder; all its ranks call this."""
    if not os.environ.get(RUN_DIR):
        return
    if model.pipeline is None:
        root = model.module
        _own_facts[model] = model_facts(root, measure_units(root, units_of(root), None), {})
    write_plan()


def planned() -> KindBytes | None:
    """Return what the plan expects this rank to hold; None where nothing is known of the model."""
    plan = _plan()
    if plan is None:
        return None
    memory = plan.memory[state.pp_rank]
    return KindBytes(
        weights=memory.parameters_bytes + memory.gathered_bytes,
        gradients=memory.gradients_bytes,
        states=memory.optimizer_bytes + memory.masters_bytes,
        activations=memory.activations_bytes or 0,
        offloaded=memory.host_bytes,
    )


def write_plan() -> None:
    """Add the stages to the plan in the run's folder, on rank 0; nothing that goes wrong here may end a job."""
    folder = os.environ.get(RUN_DIR)
    if not folder or state.rank:
        return
    plan = _plan()
    if plan is None or plan.assignment is None or plan.model is None:
        return
    path = Path(folder, PLAN)
    with suppress(OSError, ValueError):
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        stages = [
            {"units": list(plan.assignment.names(stage)), **asdict(memory), "total_bytes": memory.total_bytes}
            for stage, memory in enumerate(plan.memory)
        ]
        facts: dict[str, Any] = {"model": plan.model.name, "traced": plan.model.traced, "optimizer": _optimizer()}
        part = path.with_name(f".{PLAN}.{os.getpid()}")
        part.write_text(json.dumps({**known, **facts, "stages": stages}, indent=2) + "\n", encoding="utf-8")
        part.replace(path)


def flops_of_step() -> float | None:
    """Return what forward and backward of all ranks compute in a step, without recomputation; None if unknown."""
    facts = _facts()
    if facts is None or not facts.traced:
        return None
    pipelines = state.tp_size * state.rdp_size
    return 3.0 * sum(cost.flops for cost in facts.costs) * state.cfg.microbatches * pipelines


def peak() -> tuple[float, str] | None:
    """Return the FLOP/s of a rank's device at its peak, and their source in words that follow "54% of".

    None if nobody has measured or published them.
    """
    half = half_of(state.cfg)
    # `runs/<run>` lies beside the job file, and a calibration may, too.
    folder = os.environ.get(RUN_DIR)
    measured = measured_flops(Path(folder).absolute().parent.parent, half) if folder else None
    if measured is not None:
        return measured, f"the peak in {CALIBRATION}"
    if devices.is_asynchronous(state.device) and (known := published_flops(devices.device_name(state.device), half)):
        model, flops = known
        return flops, f"the published peak of {model}"
    return None


def _facts() -> ModelFacts | None:
    model = state.model
    if model is None:
        return None
    facts: ModelFacts | None = _own_facts.get(model) if model.pipeline is None else model.pipeline.facts
    return facts


def _plan() -> Plan | None:
    """Return the plan, made once for each model and optimizer; None if one of them is not known well enough."""
    global _latest  # noqa: PLW0603
    facts, cfg, optimizer = _facts(), state.cfg, _optimizer()
    if facts is None or optimizer is None:
        return None
    # The objects themselves: after `smp.shutdown()` another model's facts may lie where these did.
    if _latest is None or _latest[0] is not facts or _latest[1] is not cfg or _latest[2] != optimizer:
        try:
            model = as_divided(facts, cfg)
            # Where the units of a pipeline are: a checkpoint may have told.
            assignment = state.model and state.model.pipeline and state.model.pipeline.assignment
            placed = assignment.partition_of if assignment else None
            plan = decide(cfg, state.size, model, _SPEED, optimizer, placed=placed)
        except SmpkitError:
            plan = None
        _latest = facts, cfg, optimizer, plan
    return _latest[3]


def _optimizer() -> str | None:
    """Return the optimizer's name in plans; None for one of which they do not know what it keeps."""
    if state.optimizer is None:
        return "sgd"
    names = (base.__name__.lower() for base in type(state.optimizer.optimizer).__mro__)  # FusedAdam is torch's Adam
    name = next((name for name in names if name in OPTIMIZERS), None)
    used = {key for group in state.optimizer.param_groups for key in _MORE_STATES if group.get(key)}
    return "momentum" if name == "sgd" and used == {"momentum"} else None if used else name
