"""Train a language model whose weights and optimizer state do not fit the device; run it with `python train.py`.

It takes as many slices as the plan needs to stay within `--device-budget-mib`, and shows what was planned and what was
measured. Without a GPU slices compute where their weights rest, and there is nothing to measure on a device.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from budget import MIB, choose_layers, choose_slices, planned_device_bytes, planned_host_bytes, resident_bytes
from model import make_model, num_parameters
from torch.nn import functional

import smpkit.torch as smp
from smpkit import OffloadModel, OffloadOptimizer
from smpkit.plan.offload.model import OffloadedModel


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device-budget-mib", type=float, default=12)
    parser.add_argument("--host-gib", type=float, help="as many layers as the host's memory holds, not --layers")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    smp.init()  # for `smp.log` alone
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    warm_up(device)
    before = resident_bytes()
    torch.manual_seed(0)

    def planned(layers: int) -> OffloadedModel:
        return OffloadedModel(
            num_parameters=num_parameters(options.width, layers, options.length),
            num_slices=1,
            num_tokens=options.batch * options.length,
            num_microbatches=options.microbatches,
            num_layers=layers,
            width=options.width,
            number_bytes=4,
        )

    layers = choose_layers(planned, options.host_gib * 2**30 - before) if options.host_gib else options.layers
    budget = options.device_budget_mib * MIB
    plan = choose_slices(planned(layers), budget)
    network = make_model(options.width, layers, options.length)
    print(f"{plan.num_parameters / 1e6:.1f} million parameters in {layers} layers")
    print(f"weights and AdamW's state take {plan.num_parameters * 12 / MIB:.1f} MiB")
    print(f"device budget {budget / MIB:.1f} MiB: {plan.num_slices} slices, {plan.num_microbatches} microbatches")

    model = OffloadModel(
        network,
        device,
        num_slices=plan.num_slices,
        checkpoint_activation=True,
        num_microbatches=plan.num_microbatches,
    )
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=options.learning_rate, max_grad_norm=1.0)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started, losses = time.perf_counter(), []
    for step in range(options.steps):
        starts = torch.randint(0, len(text) - options.length - 1, (options.batch,)).tolist()
        tokens = torch.stack([text[start : start + options.length + 1] for start in starts])
        optimizer.zero_grad()
        scores = model(tokens[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten().to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        smp.log({"loss": loss, "gradient norm": optimizer.grad_norm}, step)
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f}  gradient norm {optimizer.grad_norm:.2f}")
    model.synchronize()
    seconds = time.perf_counter() - started

    on_device = f"planned {planned_device_bytes(plan) / MIB:6.1f} MiB"
    if device.type == "cuda":
        measured = torch.cuda.max_memory_allocated(device)
        on_device += f"  measured {measured / MIB:6.1f} MiB"
    host = resident_bytes() - before
    print(f"device  {on_device}")
    print(f"host    planned {planned_host_bytes(plan) / MIB:6.1f} MiB  measured {host / MIB:6.1f} MiB")
    print(f"        measured beyond the {before / MIB:.0f} MiB that Python and torch hold after a warm-up")
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        print("        with freed memory that glibc keeps; MALLOC_MMAP_THRESHOLD_=65536 leaves it out")
    print(f"{seconds / options.steps:.2f} s per step")
    if device.type == "cuda" and measured > budget:
        raise SystemExit(f"the device's budget of {budget / MIB:.1f} MiB was exceeded")


def warm_up(device: torch.device) -> None:
    """Train a tiny model, so that code, kernels and threads, which every process needs once, are there."""
    model = OffloadModel(make_model(64, 1, 1), device, checkpoint_activation=True)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, max_grad_norm=1.0)
    for _ in range(2):
        model(torch.zeros(2, 1, dtype=torch.long)).logsumexp(-1).sum().backward()
        optimizer.step()
    model.synchronize()


if __name__ == "__main__":
    main()
