"""Does `smpkit tune` order configurations as they are? Predict and run a GPT and a T5 over 4 and 8 ranks.

Ranks share fewer cores on most machines, so the blocks of these models sleep, in proportion to what they compute for
the samples that they get, and compute little: then stages run beside each other as on machines of their own. What else
a step takes is real: gloo, the runtime, partition and schedule, and what ranks do awake, for which they do share cores.
The machine's facts are those that `smpkit calibrate` measures at the start; the rate of compute is that of the sleep.

The first configuration is measured once more at the end: what differs is noise.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from benchmarks.common import table
from benchmarks.pipeline.models import Block, GPTSize, SleepForWeight, SleepOnWay
from smpkit.cli.calibrate import _measure
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.memory import ModelFacts
from smpkit.plan.tune.calibration import read_calibration
from smpkit.plan.tune.machine import Machine, from_calibration
from smpkit.plan.tune.predict import Job, Prediction, predict
from smpkit.testing import run_ranks
from smpkit.torch.describe import describe

SAMPLES: Final = 16
WIDTH, CONTEXT, HEADS, LAYERS, VOCABULARY = 64, 32, 4, 8, 32
FORWARD_SECONDS: Final = 0.012
"""How long a block of the GPT sleeps for a sample; twice as long in backward, and other blocks in proportion."""
WARM_UPS: Final = 3


class Slow(nn.Module):
    """The first module of a block, which sleeps for the whole block; or the head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.ones(1, 1))
        self.seconds = 0.0

    def forward(self, value: Tensor) -> Tensor:
        if not smp.is_tracing() and self.seconds:
            seconds = value.shape[0] * self.seconds
            value = SleepOnWay.apply(value, seconds, seconds)
            value = value * SleepForWeight.apply(self.weight, seconds)
        else:
            value = value * self.weight
        return self.inner(value)


# --- models -----------------------------------------------------------------------------------------------------------


def slow_block() -> nn.Module:
    block: Any = Block(GPTSize(width=WIDTH, num_heads=HEADS))
    block.before_attention = Slow(block.before_attention)
    return block


class Gpt(nn.Module):
    """A small GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(slow_block() for _ in range(LAYERS))
        self.head = Slow(nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.embed(tokens)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


def t5() -> nn.Module:
    """Return Hugging Face's T5 with random weights, half of its blocks in the encoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(  # type: ignore[call-arg]  # one field is of every model
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=4 * WIDTH,
        num_layers=LAYERS // 2,
        num_decoder_layers=LAYERS // 2,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    config._attn_implementation = "eager"  # with a trained bias a CPU has no fused kernel, which plans count with
    model: Any = T5ForConditionalGeneration(config)
    for stack in (model.encoder, model.decoder):
        for block in stack.block:
            block.layer[0].layer_norm = Slow(block.layer[0].layer_norm)
    model.lm_head = Slow(model.lm_head)
    return model


MODELS: Final[Mapping[str, Callable[[], nn.Module]]] = {"gpt": Gpt, "t5": t5}


def inputs(name: str, samples: int) -> Any:
    tokens = torch.zeros(samples, CONTEXT, dtype=torch.int64)
    return tokens if name == "gpt" else {"input_ids": tokens, "labels": tokens}


def build(name: str) -> Any:
    """Return the model and a microbatch of one sample, for the description."""
    return MODELS[name](), inputs(name, 1)


def slow_parts(model: nn.Module) -> dict[str, Slow]:
    return {name: each for name, each in model.named_modules() if isinstance(each, Slow)}


def sleeps(facts: ModelFacts, model: nn.Module) -> dict[str, float]:
    """Return how long each block, and the head, sleeps for a sample: as long as its products would take."""
    flops = {unit.cost.name: unit.cost.flops for unit in facts.units}
    found = {}
    for part in slow_parts(model):
        unit = next(name for name in flops if f"{part}.".startswith(f"{name}.") or name.startswith(f"{part}."))
        found[part] = flops[unit] / facts.samples * FORWARD_SECONDS / _gpt_flops()
    return found


def _gpt_flops() -> float:
    """Return the operations of a block of the GPT for a sample, forward."""
    return 2.0 * CONTEXT * (12 * WIDTH**2 + 2 * CONTEXT * WIDTH)


# --- what is compared -------------------------------------------------------------------------------------------------


