"""`smpkit plan` for programs."""

from __future__ import annotations

from typing import Any

from smpkit.cli import _plan_offload
from smpkit.cli._planned import Plan

__all__ = ["plain"]


def plain(made: Plan) -> dict[str, Any]:
    from smpkit.plan.mesh import CommGroup

    mesh, schedule = made.mesh, made.timeline.schedule
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
            "bubble": made.timeline.bubble,
            "peak_live_microbatches": list(made.timeline.peak_live_microbatches),
            "actions": [" ".join(map(str, actions)) for actions in schedule.actions],
        },
    }
    return result if made.model is None else {**result, **_plain_model(made)}


def _plain_model(made: Plan) -> dict[str, Any]:
    assert made.assignment is not None
    assert made.model is not None
    stages = []
    for stage, memory in enumerate(made.memory):
        plain: dict[str, Any] = {"units": list(made.assignment.names(stage))}
        plain.update({name: getattr(memory, name) for name in memory.__dataclass_fields__})
        plain["total_bytes"] = memory.total_bytes
        plain["fits"] = None if made.limit_gib is None else made.fits(stage)
        stages.append(plain)
    shared = sorted({name for unit in made.model.units for name in unit.cost.shared})
    offload = None
    if made.forecasts and made.speed is not None:
        offload = _plan_offload.plain(made.forecasts, made.world.parameters, made.speed)
    return {
        "model": made.model.name,
        "traced": made.model.traced,
        "optimizer": made.optimizer,
        "memory_gib": made.limit_gib,
        "compute_imbalance": made.assignment.compute_imbalance,
        "shared_parameters": shared,
        "stages": stages,
        "offload": offload,
    }
