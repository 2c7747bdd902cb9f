"""What smpkit says of bad input: YAML, parameters, job files and words of the command line, with its hints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from smpkit import ModelParallelConfig
from smpkit.errors import SmpkitError
from tests.goldens.adapter import Sandbox, sandbox
from tests.goldens.items import Items

__all__ = ["collect"]


def collect() -> Items:
    items: Items = {}
    with sandbox() as box:
        box.write("train.py")
        box.write("job.yaml", "entry_point: train.py\n")
        for text in _YAML:
            box.write("bad.yaml", text)
            items[f"YAML {json.dumps(text, ensure_ascii=False)}"] = _said(box, "validate", "bad.yaml")
        for fields in _job_files():
            box.write("bad.json", json.dumps(fields))
            items[f"job {json.dumps(fields, ensure_ascii=False)}"] = _said(box, "validate", "bad.json")
        for words in _WORDS:
            items["smpkit " + " ".join(words)] = _said(box, *words)
    for parameters in _parameters():
        items[f"parameters {parameters}"] = _of_parameters(parameters)
    return items


def _said(box: Sandbox, *words: str) -> dict[str, Any]:
    done = box.run(*words)
    printed = {"stdout": done["stdout"].splitlines()} if done["stdout"] else {}
    return {"exit": done["exit"], "stderr": done["stderr"].splitlines(), **printed}


def _of_parameters(parameters: dict[Any, Any]) -> list[str]:
    """Return the error, or the notices, of parameters as `smp.init` reads them."""
    try:
        _, notices = ModelParallelConfig.from_sources(parameters, None)
    except SmpkitError as error:
        return [f"{type(error).__name__}, exit code {error.exit_code}", *str(error).splitlines()]
    return ["accepted", *(line for notice in notices for line in str(notice).splitlines())]


_YAML = (
    "",
    "- a\n- b\n",
    "a:\n  b: 1\n c: 2\n",
    "a:\n  b: 1\n   c: 2\n",
    "a: 1\nb\nc: 2\n",
    "a train.py\nb: x\n",
    "a: b: c\n",
    "a: @x\n",
    "a: {b: 1\nc: 2\n",
    'a: 1\nb: "x\nc: 2\n',
    "a:\n\tb: 1\n",
    "a: 1\na: 2\n",
    "a: &x 1\nb: *y\n",
    "a: !!python/object:os.system x\n",
    "entry_point: train.py\n---\nentry_point: other.py\n",
    "entry_point: train.py\nenvironment: {DEBUG: on}\n",
    "entry_point: train.py\nenvironment: {LEVEL: 1}\n",
    "entry_point: train.py\nhyperparameters: {lr: .inf}\n",
    "microbatches: 4\npipeline_paralel_degree: 2\n",
)


def _parameters() -> Iterator[dict[Any, Any]]:
    for key, value in (
        ("microbatches", True),
        ("microbatches", "4"),
        ("microbatches", 4.0),
        ("microbatches", None),
        ("microbatches", 0),
        ("ddp", 1),
        ("ddp", "True"),
        ("memory_weight", "0.5"),
        ("memory_weight", 1.5),
        ("pipeline", "simpel"),
        ("pipeline", 1),
        ("optimize", "time"),
        ("placement_strategy", "DPX"),
        ("activation_loading_horizon", 0),
        ("activation_loading_horizon", "4"),
        ("sdp_reduce_bucket_size", 5e8),
        ("timeout_seconds", 0),
        ("ddp_port", 70000),
        ("ddp_dist_backend", "mpi"),
        ("microbatchs", 4),
        ("tensor_parallel", 2),
        ("horovod", True),
        ("virtual_pipeline_degree", 0),
        ("default_partition", -1),
        (1, 1),
    ):
        yield {key: value}
    yield {"tensor_parallel_degree": 2}
    yield {"ddp_port": 1234}
    yield {"ddp_dist_backend": "gloo"}
    yield {"microbatches": 2, "active_microbatches": 3}
    yield {"pipeline_parallel_degree": 2, "default_partition": 2}
    yield {"auto_partition": False}
    yield {"_shard_offloaded_activations": False}
    yield {"fp16": True, "bf16": True, "ddp": True}
    yield {"_fp32_grad_accumulation": True}
    yield {"shard_optimizer_state": True, "ddp": True, "sharded_data_parallel_degree": 2}
    yield {"sharded_data_parallel_degree": 2, "ddp": True, "pipeline_parallel_degree": 2}
    yield {"sharded_data_parallel_degree": 2, "ddp": True, "tensor_parallel_degree": 2}
    yield {"herring": True, "ddp": True}
    yield {"partitions": 2, "pipeline_parallel_degree": 4}
    yield {"hybrid_shard_degree": 2}
    yield {"pipeline_parallel_degree": 2, "microbatches": 1}
    yield {"activation_loading_horizon": 4}
    yield {"virtual_pipeline_degree": 2}
    yield {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2, "microbatches": 8, "active_microbatches": 3}
    yield {"prescaled_batch": True, "tensor_parallel_seed": 3, "_match_weights": True}
    yield {"load_partition": True, "partition_file": "x", "static_mode": True, "fast_mode": True}
    yield {"microbatches": 0, "pipeline": "simpel", "ddp": "yes"}


def _job_files() -> Iterator[dict[str, Any]]:
    yield {}
    yield {"entry_pint": "train.py"}
    every: tuple[dict[str, Any], ...] = (
        {"entry_point": "../train.py"},
        {"entry_point": "train.sh"},
        {"entry_point": 3},
        {"name": "a_b"},
        {"source_dir": "https://x/y"},
        {"checkpoints": "s3:///x"},
        {"checkpoints": {"uri": "x", "local_path": "y"}},
        {"hyperparameters": {"sagemaker_x": 1}},
        {"hyperparameters": {"mp_parameters": 1}},
        {"hyperparameters": []},
        {"environment": {"1A": "x"}},
        {"environment": {"SM_HPS": "x", "RANK": "1"}},
        {"environment": {"HF_TOKEN": "abc"}},
        {"inputs": {"a b": "x"}},
        {"inputs": {"train": "ftp://x"}},
        {"inputs": {"train": {}}},
        {"inputs": {"train": {"uri": "x", "mode": "file"}}},
        {"image": "a b"},
        {"compute": {"instance_count": 0}},
        {"compute": {"instance_cuont": 2}},
        {"compute": {"max_wait_seconds": 90_000}},
        {"compute": {"spot": True, "max_wait_seconds": 9}},
        {"instance_count": 2},
        {"image_uri": "x"},
        {"distribution": {"mpi": {"processes_per_host": 8}}},
        {"distribution": {"mpi": {"enabled": "true"}}},
        {"distribution": {"mpi": {"enabled": True, "process_per_host": 8}}},
        {"distribution": {"mpi": {"enabled": True, "custom_mpi_options": "--mca btl"}}},
        {"distribution": {"enabled": True, "parametrs": {}}},
        {"distribution": {"enabled": True, "parameters": {"microbatches": 0}}},
        {"distribution": {"enabled": True, "parameters": []}},
        {"distribution": {"mpi": {"enabled": True}, "torch_distributed": {"enabled": True}}},
        {"secrets": {"A": {"entry": ""}}},
        {"tags": {"aws:x": "1"}},
        {"metrics": {"loss": "("}},
        {"network": {"subnets": []}},
    )
    for fields in every:
        yield {"entry_point": "train.py", **fields}


_WORDS = (
    ("valdiate", "job.yaml"),
    ("validate",),
    ("validate", "nowhere.yaml"),
    ("validate", "job.yaml", "--jsn"),
    ("validate", "job.yaml", "--set", "compute"),
    ("validate", "job.yaml", "--set", "compute.instance_cuont=2"),
    ("validate", "job.yaml", "--set", "compute.instance_count=many"),
    ("validate", "job.yaml", "--set", "entry_point.x=1"),
    ("plan", "--pp", "0"),
    ("plan", "--pp", "two"),
    ("plan", "--pp", "3", "--ranks", "4"),
    ("plan", "job.yaml", "--pp", "2"),
    ("plan", "job.yaml", "--offload-model"),
    ("plan", "--offload-model"),
    ("plan", "--optimizer", "adan"),
    ("plan", "--pp", "2", "--tflops", "0"),
    ("run", "job.yaml", "--hosts", "2"),
    ("run", "job.yaml", "--gpus", "--interrupt-after", "5"),
    ("schema", "jobs"),
    ("timeline", "nowhere"),
    ("completion", "tcsh"),
    ("init", "job.yaml", "more"),
    ("compat",),
    ("cost",),
    ("submit", "job.yaml", "--dry-run"),
    ("submit", "job.yaml", "--dry-run", "--name", "a_b"),
    ("status",),
)
