"""Does `smpkit tune` order configurations as they are? Predict and run a GPT and a T5 over 4 and 8 ranks.

Ranks share fewer cores on most machines, so the blocks of these models sleep, in proportion to what they compute for
the samples that they get, and compute little: then stages run beside each other as on machines of their own. What else
a step takes is real: gloo, the runtime, partition and schedule, and what ranks do awake, for which they do share cores.
The machine's facts are those that `smpkit calibrate` measures at the start; the rate of compute is that of the sleep.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import smpkit.torch as smp
from benchmarks.common import parser, run, table
from benchmarks.pipeline.models import GPTSize, gpt, gpt_loss, sleep
from benchmarks.ranks import time_steps
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
CALIBRATION_SECONDS: Final = 15


class Slow(nn.Module):
    """The first module of a block, which sleeps for the whole block; or the head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.ones(1, 1))
        self.seconds = 0.0

    def forward(self, value: Tensor) -> Tensor:
        if smp.is_tracing() or not self.seconds:
            return self.inner(value * self.weight)
        seconds = value.shape[0] * self.seconds
        return self.inner(sleep(value, self.weight, seconds, seconds))


# --- models -----------------------------------------------------------------------------------------------------------


def slow_gpt() -> nn.Module:
    model: Any = gpt(GPTSize(VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS))
    for block in model[1:-1]:
        block.before_attention = Slow(block.before_attention)
    model[-1].logits = Slow(model[-1].logits)
    return model


def slow_t5() -> nn.Module:
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


MODELS: Final[Mapping[str, Callable[[], nn.Module]]] = {"gpt": slow_gpt, "t5": slow_t5}


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    if isinstance(model.module, nn.Sequential):
        return gpt_loss(model(tokens), tokens)
    return model(input_ids=tokens, labels=tokens).loss


def build(name: str) -> Any:
    """Return the model and a microbatch of one sample, for the description."""
    tokens = torch.zeros(1, CONTEXT, dtype=torch.int64)
    return MODELS[name](), tokens if name == "gpt" else {"input_ids": tokens, "labels": tokens}


def slow_parts(model: nn.Module) -> dict[str, Slow]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Slow)}


def sleeps(facts: ModelFacts, model: nn.Module) -> dict[str, float]:
    """Return how long each block, and the head, sleeps for a sample: as long as its products would take."""
    flops = {unit.cost.name: unit.cost.flops for unit in facts.units}
    figures = {}
    for part in slow_parts(model):
        unit = next(name for name in flops if f"{part}.".startswith(f"{name}.") or name.startswith(f"{part}."))
        figures[part] = flops[unit] / facts.samples * FORWARD_SECONDS / _gpt_flops()
    return figures


def _gpt_flops() -> float:
    """Return the operations of a block of the GPT for a sample, forward."""
    return 2.0 * CONTEXT * (12 * WIDTH**2 + 2 * CONTEXT * WIDTH)


# --- what is compared -------------------------------------------------------------------------------------------------


def configurations(ranks: int) -> Iterator[dict[str, Any]]:
    """Yield what is compared: degrees, microbatches, schedules, virtual stages, sharded states."""
    stages = ranks
    while stages > 1:
        replicas = ranks // stages
        counts = [count for count in (stages // 2, stages, 2 * stages, 4 * stages) if 2 <= count <= SAMPLES // replicas]
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
def _train(model: Any, tokens: Tensor) -> Tensor:
    loss = loss_of(model, tokens)
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

    def step() -> None:
        optimizer.zero_grad()
        _train(model, tokens)
        optimizer.step()

    return min(time_steps({"": step}, steps, WARM_UPS)[""])  # other programs only add to it


# --- one run ----------------------------------------------------------------------------------------------------------


def calibrated(ranks: int, seconds: float) -> Machine:
    """Return this machine as predictions see it, its ranks' products being sleep on a device of their own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "calibration.json")
        _measure(ranks, seconds, path)
        machine = from_calibration(read_calibration(path))
    awake = _gpt_flops() / machine.speed.flops_per_second
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        time.sleep(FORWARD_SECONDS)
        taken.append(time.perf_counter() - start)
    rate = _gpt_flops() / (statistics.median(taken) + awake)
    speed = replace(machine.speed, flops_per_second=rate)
    return replace(machine, speed=speed, parallel_ranks=ranks, on_host=False)


def case(name: str, ranks: int, options: argparse.Namespace) -> tuple[str, object]:
    """Predict and measure all configurations; return a row for each, the fastest first, and what they come to."""
    configs = list(configurations(ranks))[: 1 if options.quick else None]
    machine = calibrated(ranks, 2 if options.quick else CALIBRATION_SECONDS)
    model = describe(partial(build, name), other_sizes=True)
    job = Job({1: model}, machine, ranks, SAMPLES)
    predicted = [predicted_seconds(config, job) for config in configs]
    arguments = configs, sleeps(model, MODELS[name]()), options.repetitions
    measured = run_ranks(measure_each, ranks, name, *arguments, timeout=60 * len(configs))[0]
    rows = sorted(zip(measured, predicted, configs, strict=True), key=lambda row: row[0])
    chosen, _, _ = min(rows, key=lambda row: row[1])
    errors = [abs(guess / seconds - 1) for seconds, guess, _ in rows]
    lines = [
        [f"{guess:.3f} s", f"{seconds:.3f} s", ", ".join(f"{key} {value}" for key, value in config.items())]
        for seconds, guess, config in rows
    ]
    text = (
        f"{table(['predicted', 'measured', 'configuration'], lines)}\n\n{name} over {ranks} ranks, {len(rows)}"
        f" configurations: Spearman {spearman(predicted, measured):.3f}; the chosen one takes"
        f" {chosen / min(measured):.3f} × the best measured; median error {statistics.median(errors):.1%}, largest"
        f" {max(errors):.1%}."
    )
    return text, rows


def predicted_seconds(config: dict[str, Any], job: Job) -> float:
    prediction = predict(ModelParallelConfig.from_sources(config, None)[0], job)
    assert isinstance(prediction, Prediction), prediction
    return prediction.step_seconds


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of ranks, ties at their mean; not a number where all are equal, or there is but one."""
    if min(len(set(one)), len(set(other))) < 2:
        return math.nan
    return statistics.correlation(_ranked(one), _ranked(other))


def _ranked(values: Sequence[float]) -> list[float]:
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


if __name__ == "__main__":
    cases = {f"{name}-{ranks}": partial(case, name, ranks) for name, ranks in product(MODELS, (4, 8))}
    run(__file__, parser(__doc__, repetitions=5), cases)
