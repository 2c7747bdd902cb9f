"""The command lines and variables with which the launcher of the image starts ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from smpkit.errors import SmpkitError
from tests.goldens.adapter import Sandbox, launch_plan, sandbox
from tests.goldens.items import Items

__all__ = ["collect"]

_ROOT_WORD = "--allow-run-as-root"
"""What mpirun is told only where the launcher runs as root."""
_MPIRUN = "#!/bin/sh\necho 'mpirun (Open MPI) 5.0.5'\n"


@dataclass(frozen=True)
class Job:
    """What the platform says of a job.

    Args:
        sent: hyperparameters, before they are encoded.
        hosts: names in the platform's order; the first of them is this host.
    """

    sent: dict[str, Any] = field(default_factory=dict)
    hosts: tuple[str, ...] = ("algo-1",)
    current: str = "algo-1"
    environ: dict[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    groups: tuple[dict[str, Any], ...] = ()
    num_gpus: int = 0
    num_cpus: int = 8
    has_efa: bool = False


def collect() -> Items:
    return {name: _item(job) for name, job in _jobs()}


def _item(job: Job) -> Any:
    with sandbox() as box:
        _write(box, job)
        path = f"{box.folder}/bin:/usr/bin:/bin"
        try:
            command, variables = launch_plan(
                box.folder,
                {"PATH": path, **job.environ},
                list(job.extra),
                num_gpus=job.num_gpus,
                num_cpus=job.num_cpus,
                has_efa=job.has_efa,
            )
        except SmpkitError as error:
            return {"error": box.plain(f"{type(error).__name__}: {error}").splitlines()}
        words = [box.plain(word) for word in command if word != _ROOT_WORD]
        shown = {name: box.plain(value) for name, value in variables.items()}
        return {"command": words, "variables": shown}


def _write(box: Sandbox, job: Job) -> None:
    box.write("code/train.py")
    box.write("bin/mpirun", _MPIRUN)
    (box.folder / "bin" / "mpirun").chmod(0o755)
    box.write("bin/torchrun")
    sent = {"sagemaker_program": "train.py", "sagemaker_job_name": "golden", **job.sent}
    texts = {name: json.dumps(value) for name, value in sent.items()}
    box.write("input/config/hyperparameters.json", json.dumps(texts))
    resources: dict[str, Any] = {
        "current_host": job.current,
        "hosts": list(job.hosts),
        "network_interface_name": "eth0",
        "current_instance_type": "ml.p4d.24xlarge",
    }
    if job.groups:
        (mine,) = [each["instance_group_name"] for each in job.groups if job.current in each["hosts"]]
        resources |= {"current_group_name": mine, "instance_groups": list(job.groups)}
    box.write("input/config/resourceconfig.json", json.dumps(resources))
    channels = {name: {"TrainingInputMode": "File"} for name in job.channels}
    box.write("input/config/inputdataconfig.json", json.dumps(channels))


def _jobs() -> Iterator[tuple[str, Job]]:
    two, eleven = ("algo-1", "algo-2"), tuple(sorted(f"algo-{number}" for number in range(1, 12)))
    mpi: dict[str, Any] = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 8}
    yield "torchrun", Job()
    yield "torchrun, 4 GPUs", Job(num_gpus=4)
    yield "torchrun, 4 processes", Job({"sagemaker_smpkit_processes_per_host": 4})
    yield "torchrun, first of 2 hosts", Job(hosts=two, num_gpus=8)
    yield "torchrun, second of 2 hosts", Job(hosts=two, current="algo-2", num_gpus=8)
    yield "torchrun, host of 11", Job(hosts=eleven, current="algo-2")
    yield "torchrun, a port", Job({"mp_parameters": {"ddp": True, "ddp_port": 8888}}, hosts=two)
    yield "torchrun, a port, 1 host", Job({"mp_parameters": {"ddp": True, "ddp_port": 8888}})
    yield "mpirun", Job(mpi)
    yield "mpirun, 2 hosts", Job(mpi, hosts=two, num_gpus=8)
    yield "mpirun, second of 2 hosts", Job(mpi, hosts=two, current="algo-2", num_gpus=8)
    yield "mpirun, EFA", Job(mpi, hosts=two, num_gpus=8, has_efa=True)
    yield "mpirun, processes by GPUs", Job({"sagemaker_mpi_enabled": True}, num_gpus=4)
    options = "-verbose --mca orte_base_help_aggregate 0 -x NCCL_DEBUG=INFO"
    yield "mpirun, own options", Job({**mpi, "sagemaker_mpi_custom_mpi_options": options})
    seed = "--mca btl_vader_single_copy_mechanism none "
    yield "mpirun, an option given twice", Job({**mpi, "sagemaker_mpi_custom_mpi_options": seed})
    yield "mpirun, MCA variables", Job(mpi, environ={"OMPI_MCA_btl": "tcp,self"})
    yield "mpirun, exported variables", Job(mpi, hosts=two, environ={"LD_LIBRARY_PATH": "/l", "PYTHONPATH": "/p"})
    yield "mpirun, bad options", Job({**mpi, "sagemaker_mpi_custom_mpi_options": "--mca btl"})
    yield "mpirun, no number of processes", Job({**mpi, "sagemaker_mpi_num_of_processes_per_host": "many"})
    values = {"epochs": 3, "lr": 0.1, "name": "a b", "flag": True, "off": False, "nothing": None, "list": [1, 2]}
    yield "hyperparameters", Job(values)
    yield "arguments", Job({"epochs": 3}, extra=("--more", "it is"))
    yield "mp_parameters passed on", Job({"mp_parameters": {"ddp": True}}, environ={"SMPKIT_PASS_MP_PARAMETERS": "1"})
    yield "mp_parameters not passed on", Job({"mp_parameters": {"partitions": 2, "microbatches": 4}})
    yield "channels", Job(channels=("train", "validation", "my-data"))
    yield "variables of the user", Job(environ={"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth7"})
    yield "a log level", Job({"sagemaker_container_log_level": 10})
    yield "a tuning job", Job({"_tuning_objective_metric": "loss", "lr": 0.1})
    groups = (
        {"instance_group_name": "cpu", "instance_type": "ml.c5.xlarge", "hosts": ["algo-1"]},
        {"instance_group_name": "gpu", "instance_type": "ml.p4d.24xlarge", "hosts": ["algo-2", "algo-3"]},
    )
    three = ("algo-1", "algo-2", "algo-3")
    chosen = {"sagemaker_distribution_instance_groups": ["gpu"]}
    yield "a group", Job(chosen, hosts=three, current="algo-2", groups=groups)
    yield "a host of another group", Job(chosen, hosts=three, groups=groups)
    yield (
        "a group that there is not",
        Job({"sagemaker_distribution_instance_groups": ["tpu"]}, hosts=three, groups=groups),
    )
    yield "no script", Job({"sagemaker_program": ""})
    yield "a script that is missing", Job({"sagemaker_program": "no.py"})
    yield "a port that is none", Job({"mp_parameters": {"ddp_port": "x"}}, hosts=two)
