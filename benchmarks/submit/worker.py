"""One task of the benchmark, in a process of its own and in the job's folder: `worker.py request|pack sdk2|smpkit`."""

from __future__ import annotations

import importlib
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()


def request_of_smpkit() -> int:
    """What `smpkit submit job.yaml --dry-run --json` does, up to the text that it prints."""
    from click.testing import CliRunner

    from smpkit.cli.main import cli

    done = CliRunner().invoke(cli, ["submit", "job.yaml", "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    return len(done.stdout)


def request_of_sdk2() -> int:
    """Make the same request with the SDK; its upload goes nowhere, since it has no dry run."""
    from unittest import mock

    import boto3
    from sagemaker import Session
    from sagemaker.pytorch import PyTorch

    session = Session(boto_session=boto3.Session(), default_bucket="bucket")
    session.sagemaker_client.create_training_job = mock.Mock()
    parameters = {"partitions": 2, "microbatches": 4, "ddp": True}
    # The SDK tells AWS of every call, which would be time on the network.
    with mock.patch("sagemaker.telemetry.telemetry_logging._send_telemetry_request"):
        estimator = PyTorch(
            entry_point="train.py",
            source_dir=".",
            image_uri="123456789012.dkr.ecr.us-west-2.amazonaws.com/smpkit:latest",
            role="arn:aws:iam::123456789012:role/SM",
            output_path="s3://bucket/out",
            instance_type="ml.p4d.24xlarge",
            instance_count=2,
            debugger_hook_config=False,
            disable_profiler=True,
            sagemaker_session=session,
            distribution={
                "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
                "mpi": {"enabled": True, "processes_per_host": 8},
            },
        )
        with mock.patch.object(estimator, "_stage_user_code_in_s3", side_effect=_packed_by_the_sdk):
            estimator.fit(wait=False)
    return len(json.dumps(session.sagemaker_client.create_training_job.call_args.kwargs, indent=2))


def _packed_by_the_sdk() -> Any:
    from sagemaker.fw_utils import UploadedCode

    pack_of_sdk2()
    return UploadedCode(s3_prefix="s3://bucket/job/source/sourcedir.tar.gz", script_name="train.py")


def pack_of_smpkit() -> int:
    """Find, check, hash and pack, as `smpkit submit` does."""
    from smpkit_estimator.sources import collect, pack

    with tempfile.TemporaryFile() as file:
        sources = collect(Path())
        pack(sources)
        pack(sources, file)
        return file.tell()


def pack_of_sdk2() -> int:
    """Pack as `fit` does."""
    from sagemaker.utils import create_tar_file

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "sourcedir.tar.gz")
        create_tar_file([str(path) for path in Path().iterdir()], str(target))
        return target.stat().st_size


TASKS = {
    ("request", "smpkit"): request_of_smpkit,
    ("request", "sdk2"): request_of_sdk2,
    ("pack", "smpkit"): pack_of_smpkit,
    ("pack", "sdk2"): pack_of_sdk2,
}


def main() -> None:
    task, who = sys.argv[1:]
    wall, cpu = BEGAN, 0.0
    if task == "pack":  # imports do not count
        importlib.import_module("sagemaker.utils" if who == "sdk2" else "smpkit_estimator.sources")
        wall, cpu = time.perf_counter(), time.process_time()
    size = TASKS[task, who]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    print(json.dumps({**spent, "peak": peak, "bytes": size}))


if __name__ == "__main__":
    main()
