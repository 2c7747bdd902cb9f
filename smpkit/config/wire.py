"""Names on the wire between whoever submits a job and the launcher in its containers; each stands here once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# ---- hyperparameters of AWS's SDK v2 and training toolkit ------------------------------------------------------------

MP_PARAMETERS: Final = "mp_parameters"
PROGRAM: Final = "sagemaker_program"
SUBMIT_DIRECTORY: Final = "sagemaker_submit_directory"
LOG_LEVEL: Final = "sagemaker_container_log_level"
JOB_NAME: Final = "sagemaker_job_name"
REGION: Final = "sagemaker_region"
INSTANCE_TYPE: Final = "sagemaker_instance_type"
MPI_ENABLED: Final = "sagemaker_mpi_enabled"
MPI_OPTIONS: Final = "sagemaker_mpi_custom_mpi_options"
TORCHRUN_ENABLED: Final = "sagemaker_torch_distributed_enabled"
DATA_PARALLEL_ENABLED: Final = "sagemaker_distributed_dataparallel_enabled"

HOMOGENEOUS: Final = "homogeneousCluster"
"""What SageMaker calls the one group of a job whose hosts are all of one kind."""

INSTANCE_GROUPS: Final = "sagemaker_distribution_instance_groups"
"""Names the groups whose hosts run ranks, in a job with different machines."""

PROCESSES_PER_HOST: Final[Mapping[str, str]] = {
    "mpirun": "sagemaker_mpi_num_of_processes_per_host",
    # Ours: the SDK has no such hyperparameter for torchrun.
    "torchrun": "sagemaker_smpkit_processes_per_host",
}
"""Ranks per host, by launcher."""

# ---- hyperparameters of our own; the prefix keeps them from the script -----------------------------------------------

SECRETS: Final = "sagemaker_smpkit_secrets"
"""Variable -> `{"entry": name or ARN, "key": key of a JSON object or null}` in AWS Secrets Manager."""

TOKEN_FILE: Final = "sagemaker_smpkit_token_file"  # noqa: S105 - where it is
"""The file with the secret by which hosts of a job know each other: an S3 URI, or a path where a channel brings it."""

# ---- channels, where a container has no network ----------------------------------------------------------------------

CODE_CHANNEL: Final = "code"
TOKEN_CHANNEL: Final = "smpkit_token"  # noqa: S105 - its name
TOKEN_NAME: Final = "token"  # noqa: S105 - its name
"""Of the file, at the end of its URI."""

CHANNELS: Final = "/opt/ml/input/data"
"""Where the platform puts them in a container."""

# ---- the source archive ----------------------------------------------------------------------------------------------

MAX_UNPACKED_BYTES: Final = 8 * 2**30
"""The most that the launcher unpacks; a job with more would fail on machines that are paid for."""
