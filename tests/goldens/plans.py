"""What `smpkit plan --json` says of a spread of configurations, and of models where that is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.goldens.adapter import sandbox
from tests.goldens.items import Items

__all__ = ["collect", "collect_models"]

_JOB = """\
entry_point: train.py
compute: {instance_count: 2}
distribution:
  smdistributed: {modelparallel: {enabled: true, parameters: {%s}}}
  mpi: {enabled: true, processes_per_host: 8}
"""
_MODELS = """
import torch
from torch import nn
import smpkit.torch as smp

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def traced():
    return Net(), torch.zeros(4, 16, dtype=torch.int64)

def divided():
    with smp.tensor_parallelism():
        return traced()
"""


def collect() -> Items:
    items: Items = {}
    with sandbox() as box:
        box.write("train.py")
        for words in _options():
            done = box.run("-q", "plan", *words, "--json")
            items[" ".join(words)] = json.loads(done["stdout"]) if done["exit"] == 0 else done
        for parameters, more in _parameters():
            box.write("job.yaml", _JOB % parameters)
            done = box.run("-q", "plan", "job.yaml", *more, "--json")
            name = " ".join([f"job with {parameters}", *more])
            items[name] = json.loads(done["stdout"]) if done["exit"] == 0 else done
    return items


def collect_models() -> Items:
    """Return plans of models; each imports torch in a process of its own."""
    items: Items = {}
    with sandbox() as box:
        box.write("models.py", _MODELS)
        for words in (
            ("--pp", "2", "--microbatches", "4", "--model", "models:Net"),
            ("--pp", "4", "--microbatches", "8", "--model", "models:traced", "--memory-gib", "0.001"),
            ("--pp", "2", "--tp", "2", "--ranks", "8", "--microbatches", "4", "--model", "models:divided"),
            ("--offload-model", "--model", "models:traced", "--slices", "4"),
        ):
            done = box.run("plan", *words, "--json")
            items[" ".join(words)] = {"plan": json.loads(done["stdout"] or "null"), "stderr": done["stderr"]}
    return items


def _options() -> Iterator[tuple[str, ...]]:
    for degree in (1, 2, 3, 4, 8):
        for microbatches in (1, 4, 16):
            yield ("--pp", str(degree), "--microbatches", str(microbatches))
    for pipeline, tensor, ranks, hosts in ((1, 2, 4, 1), (1, 8, 16, 2), (2, 2, 8, 1), (2, 4, 32, 4), (4, 2, 16, 2)):
        words = ("--tp", str(tensor), "--ranks", str(ranks), "--hosts", str(hosts))
        yield ("--pp", str(pipeline), *words, "--microbatches", "4")
    yield ("--pp", "2", "--tp", "2", "--ranks", "6")
    yield ("--pp", "3", "--ranks", "4")
    for text in (
        "--params 6.7e9",
        "--params 6.7e9 --slices 8 --tokens 65536",
        "--params 1e9 --fp32 --optimizer sgd",
        "--params 13e9 --memory-gib 16 --host-memory-gib 512 --link-gbs 12",
        "--params 70e9 --layers 80 --tflops 300 --updates 1.5 --optimizer momentum",
        "--params 175e9 --memory-gib 80 --host-memory-gib 1024",
    ):
        yield ("--offload-model", *text.split())


def _parameters() -> Iterator[tuple[str, tuple[str, ...]]]:
    for pipeline in ("simple", "interleaved", "zero_bubble", "_only_forward"):
        for degree, microbatches in ((2, 4), (4, 8), (8, 4)):
            yield f"pipeline_parallel_degree: {degree}, microbatches: {microbatches}, pipeline: {pipeline}", ()
    deep = "pipeline_parallel_degree: {}, microbatches: {}, virtual_pipeline_degree: {}, pipeline: {}"
    for values in (
        (2, 4, 2, "interleaved"),
        (2, 8, 4, "interleaved"),
        (4, 8, 2, "interleaved"),
        (2, 8, 2, "zero_bubble"),
    ):
        yield deep.format(*values), ()
    base = "pipeline_parallel_degree: 2, microbatches: 8"
    for active in (1, 2, 3, 8):
        yield f"{base}, active_microbatches: {active}", ()
    for placement in ("spread", "DTP", "PDT", "PTD", "TDP"):
        yield f"{base}, tensor_parallel_degree: 2, ddp: true, placement_strategy: {placement}", ()
    yield f"{base}, offload_activations: true, activation_loading_horizon: 2", ()
    yield f"{base}, offload_activations: true, activation_loading_horizon: auto", ()
    yield "ddp: true, sharded_data_parallel_degree: 8", ()
    yield "ddp: true, tensor_parallel_degree: 8, optimize: speed, prescaled_batch: true", ()
    yield "ddp: true, shard_optimizer_state: true, fp16: true", ()
    yield base, ("--ranks", "4", "--hosts", "1")
    yield base, ("--set", "compute.instance_count=4", "--set", "distribution.mpi.processes_per_host=4")
