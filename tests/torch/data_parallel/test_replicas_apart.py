"""Replicas that train each for itself (`ddp: false`) may have parameters on several of their ranks."""

from __future__ import annotations

import smpkit.torch as smp
from tests.models import MODELS
from tests.ranks import run_ranks
from tests.train import Way, batch, training


def trained(replicas: int) -> tuple[float, list[list[float]]]:
    """Train on the batches of this rank's replica; return the last loss, and the parameters of the root."""
    case = MODELS["parameters of the root"]
    with training(case, Way(2, replicas=replicas, config={"ddp": False})) as of_rank:
        for number in range(3):
            loss = of_rank.step(*batch(case, number, 4, smp.rdp_rank())).reduce_mean().item()
        return loss, [each.tolist() for name, each in sorted(of_rank.parameters()) if "." not in name]


def test_a_parameter_of_the_root_trains_with_its_own_replica() -> None:
    alone = run_ranks(trained, 2, 1)
    both = run_ranks(trained, 4, 2)
    assert len(alone[0][1]) == 3
    assert both[:2] == alone
    assert both[2] == both[3] != alone[0]
