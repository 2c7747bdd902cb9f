"""Everything at once: the example gpt2_3d on eight ranks, each with a simulated device; by default on four, without
data parallelism.

Kinds of parallelism one by one: `tests.device.scenarios.ranks`. Tests of other folders run on this device, too, by a
mark (`tests.chosen_device`) or as whole files (`test_sim_whole_files`).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

import smpkit.torch as smp
from smpkit.torch.offload import arena, link
from tests.device.on_sim import ORDERS, naming, run_on_sim
from tests.simulated import Order, in_order

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Sizes:
    """How much a training of gpt2_3d has to do."""

    ranks: int
    layers: int
    steps: int
    microbatches: int


SMALL = Sizes(ranks=4, layers=2, steps=1, microbatches=2)
LARGE = Sizes(ranks=8, layers=4, steps=3, microbatches=4)


def train_gpt2_3d(sizes: Sizes, *, offload: bool) -> tuple[list[float], list[torch.Tensor], int]:
    """Return losses, this rank's gradients, and how many bytes left its device; pipeline 2, tensor 2."""
    sys.path.insert(0, str(_ROOT / "examples/gpt2_3d"))
    memory, train = (importlib.import_module(name) for name in ("memory", "train"))
    link.AcceleratorLink.min_bytes = 0
    arena._SLAB, link._MEASURED_BYTES = 1 << 20, 4096  # type: ignore[misc]
    options = {"offload_activations": True, "activation_loading_horizon": 2} if offload else {}
    degrees = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True}
    others = {"delayed_parameter_initialization": True, "skip_tracing": True}
    smp.init({**degrees, "microbatches": sizes.microbatches, **others, **options})
    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=True):
        gpt2 = GPT2LMHeadModel(train.configuration(argparse.Namespace(context=16, width=16, layers=sizes.layers)))
    model = smp.DistributedModel(gpt2)
    transformer: Any = model.get_module().transformer
    smp.set_activation_checkpointing(transformer.seq_layers, strategy="each")
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    generator = torch.Generator().manual_seed(smp.dp_rank())
    losses = []
    for _ in range(sizes.steps):
        optimizer.zero_grad()
        tokens = torch.randint(256, (2 * sizes.microbatches, 16), generator=generator)
        losses.append(train.train_step(model, tokens).reduce_mean().item())
        optimizer.step()
    gradients = [each.grad.clone() for _, each in model.local_named_parameters() if each.grad is not None]
    offloaded = int(memory.Held.by_this_rank(model, optimizer).offloaded)
    smp.shutdown()
    return losses, gradients, offloaded


def train_in_orders(sizes: Sizes, orders: Sequence[Order]) -> int:
    """Train without offloading, then with it in each order; compare, and return how many bytes left this device."""
    offloaded = 0
    with in_order(ORDERS[0]):
        expected, theirs, _ = train_gpt2_3d(sizes, offload=False)
    for order in orders:
        with naming(f"offloading under {order}"), in_order(order):
            losses, gradients, offloaded = train_gpt2_3d(sizes, offload=True)
            assert losses == expected
            assert len(gradients) == len(theirs)
            assert all(map(torch.equal, gradients, theirs))
    return offloaded


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("sizes", "orders"),
    [(SMALL, ORDERS[:1]), pytest.param(LARGE, ORDERS, marks=pytest.mark.slow)],
    ids=["small", "large"],
)
def test_ranks_of_all_kinds_offload_without_races(sizes: Sizes, orders: Sequence[Order]) -> None:
    assert min(run_on_sim(train_in_orders, sizes, orders, size=sizes.ranks, order=None, timeout=580)) > 0
