"""What `smpkit submit --dry-run` would send, and what the adapters of SageMaker's SDKs give these, where installed."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any

from tests.goldens.adapter import sandbox
from tests.goldens.items import Items

__all__ = ["collect", "installed_sdk"]

_IMAGE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/smpkit:latest"
_ROLE = "arn:aws:iam::123456789012:role/SM"
_JOB = {
    "entry_point": "train.py",
    "image": _IMAGE,
    "role": _ROLE,
    "output": "s3://smpkit-demo/out",
    "source_dir": "s3://smpkit-demo/source/sourcedir.tar.gz",
    "compute": {"instance_type": "ml.p4d.24xlarge", "instance_count": 2},
}
_SMP = {"partitions": 2, "microbatches": 4, "pipeline": "interleaved", "ddp": True, "optimize": "speed"}
_MPI = {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "-verbose --mca orte_base_help_aggregate 0"}
_DISTRIBUTION = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": _SMP}}, "mpi": _MPI}


def collect() -> Items:
    items: Items = {}
    with sandbox() as box:
        box.write("train.py", "print()\n")
        for name, change in _changes():
            settings = {**_JOB, **change, "compute": {**_JOB["compute"], **change.get("compute", {})}}  # type: ignore[dict-item]
            box.write("job.json", json.dumps(settings))
            done = box.run("submit", "job.json", "--dry-run", "--name", "golden", "--json")
            shown = re.sub(r"(/tokens/golden-)[0-9a-f]{8}", r"\1(random)", done["stdout"])
            request = json.loads(shown) if done["exit"] == 0 else done
            items[name] = {"request": request, "said": done["stderr"].splitlines()}
    items |= {f"SDK v2: {name}": item for name, item in _of_sdk2()}
    items |= {f"SDK v3: {name}": item for name, item in _of_sdk3()}
    return items


def installed_sdk() -> dict[str, str]:
    """Return which SDK is installed here: the two cannot be installed together."""
    return {"sagemaker sdk": "2" if _has("sagemaker.pytorch") else "3" if _has("sagemaker.train") else "none"}


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _of_sdk2() -> Iterator[tuple[str, Any]]:
    if not _has("sagemaker.pytorch"):
        return
    from smpkit_estimator.sdk2 import PyTorch

    known: dict[str, Any] = {
        "role": _ROLE,
        "image_uri": _IMAGE,
        "instance_count": 2,
        "instance_type": "ml.p4d.24xlarge",
    }
    for name, options in _sdk_options():
        yield name, PyTorch("train.py", **options, **known).hyperparameters()


def _of_sdk3() -> Iterator[tuple[str, Any]]:
    if not _has("sagemaker.train"):
        return
    from smpkit_estimator.sdk3 import Smpkit

    for name, options in _sdk_options():
        made = Smpkit(**options)
        yield name, {"driver": made.driver_script, **made.hyperparameters("train.py", {"epochs": 3, "name": "it's"})}


def _sdk_options() -> Iterator[tuple[str, dict[str, Any]]]:
    smp = {"enabled": True, "parameters": _SMP}
    yield "smp_options and mpi_options", {"smp_options": smp, "mpi_options": _MPI}
    yield "smp_options", {"smp_options": smp}
    yield "the whole distribution", {"smp_options": _DISTRIBUTION}


def _smp(**parameters: Any) -> dict[str, Any]:
    return {"distribution": {"enabled": True, "parameters": parameters}}


def _changes() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "nothing but a script", {}
    yield "model parallelism, mpi", {"distribution": _DISTRIBUTION}
    yield "smp_options", _smp(**_SMP)
    yield "smp_options, all defaults", _smp()
    yield "smp_options, offloading", _smp(ddp=True, offload_activations=True, activation_loading_horizon=2)
    yield "smp_options, sharded", _smp(ddp=True, sharded_data_parallel_degree=2, bf16=True)
    yield "a port", _smp(ddp=True, ddp_port=9999)
    yield "mpi alone", {"distribution": {"mpi": {"enabled": True}}}
    yield "torchrun", {"distribution": {"torch_distributed": {"enabled": True}}}
    yield "torchrun, 4 processes", {"distribution": {"torch_distributed": {"enabled": True, "processes_per_host": 4}}}
    yield "a library that is switched off", {"distribution": {"enabled": False, "parameters": _SMP}}
    values = {"text": 'it\'s "quoted" é', "flag": True, "nothing": None, "list": [1, 2.5, "x"], "a.b": -1e-9, "e": ""}
    yield "hyperparameters", {"hyperparameters": values}
    yield "long hyperparameters", {"hyperparameters": {"x": "y" * 2000, "nested": {"a": {"b": [False]}}}}
    yield "environment", {"environment": {"A": "1", "HF_TOKEN": "secret"}}
    yield "a secret", {"secrets": {"HF_TOKEN": {"entry": "prod/hf", "key": "token"}}}
    yield "spot", {"compute": {"spot": True, "max_run_seconds": 3600, "max_wait_seconds": 7200}}
    yield "spot without a limit", {"compute": {"spot": True, "max_run_seconds": 3600}}
    yield "a large disk, kept alive", {"compute": {"volume_gb": 500, "keep_alive_seconds": 1800}}
    yield "retries and checks", {"compute": {"retries": 3, "infra_check": True}}
    plan = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/reserved"
    yield "a training plan", {"compute": {"training_plan": plan}}
    yield "inputs", {"inputs": {"train": "s3://smpkit-demo/data", "test": "s3://smpkit-demo/test"}}
    manifest = {
        "uri": "s3://smpkit-demo/manifest",
        "mode": "Pipe",
        "content_type": "application/x-recordio",
        "sharded": True,
        "data_type": "AugmentedManifestFile",
        "compression": "Gzip",
        "record_wrapping": "RecordIO",
        "attribute_names": ["image", "label"],
        "shuffle_seed": 7,
    }
    yield "an input with everything", {"inputs": {"train": manifest}}
    disk = {"id": "fs-0123456789abcdef0", "type": "FSxLustre", "path": "/fsx/data", "access": "ro"}
    network = {"subnets": ["subnet-1"], "security_groups": ["sg-1"]}
    yield "a file system", {"inputs": {"train": {"file_system": disk}}, "network": network}
    yield "FastFile", {"input_mode": "FastFile", "inputs": {"train": "s3://smpkit-demo/data"}}
    yield "checkpoints", {"checkpoints": "s3://smpkit-demo/ckpt"}
    yield "checkpoints elsewhere", {"checkpoints": {"uri": "s3://smpkit-demo/ckpt", "local_path": "/opt/ml/state"}}
    yield "tags", {"tags": {"team": "research", "cost center": "42"}}
    yield "metrics", {"metrics": {"loss": "loss=([0-9.]+)"}}
    yield "isolated", {"network": {**network, "isolation": True, "encrypt_traffic": True}}
    yield "keys", {"encryption": {"output_key": "alias/out", "volume_key": "alias/disks"}}
    yield "uncompressed", {"compress_output": False}
    command = {"entry_point": ["python", "-m", "smpkit_container"], "arguments": ["train"]}
    yield "a container command", {"container": command}
    yield "a log level and debugging", {"container": {"log_level": 10, "remote_debug": True}}
    yield "a registry", {"container": {"registry_access": "Vpc"}, "network": network}
    yield "an experiment", {"experiment": {"name": "e", "trial": "t", "display_name": "d", "run": "r"}}
    yield "sources of a folder", {"source_dir": "."}
    yield "no role", {"role": None}
    yield "no image", {"image": None}
    yield "no output", {"output": None}
    yield "a name of a role", {"role": "SageMakerRole"}
    yield "a local instance", {"compute": {"instance_type": "local"}}