def configurations(ranks: int) -> Iterator[dict[str, Any]]:
    """Yield what is compared: degrees, microbatches, schedules, virtual stages, sharded states."""
    stages = ranks
    while stages > 1:
        replicas = ranks // stages
        counts = [each for each in (stages // 2, stages, 2 * stages, 4 * stages) if 2 <= each <= SAMPLES // replicas]
        for rounds in counts[-3:]:
            for name in ("interleaved", "simple", "zero_bubble"):
                yield _config(stages, rounds, pipeline=name)
            if 2 * stages <= LAYERS:
                yield _config(stages, rounds, virtual_pipeline_degree=2)
        stages //= 2
    yield _config(ranks // 2, ranks, shard_optimizer_state=True)
    for rounds in (1, 2):
        yield _config(1, rounds)
        yield _config(1, rounds, shard_optimizer_state=True)


def _config(stages: int, rounds: int, **more: Any) -> dict[str, Any]:
    """Return a configuration whose schedule stays as planned: with more microbatches under way it could change."""
    if more.get("pipeline") == "simple":
        more["active_microbatches"] = rounds
    elif stages > 1 and "virtual_pipeline_degree" not in more:
        more["active_microbatches"] = min(stages, rounds)
    return {"pipeline_parallel_degree": stages, "microbatches": rounds, "ddp": True, **more}


@smp.step
def _train_gpt(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    model.backward(loss)
    return loss


@smp.step
def _train_t5(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    model.backward(loss)
    return loss


def measure_each(name: str, configs: Sequence[dict[str, Any]], seconds: Mapping[str, float], steps: int) -> list[float]:
    """Train with one configuration after the other; return the seconds of each one's fastest step."""
    fastest = []
    for config in configs:
        fastest.append(_measure_one(name, config, seconds, steps))
        smp.shutdown()
        gc.collect()
        if int(os.environ["RANK"]) == 0:
            print(f"{fastest[-1]:.3f} s  {config}", file=sys.stderr, flush=True)
    return fastest


def _measure_one(name: str, config: dict[str, Any], seconds: Mapping[str, float], steps: int) -> float:
    smp.init(config)
    torch.manual_seed(0)
    module = MODELS[name]()
    for part, slow in slow_parts(module).items():
        slow.seconds = seconds[part]
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    tokens = torch.zeros(SAMPLES // smp.dp_size(), CONTEXT, dtype=torch.int64)
    train = _train_gpt if name == "gpt" else _train_t5

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        train(model, tokens)
        optimizer.step()
        dist.barrier()
        return time.perf_counter() - start

    # Of the fastest step, since other programs only add to it.
    return min([step() for _ in range(WARM_UPS + steps)][WARM_UPS:])


# --- one run ----------------------------------------------------------------------------------------------------------


def calibrated(ranks: int, seconds: float, path: Path | None) -> Machine:
    """Return this machine as predictions see it, its ranks' products being sleep on a device of their own."""
    with tempfile.TemporaryDirectory() as folder:
        if path is None or not path.exists():
            path = path or Path(folder, "calibration.json")
            _measure(ranks, seconds, path)
        found = read_calibration(path)
    machine = from_calibration(found)
    awake = _gpt_flops() / machine.single_flops
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        time.sleep(FORWARD_SECONDS)
        taken.append(time.perf_counter() - start)
    rate = _gpt_flops() / (statistics.median(taken) + awake)
    return replace(machine, single_flops=rate, parallel_ranks=ranks, on_host=False)


def run(name: str, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Predict and measure all configurations."""
    machine = calibrated(ranks, options.seconds, options.calibration)
    model = describe(partial(build, name), other_sizes=True)
    seconds = sleeps(model, MODELS[name]())
    job = Job({1: model}, machine, ranks, SAMPLES)
    rows: list[dict[str, Any]] = []
    configs = list(configurations(ranks))[: options.only]
    configs = [*configs, configs[0]]
    of_ranks = run_ranks(measure_each, ranks, name, configs, seconds, options.steps, timeout=60 * len(configs))
    for config, measured in zip(configs, zip(*of_ranks, strict=True), strict=True):
        checked, _ = ModelParallelConfig.from_sources(config, None)
        prediction = predict(checked, job)
        assert isinstance(prediction, Prediction), prediction
        rows.append({"config": config, "predicted": prediction.step_seconds, "measured": max(measured)})
    again = rows.pop()
    return {"model": name, "ranks": ranks, "again": again["measured"], **summary(rows)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
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
    """Return the correlation of ranks, ties at their mean; not a number where all are equal, or there is but one."""
    if min(len(set(one)), len(set(other))) < 2:
        return math.nan
    return statistics.correlation(_ranked(one), _ranked(other))


def _ranked(values: Sequence[float]) -> list[float]:
    return [sum(each < value for each in values) + (sum(each == value for each in values) - 1) / 2 for value in values]


def words(config: Mapping[str, Any]) -> str:
    """Return a configuration as the table shows it."""
    return ", ".join(f"{key} {value}" for key, value in config.items() if key != "ddp")


def text_of(found: dict[str, Any]) -> str:
    """Return the table, and what it comes to."""
    rows = sorted(found["rows"], key=lambda row: row["measured"])
    times = [[f"{row['predicted']:.3f} s", f"{row['measured']:.3f} s", words(row["config"])] for row in rows]
    again = found["again"] / found["rows"][0]["measured"] - 1
    result = (
        f"{found['model']} over {found['ranks']} ranks, {found['configurations']} configurations: Spearman"
        f" {found['spearman']:.3f}; the chosen one takes {found['chosen_over_best']:.3f} × the best measured; median"
        f" error {found['median_error']:.1%}, largest {found['largest_error']:.1%}; the first one took {again:+.1%}"
        " when it was measured again."
    )
    return f"{table(['predicted', 'measured', 'configuration'], times)}\n\n{result}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*MODELS], action="append", help="default: both")
    parser.add_argument("--ranks", type=int, choices=[4, 8], action="append", help="default: both")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each (default: %(default)s)")
    parser.add_argument("--only", type=int, help="the first so many configurations")
    parser.add_argument("--seconds", type=float, default=15, help="for the calibration (default: %(default)s)")
    parser.add_argument("--calibration", type=Path, help="read it if it is there, else write it")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    options = parser.parse_args(arguments)
    for name in options.model or MODELS:
        for ranks in options.ranks or (4, 8):
            found = run(name, ranks, options)
            print(json.dumps(found), file=sys.stderr, flush=True)
            print(json.dumps(found) if options.json else text_of(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
