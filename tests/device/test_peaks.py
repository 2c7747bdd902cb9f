"""Peaks on the device are those of the formulas, and stay the same from step to step."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from benchmarks.activation_offload.blocks import Decoder, train_step
from smpkit import OffloadModel, OffloadOptimizer, offload_activations
from tests.device.device import gpu, in_device_time, scaled
from tests.device.ranks import run_on_gpu
from tests.torch import steps

_WIDTH, _TOKENS, _LAYERS = scaled(1024), scaled(4096), 12
_BOUNDARY = 2 * _WIDTH * _TOKENS
_STEPS = scaled(50)

Note = Callable[[str, Any], None]


def peak_of(step: Callable[[], object]) -> int:
    """Return the most that is allocated in a step, above what is when it begins."""
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    step()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


def workspace_bytes() -> int:
    """Return what cuBLAS takes of torch's memory by itself, so that a bound of a peak is about ours.

    That is a workspace for each thread that calls cuBLAS and each stream: 32 MiB on Hopper, for the thread of forward
    and for autograd's. They stay, so call this before what is measured.
    """
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    layer = nn.Linear(256, 256, device=gpu())
    layer(torch.ones(64, 256, device=gpu())).sum().backward()
    del layer
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated() - before


@pytest.mark.parametrize("lead", [1, 4])
@in_device_time()
def test_no_more_boundaries_are_there_than_are_on_their_way(lead: int, record_property: Note) -> None:
    torch.manual_seed(0)
    model = Decoder(_WIDTH, 16, _LAYERS).to(gpu(), torch.bfloat16)
    model.is_checkpointed = True
    # Gradients of weights grow by three boundaries per block in backward: the peak would be at its end, with either.
    model.requires_grad_(False)
    x = torch.randn(1, _TOKENS, _WIDTH, device=gpu(), dtype=torch.bfloat16, requires_grad=True)
    step = partial(train_step, model, x)
    step()
    theirs = peak_of(step)
    with offload_activations(model, lead=lead) as offload:
        for _ in range(3):
            step()
        ours = peak_of(step)
        held = offload.report().steps[-1].peak_device_bytes
    record_property("plain MiB", theirs / 2**20)
    record_property("offloaded MiB", ours / 2**20)
    record_property("boundaries held", held / _BOUNDARY)
    assert held <= (lead + 2) * _BOUNDARY
    # Of plain checkpointing's boundaries, the first is the caller's own input, which neither frees.
    assert theirs - ours >= (_LAYERS - 1 - (lead + 2)) * _BOUNDARY


@pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])
@in_device_time()
def test_an_offloaded_model_takes_two_slices_and_what_it_computes(checkpoint: bool, record_property: Note) -> None:
    workspaces = workspace_bytes()
    gc.collect()
    before = torch.accelerator.memory_allocated()
    torch.manual_seed(0)
    sizes = (1024, 2048, 1024, 4096, 1024, 1024)  # the largest slice has 1024 x 4096 weights
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)]
    model = OffloadModel(nn.Sequential(*layers), gpu(), num_slices=len(layers), checkpoint_activation=checkpoint)
    optimizer = OffloadOptimizer(model, lr=1e-4)
    x = torch.randn(128, 1024, device=gpu())
    activation_bytes = 4 * 128 * sum(sizes)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
    peak = torch.accelerator.memory_allocated() - before + peak_of(step)
    largest = 4 * 1024 * 4096
    record_property("cuBLAS workspaces MiB", workspaces / 2**20)
    record_property("peak MiB", peak / 2**20)
    record_property("two slices MiB", 4 * largest / 2**20)
    # Two slices' weights and gradients. Activations come with their gradients.
    assert peak <= 4 * largest + 4 * activation_bytes


@pytest.mark.parametrize("kind", ["activations", "model"])
@in_device_time()
def test_reserved_memory_is_constant_over_fifty_steps(kind: str, record_property: Note) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, _TOKENS, _WIDTH, device=gpu(), dtype=torch.bfloat16)
    inner = Decoder(_WIDTH, 16, 6)
    inner.is_checkpointed = True
    if kind == "activations":
        decoder = inner.to(gpu(), torch.bfloat16)
        offload_activations(decoder)
        step: Callable[[], object] = partial(train_step, decoder, x)
    else:
        model = OffloadModel(
            nn.Sequential(*inner.layers), gpu(), num_slices=6, checkpoint_activation=True, dtype=torch.bfloat16
        )
        optimizer = OffloadOptimizer(model, lr=1e-4)

        def step() -> None:
            model(x).float().square().mean().backward()
            optimizer.step()

    for _ in range(5):
        step()
    torch.accelerator.synchronize()
    reserved = []
    for _ in range(_STEPS):
        step()
        reserved.append(torch.accelerator.memory_reserved())
    torch.accelerator.synchronize()
    record_property("reserved MiB", reserved[-1] / 2**20)
    record_property("inactive split MiB", torch.accelerator.memory_stats()["inactive_split_bytes.all.peak"] / 2**20)
    assert set(reserved) == {reserved[0]}


@in_device_time()
def reserved_over_steps(options: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return what is reserved, and the peak of what is allocated, after each step of a pipeline."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 8, "ddp": True, **options})
    torch.manual_seed(0)
    model = smp.DistributedModel(
        nn.Sequential(*[nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(8)])
    )
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    reserved, peaks = [], []
    x = torch.randn(_WIDTH, _WIDTH, device=gpu())
    for _ in range(_STEPS):
        torch.accelerator.reset_peak_memory_stats()
        optimizer.zero_grad()
        steps.train_step(model, x)
        optimizer.step()
        reserved.append(torch.accelerator.memory_reserved())
        peaks.append(torch.accelerator.max_memory_allocated())
    smp.shutdown()
    return reserved, peaks


@pytest.mark.parametrize("options", [{}, {"pipeline": "zero_bubble"}, {"virtual_pipeline_degree": 2}], ids=str)
def test_a_pipelines_memory_is_constant_over_fifty_steps(options: dict[str, Any]) -> None:
    for reserved, peaks in run_on_gpu(reserved_over_steps, options, timeout=150):
        settled = _STEPS // 2  # smpkit measures, plans again and tries that first
        assert set(reserved[settled:]) == {reserved[-1]}
        assert set(peaks[settled:]) == {peaks[-1]}
