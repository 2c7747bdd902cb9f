"""Check what a managed job needs, one finding for each thing, with what to do about it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from functools import partial

from smpkit.config.job import JobConfig
from smpkit_estimator.backend import Finding, tried
from smpkit_estimator.cloud import Cloud, split_uri

__all__ = ["check_cloud", "check_job"]

_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/(?P<name>[^:@]+)"
    r"(:(?P<tag>[^@]+))?(@(?P<digest>sha256:[0-9a-f]+))?"
)
_PROBE = "smpkit/doctor"


def check_cloud(cloud: Cloud, *, needed: bool = True) -> list[Finding]:
    """Check credentials and region; that they are missing is a problem only if they are `needed`."""

    def look() -> Finding:
        who = cloud.identity()
        return Finding("credentials", "ok", f"credentials: {who.arn}, {cloud.region}")

    return [tried("credentials", look, needed=needed)]


def check_job(job: JobConfig, cloud: Cloud, *, write: bool = False) -> list[Finding]:
    """Look at what a job names: role, bucket, image, quota.

    Args:
        write: also put and delete a small object where the results will go.
    """
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("role", lambda: _role(job, cloud)),
        ("output", lambda: _output(job, cloud, write=write)),
        ("image", lambda: _image(job, cloud)),
        *(("quota", partial(_quota, job, cloud, kind)) for kind in dict.fromkeys(_kinds(job))),
    ]
    return [tried(what, check) for what, check in checks]


def _kinds(job: JobConfig) -> list[str]:
    return [group.instance_type for group in job.compute.machines]


def _role(job: JobConfig, cloud: Cloud) -> Finding:
    if job.role is None:
        return Finding("role", "problem", "the job names no role", "set `role` to an IAM role that SageMaker may take")
    name = job.role.rpartition("/")[2]
    role = cloud.ask("iam", "get_role", f"cannot look at role `{name}`", RoleName=name)["Role"]
    trust = str(role.get("AssumeRolePolicyDocument", "sagemaker.amazonaws.com"))
    if "sagemaker.amazonaws.com" not in trust:
        hint = "add `sagemaker.amazonaws.com` to the role's trust policy, for `sts:AssumeRole`"
        return Finding("role", "problem", f"role `{name}` does not trust SageMaker", hint)
    return Finding("role", "ok", f"role: {role['Arn']}")


def _output(job: JobConfig, cloud: Cloud, *, write: bool) -> Finding:
    uri = job.output or f"s3://sagemaker-{cloud.region}-{cloud.identity().account}/"
    if "://" not in uri:
        return Finding("output", "problem", f"output is a folder of this machine, `{uri}`", "set `output` to an S3 URI")
    bucket = split_uri(uri)[0]
    cloud.ask("s3", "head_bucket", f"cannot reach bucket s3://{bucket}", Bucket=bucket)
    if not write:
        return Finding("output", "ok", f"bucket s3://{bucket} is there (`--write` tries to write to it)")
    probe = f"{uri.rstrip('/')}/{_PROBE}"
    cloud.upload(io.BytesIO(b"written by smpkit doctor\n"), probe, job.encryption.output_key)
    cloud.delete(probe)
    return Finding("output", "ok", f"wrote to and deleted from {uri}")


def _image(job: JobConfig, cloud: Cloud) -> Finding:
    if job.image is None:
        return Finding(
            "image", "problem", "the job names no image", "push an image with smpkit to ECR, and set `image`"
        )
    found = _ECR.fullmatch(job.image)
    if found is None:
        return Finding("image", "info", f"image {job.image} is not in ECR, so it was not looked for")
    if found["region"] != cloud.region:
        text = f"image {job.image} is in {found['region']}, the job in {cloud.region}"
        return Finding("image", "problem", text, "push it to a repository of this region")
    wanted = {"imageDigest": found["digest"]} if found["digest"] else {"imageTag": found["tag"] or "latest"}
    doing = f"cannot find image {job.image}"
    cloud.ask(
        "ecr", "describe_images", doing, registryId=found["account"], repositoryName=found["name"], imageIds=[wanted]
    )
    return Finding("image", "ok", f"image: {job.image}")


def _quota(job: JobConfig, cloud: Cloud, kind: str) -> Finding:
    asked = sum(group.instance_count for group in job.compute.machines if group.instance_type == kind)
    if kind == "local":
        return Finding("quota", "problem", "instance_type is `local`", "set `compute.instance_type`")
    name = f"{kind} for {'spot ' if job.compute.spot else ''}training job usage"
    for quota in _quotas(cloud):
        if quota.get("QuotaName") == name:
            return _judged(name, float(str(quota["Value"])), asked)
    return Finding("quota", "info", f"no quota is called `{name}`")


def _quotas(cloud: Cloud) -> Iterator[dict[str, object]]:
    arguments: dict[str, object] = {"ServiceCode": "sagemaker"}
    while True:
        page = cloud.ask("service-quotas", "list_service_quotas", "cannot read the quotas", **arguments)
        yield from page["Quotas"]
        if not page.get("NextToken"):
            return
        arguments["NextToken"] = page["NextToken"]


def _judged(name: str, value: float, asked: int) -> Finding:
    if asked > value:
        text = f"quota `{name}` is {value:g}, the job asks for {asked}"
        return Finding("quota", "problem", text, "ask for more under Service Quotas in the AWS console")
    return Finding("quota", "ok", f"quota: {value:g} × {name}")
