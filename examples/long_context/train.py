"""Train on sequences as long as memory allows: `smpkit run examples/long_context/job.yaml`."""

import argparse
import re
import sysconfig
import time
from pathlib import Path

import torch
from model import SMALL, LongLlama, Shape

import smpkit.torch as smp

MIB = 2**20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("small", "large"), default="small")
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--recompute", type=int, choices=(0, 1), default=1)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    return parser.parse_known_args()[0]  # a launcher may add arguments of its own


@smp.step
def train_step(model: smp.DistributedModel, tokens: torch.Tensor) -> torch.Tensor:
    loss = model(tokens)
    model.backward(loss)
    return loss


def long_texts(sequence: int, count: int) -> torch.Tensor:
    """Return bytes of the standard library, `[count, sequence + 1]`."""
    text, needed = b"", count * (sequence + 1)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= needed:
            break
    return torch.frombuffer(bytearray(text[:needed]), dtype=torch.uint8).long().view(count, -1)


def peak_bytes() -> int:
    """Return the most memory that this process has taken: of its GPU, or of the host where the CPU is the device."""
    if smp.state.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def main() -> None:
    arguments = parse_arguments()
    smp.init()
    torch.manual_seed(0)
    texts = long_texts(arguments.sequence, arguments.steps * smp.dp_size())
    before = peak_bytes()

    module = LongLlama(SMALL if arguments.model == "small" else Shape(), recompute=bool(arguments.recompute))
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate))
    began, losses = time.perf_counter(), list[float]()
    for step in range(arguments.steps):
        optimizer.zero_grad()
        tokens = texts[step * smp.dp_size() + smp.dp_rank()][None].to(smp.state.device)
        losses.append(train_step(model, tokens).reduce_mean().item())
        optimizer.step()
        smp.log({"loss": losses[-1]}, step, mean_over=smp.DP_GROUP)
    seconds = (time.perf_counter() - began) / arguments.steps

    host = smp.offload_report().peak_host_bytes if smp.state.cfg.offload_activations else 0
    # A CPU's memory is the device's and the host's, so what waited on the host is taken off.
    device = peak_bytes() - before - (host if smp.state.device.type == "cpu" else 0)
    if smp.rank() == 0:
        print(f"sequence {arguments.sequence}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {seconds:.1f} s a step")
        print(f"device {device / MIB:.0f} MiB at most, host {host / MIB:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
