"""Does `smpkit tune` order configurations as they are? Predict and run a GPT over four ranks in many configurations.

Four ranks share fewer cores on most machines, so the blocks of this GPT sleep, in proportion to the samples that they
get, and compute little: then stages run beside each other as on machines of their own. What else a step takes is real:
gloo, the runtime, partition and schedule. The machine's facts are those that `smpkit calibrate` measures at the start:
the rate of compute is that of the sleep and of matrix products of ranks that share cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from smpkit.cli.calibrate import _measure
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.tune.calibration import read_calibration
from smpkit.plan.tune.machine import from_calibration
from smpkit.plan.tune.predict import Job, Prediction, predict
from smpkit.testing import run_ranks
from smpkit.torch.describe import describe

RANKS, SAMPLES = 4, 16
WIDTH, CONTEXT, LAYERS, VOCABULARY = 128, 32, 8, 32
FORWARD_SECONDS = 0.008
"""Of a block, for each sample; backward takes twice as long."""
WARM_UPS = 3


class SleepOnWay(torch.autograd.Function):
    """Sleeps in forward, and in the half of backward that makes the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SleepForWeight(torch.autograd.Function):
    """Hands a weight on, and sleeps in the half of backward that makes its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Block(nn.Module):
    """A transformer block that also sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, value: Tensor) -> Tensor:
        samples, tokens, _ = value.shape
        if value.device.type == "cpu" and not smp.is_tracing():
            seconds = samples * FORWARD_SECONDS
            value = SleepOnWay.apply(value, seconds)
            value = value * SleepForWeight.apply(self.weight, seconds)
        query, key, content = self.qkv(self.norm(value)).view(samples, tokens, 3, 4, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, content, is_causal=True)
        value = value + self.out(attended.transpose(1, 2).reshape(samples, tokens, WIDTH))
        return value + self.down(functional.gelu(self.up(self.norm_2(value))))


class Gpt(nn.Module):
    """A small GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.embed(tokens)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


def build() -> Any:
    """Return the model and a microbatch of one sample, for the description."""
    return Gpt(), torch.zeros(1, CONTEXT, dtype=torch.int64)


def configurations() -> Iterator[dict[str, Any]]:
    """Yield what is compared."""
    for rounds in (4, 8, 16):
        for name in ("interleaved", "simple", "zero_bubble"):
            yield _config(4, rounds, pipeline=name)
        yield _config(4, rounds, virtual_pipeline_degree=2)
    for rounds in (2, 4, 8):
        for name in ("interleaved", "simple", "zero_bubble"):
            yield _config(2, rounds, pipeline=name)
    for rounds in (4, 8):
        yield _config(2, rounds, virtual_pipeline_degree=2)
    yield _config(2, 4, shard_optimizer_state=True)
    for rounds in (1, 2, 4):
        yield _config(1, rounds)
    yield _config(1, 1, shard_optimizer_state=True)
    yield _config(4, 2)


def _config(stages: int, rounds: int, **more: Any) -> dict[str, Any]:
    if more.get("pipeline") == "simple":
        more["active_microbatches"] = rounds
    return {"pipeline_parallel_degree": stages, "microbatches": rounds, "ddp": True, **more}


@smp.step
def _train(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    model.backward(loss)
    return loss


def measure(config: dict[str, Any], steps: int) -> float:
    """Return the median seconds of a step, on each rank."""
    smp.init(config)
    torch.manual_seed(0)
    model = smp.DistributedModel(Gpt())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    tokens = torch.zeros(SAMPLES // smp.dp_size(), CONTEXT, dtype=torch.int64)
    times = []
    for _ in range(WARM_UPS + steps):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        _train(model, tokens)
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UPS:])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each (default: %(default)s)")
    parser.add_argument("--only", type=int, help="the first so many configurations")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "calibration.json")
        _measure(RANKS, 10, path)
        machine = from_calibration(read_calibration(path))
    model = describe(build)
    block = next(unit.cost for unit in model.units if unit.cost.name == "blocks.1")
    awake = block.flops / machine.single_flops * RANKS / machine.parallel_ranks
    rate = block.flops / (FORWARD_SECONDS + awake)
    machine = replace(machine, single_flops=rate, parallel_ranks=RANKS)
    job = Job({1: model}, machine, RANKS, SAMPLES)
    rows = []
    for config in list(configurations())[: options.only]:
        made, _ = ModelParallelConfig.from_sources(config, None)
        found = predict(made, job)
        assert isinstance(found, Prediction), found
        measured = max(run_ranks(measure, RANKS, config, options.steps, timeout=300))
        rows.append({"config": config, "predicted": found.step_seconds, "measured": measured})
        print(f"{found.step_seconds:.3f} {measured:.3f} {config}", file=sys.stderr, flush=True)
    print(json.dumps(_summary(rows)) if options.json else "\n".join(_table(rows)))
    return 0


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    chosen = min(rows, key=lambda row: row["predicted"])
    best = min(row["measured"] for row in rows)
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    return {
        "configurations": len(rows),
        "spearman": spearman([row["predicted"] for row in rows], [row["measured"] for row in rows]),
        "chosen": chosen["config"],
        "chosen_over_best": chosen["measured"] / best,
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "rows": rows,
    }


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of ranks, ties at their mean."""
    return statistics.correlation(_ranked(one), _ranked(other))


def _ranked(values: Sequence[float]) -> list[float]:
    return [sum(each < value for each in values) + (sum(each == value for each in values) - 1) / 2 for value in values]


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    found = _summary(rows)
    yield "| predicted | measured | configuration |\n|---|---|---|"
    for row in sorted(rows, key=lambda row: row["measured"]):
        words = ", ".join(f"{key} {value}" for key, value in row["config"].items() if key != "ddp")
        yield f"| {row['predicted']:.3f} s | {row['measured']:.3f} s | {words} |"
    yield ""
    yield f"{found['configurations']} configurations, Spearman {found['spearman']:.3f}; the chosen one takes"
    yield f"{found['chosen_over_best']:.3f} × the best measured; median error {found['median_error']:.1%}, largest "
    yield f"{found['largest_error']:.1%}."


if __name__ == "__main__":
    sys.exit(main())
