"""`smpkit plan` for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from smpkit.cli import _plan_offload, _plan_values
from smpkit.cli._planned import Planned

__all__ = ["plain"]


def plain(made: Planned) -> dict[str, Any]:
    from smpkit.plan.mesh import CommGroup

    mesh, schedule = made.plan.mesh, made.plan.timeline.schedule
    result: dict[str, Any] = {
        "name": made.world.name or None,
        "ranks": made.world.ranks,
        "hosts": made.world.hosts,
        "mesh": {"pipeline": mesh.pp_size, "tensor": mesh.tp_size, "data": mesh.rdp_size, "placement": mesh.strategy},
        "groups": {
            kind.value.removesuffix("_GROUP").lower(): [list(group) for group in mesh.groups(kind)]
            for kind in (CommGroup.MP_GROUP, CommGroup.DP_GROUP, CommGroup.TP_GROUP, CommGroup.PP_GROUP)
        },
        "schedule": {
            "name": schedule.name,
            "microbatches": schedule.num_microbatches,
            "bubble": made.plan.timeline.bubble,
            "peak_live_microbatches": list(made.plan.timeline.peak_live_microbatches),
            "actions": [" ".join(map(str, actions)) for actions in schedule.actions],
        },
    }
    return result if made.plan.model is None else {**result, **_plain_model(made)}


def _plain_model(made: Planned) -> dict[str, Any]:
    assert made.plan.assignment is not None
    assert made.plan.model is not None
    stages = []
    for stage, memory in enumerate(made.plan.memory):
        plain: dict[str, Any] = {"units": list(made.plan.assignment.names(stage))}
        plain.update({name: getattr(memory, name) for name in memory.__dataclass_fields__})
        plain["total_bytes"] = memory.total_bytes
        plain["fits"] = None if made.limit_gib is None else made.fits(stage)
        stages.append(plain)
    shared = sorted({name for unit in made.plan.model.units for name in unit.cost.shared})
    offload = None
    if made.plan.forecasts and made.speed is not None:
        offload = _plan_offload.plain(made.plan.forecasts, made.world.parameters, made.speed)
    return {
        "model": made.plan.model.name,
        "traced": made.plan.model.traced,
        "optimizer": made.optimizer,
        "memory_gib": made.limit_gib,
        "compute_imbalance": made.plan.assignment.compute_imbalance,
        "shared_parameters": shared,
        "stages": stages,
        "graph": None if made.plan.recorded is None else _plan_values.plain(made.plan.recorded),
        "offload": offload,
        "features": [asdict(each) for each in made.features],
        "automatic": None if made.automatic is None else {name: str(each) for name, each in made.automatic.items()},
    }
