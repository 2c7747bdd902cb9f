"""What a script is told: the union of the SM_* variables of AWS's two toolkits, and its command-line arguments."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from smpkit.config.wire import LOG_LEVEL, MP_PARAMETERS, SUBMIT_DIRECTORY
from smpkit_container.environment import Environment
from smpkit_container.topology import DEFAULT_PORT, Topology

_LEVEL_INFO = 20
_FROM_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


def platform_variables(environment: Environment, topology: Topology, arguments: Sequence[str]) -> dict[str, str]:
    """Return the SM_* variables of one host: those of sagemaker-training 5.1.4, and what SDK v3's drivers add."""
    named = _mapping(environment, topology, arguments)
    variables = {f"SM_{name.upper()}": _text(value) for name, value in named.items()}
    variables["SM_TRAINING_ENV"] = compact(_training_env(environment, named))
    for channel in environment.channels:
        for name in _spellings(channel):
            variables[f"SM_CHANNEL_{name}"] = str(environment.folders.data / channel)
    for key, value in environment.hyperparameters.items():
        for name in _spellings(key):
            variables[f"SM_HP_{name}"] = _text(value)
    variables |= _legacy_variables(environment, topology)
    return {name: value for name, value in variables.items() if "=" not in name}


def process_variables(environ: Mapping[str, str], topology: Topology, num_cpus: int) -> dict[str, str]:
    """Return what the ranks need beyond SM_*; whatever the user has set in `environ` is left alone."""
    variables = {"PYTHONUNBUFFERED": "1"}
    if topology.launcher != "shell":  # of which nobody knows how many processes it starts
        # One thread per core over all ranks of the host: torch's default of all cores for each rank is far slower.
        variables["OMP_NUM_THREADS"] = str(max(1, num_cpus // topology.processes_per_host))
    interface = topology.interface
    if topology.single_host and sys.platform == "linux":
        interface = "lo"  # else gloo looks the host name up, which fails in containers and on many laptops
    if interface:
        variables["GLOO_SOCKET_IFNAME"] = interface
        variables["NCCL_SOCKET_IFNAME"] = interface
    return {name: value for name, value in variables.items() if name not in environ}


def torchrun_variables(topology: Topology, rank: int, run_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun sets for one rank, beside the address where ranks meet."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % topology.processes_per_host),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(topology.processes_per_host),
        "GROUP_RANK": str(topology.node_rank),
        "GROUP_WORLD_SIZE": str(len(topology.hosts)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(topology.world_size),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def mpi_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Name a rank of mpirun as torchrun does, so that `init_process_group()` needs no MPI."""
    return {name: environ[mpi_name] for name, mpi_name in _FROM_MPI.items() if mpi_name in environ}


def _mapping(environment: Environment, topology: Topology, arguments: Sequence[str]) -> dict[str, Any]:
    folders, resources = environment.folders, environment.resources
    groups = {group.get("instance_group_name", ""): group for group in resources.groups}
    script = environment.script
    return {
        "channels": sorted(environment.channels),
        "current_host": topology.host,
        "current_host_rank": topology.node_rank,
        "current_instance_group": resources.group_name,
        "current_instance_group_hosts": groups.get(resources.group_name, {}).get("hosts", []),
        "current_instance_type": resources.instance_type,
        "distributed_config": {},
        "distribution_instance_groups": [resources.group_name],
        "entry_script": script,
        "framework_module": "smpkit_container",
        "framework_params": environment.framework,
        "host_count": len(resources.hosts),
        "hosts": list(resources.hosts),
        "hps": environment.hyperparameters,
        "input_config_dir": str(folders.config),
        "input_data_config": environment.channels,
        "input_data_dir": str(folders.data),
        "input_dir": str(folders.input),
        "instance_groups": list(groups),
        "instance_groups_dict": groups,
        "is_hetero": len(groups) > 1,
        "log_level": environment.framework.get(LOG_LEVEL, _LEVEL_INFO),
        "master_addr": topology.master,
        "master_port": topology.port or DEFAULT_PORT,
        "model_dir": str(folders.model),
        "module_dir": environment.framework.get(SUBMIT_DIRECTORY) or str(environment.code),
        "module_name": script.removesuffix(".py"),
        "network_interface_name": topology.interface,
        "num_cpus": environment.num_cpus,
        "num_gpus": environment.num_gpus,
        "num_neurons": 0,
        "output_data_dir": str(folders.output_data),
        "output_dir": str(folders.output),
        "output_failure": str(folders.failure),
        "output_intermediate_dir": str(folders.intermediate),
        "resource_config": resources.raw,
        "source_dir": str(environment.code),
        "user_args": list(arguments),
        "user_entry_point": script,
        **({"topology": resources.raw["topology"]} if "topology" in resources.raw else {}),
    }


def _training_env(environment: Environment, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the toolkit's own picture of the job: the same facts, some under older names."""
    renamed = {
        "additional_framework_parameters": named["framework_params"],
        "distribution_hosts": named["hosts"],
        "is_modelparallel_enabled": bool(environment.mp_parameters),
        "is_smddpmprun_installed": False,
        "is_smddprun_installed": False,
        "topology": environment.resources.raw.get("topology"),
        "channel_input_dirs": {channel: str(environment.folders.data / channel) for channel in environment.channels},
        "hyperparameters": named["hps"],
        "is_master": named["current_host_rank"] == 0,
        "job_name": environment.job_name,
        "master_hostname": named["hosts"][0],
    }
    return {key: value for key, value in named.items() if key not in ("hps", "framework_params")} | renamed


def _legacy_variables(environment: Environment, topology: Topology) -> dict[str, str]:
    """Return the variables outside SM_* that the toolkit sets too, and ours."""
    variables = {
        "CURRENT_HOST": topology.host,
        "SAGEMAKER_JOB_NAME": environment.job_name,
        "SAGEMAKER_REGION": environment.region,
        "SMPKIT_CHECKPOINT_DIR": str(environment.checkpoints),
    }
    # An empty text would hide what the platform or the user has set.
    return {name: value for name, value in variables.items() if value}


def _spellings(name: str) -> set[str]:
    """Return how the toolkits write a name in a variable: one keeps `-`, the other makes it `_`."""
    upper = name.upper()
    return {upper, upper.replace("-", "_")}


def _text(value: Any) -> str:
    if value is None:
        return ""  # as the toolkit has it: `null` would be a text that counts as true
    return value if isinstance(value, str) else compact(value)


# ---- arguments -------------------------------------------------------------------------------------------------------


def script_arguments(
    hyperparameters: Mapping[str, Any], extra: Sequence[str] = (), *, pass_mp_parameters: bool = False
) -> list[str]:
    """Return the script's arguments, as the AWS training toolkit maps hyperparameters: `--key value ...` sorted by key
    (`-k value` for one letter), followed by `extra` as it is.

    Lists and mappings are the exception: they are JSON, which SDK v3's scripts give too. The toolkit writes lists as
    Python does (`[1, None]`), and mappings as `a=1,b=None`, which nothing can read back.

    `mp_parameters` is left off unless asked for: most scripts do not declare it, and it reaches them through
    `SM_HP_MP_PARAMETERS` anyway. When asked for, it has the toolkit's form `--mp_parameters ddp=True,microbatches=4`.
    """
    arguments: list[str] = []
    for name in sorted(hyperparameters):
        value = hyperparameters[name]
        if name != MP_PARAMETERS:
            arguments += [f"-{name}" if len(name) == 1 else f"--{name}", _argument(value)]
        elif pass_mp_parameters and value:
            pairs = (f"{key}={_argument(value[key])}" for key in sorted(value))
            arguments += [f"--{name}", ",".join(pairs)]
    return [*arguments, *extra]


def compact(value: Any) -> str:
    """Return `value` as JSON without blanks and with sorted keys: one value, one text, on every host."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _argument(value: Any) -> str:
    """Return the argument's text: containers as JSON, null as an empty text, else as Python prints it (`True`)."""
    if value is None:
        return ""
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else str(value)
