"""What ranks do, each with a simulated device: the suite's own tests, run with `RANKS_ON_SIM` under several orders.

Each of them compares with plain PyTorch; here the ranks' work is asynchronous, and a race is an error.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

import smpkit.torch as smp
from smpkit.torch.offload.accelerator import AcceleratorLink
from tests.ranks import RANKS_ON_SIM
from tests.sim.on_sim import needs_sim, run_on_sim

_ROOT = Path(__file__).parents[2]

_PIPELINE, _TRANSPARENCY = "tests/torch/pipeline", "tests/transparency"
_BACKGROUND = "tests/torch/checkpoints/test_background.py::test_the_files_are_those_of_a_blocking_save"
QUICK = {
    "lazy:0": [
        f"{_TRANSPARENCY}/test_pipeline.py",
        f"{_TRANSPARENCY}/test_sharded_state.py::test_over_a_pipeline_with_a_tied_weight",
        f"{_BACKGROUND}[bf16]",
    ],
    "random:1": [
        f"{_TRANSPARENCY}/test_pipeline_routing.py",
    ],
    "copies:0": [
        f"{_PIPELINE}/test_transport.py",
        f"{_PIPELINE}/test_channels.py",
        "tests/torch/data_parallel/test_reducer.py",
    ],
}
"""For the default suite: pipelines over 2 and 4 devices, sharded states and a tied weight; messages one by one, through
channels and the hosts, steps that leave their record or are given up; reductions; weights that are trained on while a
thread waits for their copies and writes them. Kinds of parallelism beside these: `tests.sim.scenarios`."""
_HAS_NO_PLACE_HERE = (
    *("full", "made_before_it_arrives"),  # as on a CPU
    *("gpus_only", "models_train_over_channels", "delays_change_nothing"),  # of models that are trained above
    *("sparse", "buffers_follow"),  # the device has no sparse tensors; batch norm without a gradient of its input
    *("reentrant", "different_models", "does_not_come", "nobody_sends", "overlap_starts_them"),  # errors, and counts
)


def run(order: str, *tests: str, timeout: float) -> None:
    needs_sim()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", *tests]
    environment = {**os.environ, RANKS_ON_SIM: order}
    done = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:]


FULL = {
    "random:2": [f"{_TRANSPARENCY}/{each}.py" for each in ("test_pipeline_routing", "test_pipeline_schedules")],
    "copies:0": [f"{_TRANSPARENCY}/test_pipeline_failures.py", _BACKGROUND],
    "compute:0": [f"{_TRANSPARENCY}/test_sharded_state.py"],
    "random:1": [
        _BACKGROUND,
        f"{_TRANSPARENCY}/test_tensor_parallel.py::test_other_schedules_of_a_pipeline_equal_plain_pytorch",
    ],
}
"""With `full`. What is left out makes tensors on the CPU inside a model, which plain PyTorch refuses, too."""
ONLY_ON_THE_CPU = "not models_of_every_shape and not autocast"


@pytest.mark.parametrize("order", QUICK)
def test_ranks_train_without_races(order: str) -> None:
    run(order, *QUICK[order], "-k", " and ".join(f"not {each}" for each in _HAS_NO_PLACE_HERE), timeout=170)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("order", FULL)
def test_more_ranks_train_without_races(order: str) -> None:
    run(order, *FULL[order], "-m", "not full", "-k", ONLY_ON_THE_CPU, timeout=1200)


# --- everything at once: the example on eight ranks -----------------------------------------------------------------


def train_gpt2_3d(offload: bool) -> tuple[list[float], list[torch.Tensor], int]:
    """Return losses, this rank's gradients, and how many bytes left its device; pipeline 2, tensor 2, data 2."""
    sys.path.insert(0, str(_ROOT / "examples/gpt2_3d"))
    memory, train = (importlib.import_module(name) for name in ("memory", "train"))
    AcceleratorLink.min_bytes = 0
    options = {"offload_activations": True, "activation_loading_horizon": 2} if offload else {}
    degrees = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "microbatches": 4, "ddp": True}
    smp.init({**degrees, "delayed_parameter_initialization": True, **options})
    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=True):
        gpt2 = GPT2LMHeadModel(train.configuration(argparse.Namespace(context=16, width=16, layers=4)))
    model = smp.DistributedModel(gpt2)
    transformer: Any = model.get_module().transformer
    smp.set_activation_checkpointing(transformer.seq_layers, strategy="each")
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    generator = torch.Generator().manual_seed(smp.dp_rank())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        tokens = torch.randint(256, (8, 16), generator=generator)
        losses.append(train.train_step(model, tokens).reduce_mean().item())
        optimizer.step()
    gradients = [each.grad.clone() for _, each in model.local_named_parameters() if each.grad is not None]
    offloaded = int(memory.Held.by_this_rank(model, optimizer).offloaded)
    smp.shutdown()
    return losses, gradients, offloaded


@pytest.mark.full
@pytest.mark.timeout(600)
def test_eight_ranks_of_all_kinds_offload_without_races() -> None:
    plain = run_on_sim(train_gpt2_3d, False, size=8, order=("lazy", 0), timeout=280)
    for order in (("lazy", 0), ("random", 1)):
        ours = run_on_sim(train_gpt2_3d, True, size=8, order=order, timeout=280)
        for (losses, gradients, offloaded), (expected, theirs, _) in zip(ours, plain, strict=True):
            assert losses == expected
            assert all(map(torch.equal, gradients, theirs))
            assert offloaded > 0
