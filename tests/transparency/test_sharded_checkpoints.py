"""What sharded ranks save, ranks that are sharded otherwise or not at all go on with."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import smpkit.torch as smp
from tests.ranks import run_ranks
from tests.transparency.test_sharded_data_parallel import TOLERANCE, build, run_steps

SHARDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "states": {"shard_optimizer_state": True},
    "halves": {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0},
    "quarters": {"sharded_data_parallel_degree": 4, "sdp_gradient_clipping": 0.0},
}


def start(kind: str) -> tuple[Any, Any]:
    smp.init({"ddp": True, **SHARDED[kind]})
    model = smp.DistributedModel(build())
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))


def weights(model: Any) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    smp.shutdown()
    return found


def save_and_resume(folder: Path) -> list[tuple[str, dict[str, Tensor]]]:
    results = []
    for kind in SHARDED:
        model, optimizer = start(kind)
        run_steps(model, optimizer, range(2))
        smp.save_checkpoint(folder / kind, tag="part")
        smp.save_checkpoint(folder / kind, tag="whole", partial=False)
        run_steps(model, optimizer, range(2, 4))
        results.append((kind, weights(model)))
    for saved, loaded in itertools.permutations(SHARDED, 2):
        model, optimizer = start(loaded)
        smp.resume_from_checkpoint(folder / saved, tag="part")
        run_steps(model, optimizer, range(2, 4))
        results.append((f"{saved} -> {loaded}", weights(model)))
    for saved, loaded in (("halves", "quarters"), ("quarters", "plain")):
        model, optimizer = start(loaded)
        smp.resume_from_checkpoint(folder / saved, tag="whole", partial=False)
        smp.resume_from_checkpoint(folder / saved, tag="part")  # whole files have no optimizer
        run_steps(model, optimizer, range(2, 4))
        results.append((f"{saved} -> {loaded}, whole", weights(model)))
    return results


@pytest.mark.slow
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    for results in run_ranks(save_and_resume, 4, tmp_path, timeout=120):
        _, wanted = results[0]
        for what, found in results:
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{what}: {name}")
