"""Train a language model whose weights and optimizer state do not fit the device; run it with `python train.py`.

It takes as many slices as the plan needs to stay within `--device-budget-mib`, and shows what was planned and what was
measured. Without a GPU the CPU plays the device, and what would lie on it is counted.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from dataclasses import replace
from pathlib import Path

import torch
from accounting import DeviceMeter
from torch import Tensor, nn
from torch.nn import functional

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.plan.offload.model import OffloadedModel, Update, device_peak_bytes, host_peak_bytes
from smpkit.torch.offload.emulated import EmulatedLink

MIB = 2**20
BYTES = 256  # the vocabulary


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device-budget-mib", type=float, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


class Embedding(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(BYTES, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = max(1, width // 64)

    def forward(self, value: Tensor) -> Tensor:
        parts = self.mix(self.norms[0](value)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        value = value + self.out(attended.transpose(1, 2).flatten(2))
        return value + self.narrow(functional.gelu(self.wide(self.norms[1](value))))


def planned_device_bytes(plan: OffloadedModel) -> float:
    """Return what the plan says of the blocks, and the loss outside the model: scores, their softmax and gradient."""
    return device_peak_bytes(plan) + 3 * plan.num_tokens * BYTES * plan.number_bytes


def choose_slices(planned: OffloadedModel, budget_bytes: float) -> OffloadedModel:
    """Return the plan with the fewest slices that stays within the budget; no layer is cut."""
    for num_slices in range(1, planned.layers + 1):
        largest = -(-planned.layers // num_slices)
        plan = replace(planned, num_slices=num_slices, imbalance=largest * num_slices / planned.layers)
        if planned_device_bytes(plan) <= budget_bytes:
            return plan
    raise SystemExit(f"even one layer at a time needs {planned_device_bytes(plan) / MIB:.1f} MiB; give a larger budget")


def warm_up(device: torch.device) -> None:
    """Train a tiny model, so that code, kernels and threads, which every process needs once, are there."""
    network = nn.Sequential(Embedding(64, 1), Block(64), nn.Linear(64, BYTES))
    links = (EmulatedLink(), EmulatedLink()) if device.type == "cpu" else None
    model = OffloadModel(network, device, checkpoint_activation=True, links=links)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, max_grad_norm=1.0)
    for _ in range(2):
        model(torch.zeros(2, 1, dtype=torch.long)).logsumexp(-1).sum().backward()
        optimizer.step()
    model.synchronize()


def main() -> None:
    options = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    warm_up(device)
    before = resident_bytes()
    torch.manual_seed(0)
    network = nn.Sequential(
        Embedding(options.width, options.length),
        *[Block(options.width) for _ in range(options.layers)],
        nn.Linear(options.width, BYTES),
    )
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    budget = options.device_budget_mib * MIB
    plan = choose_slices(
        OffloadedModel(
            num_parameters=num_parameters,
            num_slices=1,
            num_tokens=options.batch * options.length,
            num_microbatches=options.microbatches,
            num_layers=options.layers,
            width=options.width,
            number_bytes=4,
        ),
        budget,
    )
    state_mib = num_parameters * 12 / MIB  # fp32 weights and both moments of AdamW
    print(f"{num_parameters / 1e6:.1f} million parameters: weights and AdamW's state take {state_mib:.1f} MiB")
    print(f"device budget {budget / MIB:.1f} MiB: {plan.num_slices} slices, {plan.num_microbatches} microbatches")

    model = OffloadModel(
        network,
        device,
        num_slices=plan.num_slices,
        checkpoint_activation=True,
        num_microbatches=plan.num_microbatches,
        # With links of its own the CPU plays a device; without, slices would compute where their weights rest.
        links=(EmulatedLink(), EmulatedLink()) if device.type == "cpu" else None,
    )
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=options.learning_rate, max_grad_norm=1.0)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    meter = DeviceMeter(device, model)
    started, losses = time.perf_counter(), []
    for step in range(options.steps):
        starts = torch.randint(0, len(text) - options.length - 1, (options.batch,)).tolist()
        tokens = torch.stack([text[start : start + options.length + 1] for start in starts])
        with meter:
            scores = model(tokens[:, :-1])
            loss = functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten().to(device))
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f}  gradient norm {optimizer.grad_norm:.2f}")
    model.synchronize()
    seconds = time.perf_counter() - started

    measured = meter.peak_bytes()
    host = resident_bytes() - before - (measured if device.type == "cpu" else 0)
    traffic = model.traffic
    print(f"device  planned {planned_device_bytes(plan) / MIB:6.1f} MiB  measured {measured / MIB:6.1f} MiB")
    print(
        f"host    planned {host_peak_bytes(plan, Update.JUST_IN_TIME) / MIB:6.1f} MiB  measured {host / MIB:6.1f} MiB"
    )
    print(f"        measured beyond the {before / MIB:.0f} MiB that Python and torch hold after a warm-up")
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        print("        with freed memory that glibc keeps; MALLOC_MMAP_THRESHOLD_=65536 leaves it out")
    print(
        f"per step: weights in {traffic.weights_in / options.steps / MIB:.1f} MiB, "
        f"gradients out {traffic.gradients_out / options.steps / MIB:.1f} MiB, {seconds / options.steps:.2f} s"
    )
    if measured > budget:
        raise SystemExit(f"the device's budget of {budget / MIB:.1f} MiB was exceeded")


def resident_bytes() -> int:
    """Return the most memory that this process has held."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux; its `ru_maxrss` begins with what the process held that started this one
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
