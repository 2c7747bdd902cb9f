"""Arguments of estimators that SDK v2 and we must turn into the same request. Imports nothing, for the SDK's sake."""

from __future__ import annotations

from typing import Any

ROLE = "arn:aws:iam::123456789012:role/SM"
IMAGE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/smpkit:latest"
REGION = "us-west-2"
JOB_NAME = "smpkit-2026-11-20-18-18-11-237"

SMP = {
    "partitions": 2,
    "microbatches": 4,
    "pipeline": "interleaved",
    "ddp": True,
    "optimize": "speed",
    "placement_strategy": "cluster",
}
MPI = {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "-verbose --mca orte_base_help_aggregate 0"}
DISTRIBUTION = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": SMP}}, "mpi": MPI}

BASE: dict[str, Any] = {
    "role": ROLE,
    "image_uri": IMAGE,
    "instance_count": 2,
    "instance_type": "ml.p4d.24xlarge",
    "output_path": "s3://smpkit-demo/",
    "debugger_hook_config": False,
    "disable_profiler": True,
}

CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "model-parallel-mpi-spot": (
        {
            **BASE,
            "distribution": DISTRIBUTION,
            "hyperparameters": {"epochs": 3, "lr": 0.001, "name": "a b"},
            "environment": {"FOO": "1"},
            "use_spot_instances": True,
            "max_run": 3600,
            "max_wait": 7200,
            "checkpoint_s3_uri": "s3://smpkit-demo/ckpt",
        },
        {"train": "s3://smpkit-demo/data"},
    ),
    "no-distribution": (BASE, None),
    "one-input": (BASE, "s3://smpkit-demo/data"),
    "torch-distributed": ({**BASE, "distribution": {"torch_distributed": {"enabled": True}}}, None),
    "mpi-alone": ({**BASE, "distribution": {"mpi": {"enabled": True}}}, None),
    "hyperparameters-of-all-kinds": (
        {
            **BASE,
            "hyperparameters": {
                "text": 'it\'s "quoted" \\ é 語',
                "flag": True,
                "nothing": None,
                "list": [1, 2.5, "x"],
                "nested": {"a": {"b": [False]}},
                "a.dotted-name": -1e-9,
                "big": 10**18,
                "empty": "",
            },
        },
        None,
    ),
    "isolated": (
        {
            **BASE,
            "enable_network_isolation": True,
            "encrypt_inter_container_traffic": True,
            "subnets": ["subnet-1", "subnet-2"],
            "security_group_ids": ["sg-1"],
        },
        {"train": "s3://smpkit-demo/data"},
    ),
    "keys-and-tags": (
        {
            **BASE,
            "output_kms_key": "arn:aws:kms:us-west-2:123456789012:key/1234",
            "volume_kms_key": "alias/disks",
            "tags": [{"Key": "team", "Value": "research"}, {"Key": "cost center", "Value": "42"}],
            "metric_definitions": [{"Name": "loss", "Regex": "loss=([0-9.]+)"}],
            "volume_size": 500,
            "keep_alive_period_in_seconds": 1800,
            "max_retry_attempts": 3,
            "disable_output_compression": True,
            "container_log_level": 10,
        },
        None,
    ),
    "container-command": (
        {
            **BASE,
            "container_entry_point": ["python", "-m", "smpkit_container"],
            "container_arguments": ["train"],
            "enable_remote_debug": True,
            "enable_infra_check": True,
            "checkpoint_s3_uri": "s3://smpkit-demo/ckpt",
            "checkpoint_local_path": "/opt/ml/state",
            "input_mode": "FastFile",
            "training_plan": "arn:aws:sagemaker:us-west-2:123456789012:training-plan/reserved",
        },
        {"train": "s3://smpkit-demo/data", "test": "s3://smpkit-demo/test"},
    ),
}
"""name -> (arguments of the estimator, inputs of `fit`)."""

INPUTS: dict[str, Any] = {
    "s3_data": "s3://smpkit-demo/manifest",
    "distribution": "ShardedByS3Key",
    "compression": "Gzip",
    "content_type": "application/x-recordio",
    "record_wrapping": "RecordIO",
    "s3_data_type": "AugmentedManifestFile",
    "input_mode": "Pipe",
    "attribute_names": ["image", "label"],
}
"""Arguments of a `TrainingInput`, with everything set."""
