"""Write what the platform tells a container below `/opt/ml/input/config`, for local runs and for containers here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from smpkit.config.job import HOMOGENEOUS, JobConfig
from smpkit.config.wire import INSTANCE_GROUPS, PROCESSES_PER_HOST
from smpkit_estimator.hyperparameters import hyperparameters

__all__ = ["config_files"]


def config_files(
    job: JobConfig,
    *,
    hosts: Sequence[str],
    host: str,
    submit_directory: str,
    job_name: str,
    ranks_per_host: int,
    interface: str,
    checkpoints: str,
) -> dict[str, Any]:
    """Return the contents of the files that host `host` sees, by name without `.json`.

    Args:
        submit_directory: the path of the sources as the host sees it; likewise `checkpoints`.
        interface: the network interface over which the hosts talk.
    """
    sent = hyperparameters(job, submit_directory=submit_directory, job_name=job_name, region="")
    sent.pop(INSTANCE_GROUPS, None)  # of a job with groups, only the hosts with ranks run here
    sent[PROCESSES_PER_HOST[job.distribution.launcher]] = json.dumps(ranks_per_host)
    return {
        "hyperparameters": sent,
        "resourceconfig": {
            "current_host": host,
            "current_instance_type": "local",
            "current_group_name": HOMOGENEOUS,
            "hosts": list(hosts),
            "instance_groups": [{"instance_group_name": HOMOGENEOUS, "instance_type": "local", "hosts": list(hosts)}],
            "network_interface_name": interface,
        },
        "inputdataconfig": {
            name: {
                "TrainingInputMode": channel.mode or job.input_mode,
                "S3DistributionType": "FullyReplicated",
                "RecordWrapperType": "None",
                **({"ContentType": channel.content_type} if channel.content_type else {}),
            }
            for name, channel in job.inputs.items()
        },
        "checkpointconfig": {"LocalPath": checkpoints},
    }
