"""Train a language model whose weights and optimizer state do not fit the device; run it with `python train.py`.

It takes as many slices as the plan needs to stay within `--device-budget-mib`. Without a GPU slices compute where their
weights rest, and there is nothing to measure on a device.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from model import BYTES, make_model
from torch.nn import functional

import smpkit.torch as smp
from smpkit import OffloadModel, OffloadOptimizer
from smpkit.plan.offload.model import OffloadedModel, device_peak_bytes

MIB = 2**20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device-budget-mib", type=float, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


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


def main() -> None:
    options = parse_arguments()
    smp.init()  # for `smp.log` alone
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    network = make_model(options.width, options.layers, options.length)
    whole = OffloadedModel(
        num_parameters=sum(weight.numel() for weight in network.parameters()),
        num_slices=1,
        num_tokens=options.batch * options.length,
        num_microbatches=options.microbatches,
        num_layers=options.layers,
        width=options.width,
        number_bytes=4,
    )
    budget = options.device_budget_mib * MIB
    plan = choose_slices(whole, budget)
    print(f"{plan.num_parameters / 1e6:.1f} million parameters in {options.layers} layers")
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
    for step in range(options.steps):
        starts = torch.randint(0, len(text) - options.length - 1, (options.batch,)).tolist()
        tokens = torch.stack([text[start : start + options.length + 1] for start in starts])
        optimizer.zero_grad()
        scores = model(tokens[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten().to(device))
        loss.backward()
        optimizer.step()
        smp.log({"loss": loss, "gradient norm": optimizer.grad_norm}, step)
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}  gradient norm {optimizer.grad_norm:.2f}")
    model.synchronize()

    print(f"device planned  {planned_device_bytes(plan) / MIB:6.1f} MiB")
    if device.type == "cuda":
        print(f"device measured {torch.cuda.max_memory_allocated(device) / MIB:6.1f} MiB")


if __name__ == "__main__":
    main()
