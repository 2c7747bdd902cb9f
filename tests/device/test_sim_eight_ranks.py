"""Everything at once: a GPT-2 over three kinds of parallelism on eight ranks, each with a simulated device; by default
on four, without data parallelism.

Kinds of parallelism one by one: `tests.device.scenarios.ranks`. Tests of other folders run on this device, too, by a
mark (`tests.chosen_device`) or as whole files (`test_sim_whole_files`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import smpkit.torch as smp
from smpkit.torch.offload import arena, link
from tests.device.on_sim import ORDERS, naming, run_on_sim
from tests.simulated import Order, in_order


@dataclass(frozen=True)
class Sizes:
    """How much a training has to do."""

    ranks: int
    layers: int
    steps: int
    microbatches: int


SMALL = Sizes(ranks=4, layers=2, steps=1, microbatches=2)
LARGE = Sizes(ranks=8, layers=4, steps=3, microbatches=4)


@smp.step
def train_step(model: smp.DistributedModel, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens)["loss"]
    model.backward(loss)
    return loss


def train_gpt2(sizes: Sizes, *, offload: bool) -> tuple[list[float], list[torch.Tensor], int]:
    """Return losses, this rank's gradients, and how many bytes left its device; pipeline 2, tensor 2."""
    link.AcceleratorLink.min_bytes = 0
    arena._SLAB, link._MEASURED_BYTES = 1 << 20, 4096  # type: ignore[misc]
    options = {"offload_activations": True, "activation_loading_horizon": 2} if offload else {}
    degrees = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True}
    others = {"delayed_parameter_initialization": True, "skip_tracing": True}
    smp.init({**degrees, "microbatches": sizes.microbatches, **others, **options})
    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=True):
        sized = {"vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": sizes.layers, "n_head": 4}
        gpt2 = GPT2LMHeadModel(GPT2Config(**sized, bos_token_id=0, eos_token_id=0, use_cache=False))
    model = smp.DistributedModel(gpt2)
    transformer: Any = model.get_module().transformer
    smp.set_activation_checkpointing(transformer.seq_layers, strategy="each")
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    generator = torch.Generator().manual_seed(smp.dp_rank())
    losses = []
    for _ in range(sizes.steps):
        optimizer.zero_grad()
        tokens = torch.randint(256, (2 * sizes.microbatches, 16), generator=generator)
        losses.append(train_step(model, tokens).reduce_mean().item())
        optimizer.step()
    gradients = [each.grad.clone() for _, each in model.local_named_parameters() if each.grad is not None]
    offloaded = smp.offload_report().peak_host_bytes if offload else 0
    smp.shutdown()
    return losses, gradients, offloaded


def train_in_orders(sizes: Sizes, orders: Sequence[Order]) -> int:
    """Train without offloading, then with it in each order; compare, and return how many bytes left this device."""
    offloaded = 0
    with in_order(ORDERS[0]):
        expected, theirs, _ = train_gpt2(sizes, offload=False)
    for order in orders:
        with naming(f"offloading under {order}"), in_order(order):
            losses, gradients, offloaded = train_gpt2(sizes, offload=True)
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
