"""Check what a managed job needs, one finding for each thing, with what to do about it."""

from __future__ import annotations

import io
import re

from smpkit.config.job import JobConfig
from smpkit_estimator.aws import Cloud, split_uri
from smpkit_estimator.backend import Finding, tried

__all__ = ["check_cloud", "check_job"]

_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/(?P<name>[^:@]+)"
    r"(:(?P<tag>[^@]+))?(@(?P<digest>sha256:[0-9a-f]+))?"
)
_PROBE = "smpkit/doctor"


def check_cloud(cloud: Cloud, *, needed: bool = True) -> list[Finding]:
    """Check credentials and region; that they are missing is a problem only if they are `needed`."""

    def look() -> Finding:
        return Finding("credentials", "ok", f"credentials: {cloud.identity().arn}, {cloud.region}")

    return [tried("credentials", look, needed=needed)]


def check_job(job: JobConfig, cloud: Cloud, *, write: bool = False) -> list[Finding]:
    """Look at what a job names: role, bucket, image.

    Args:
        write: also put and delete a small object where the results will go.
    """
    return [
        tried("role", lambda: _role(job, cloud)),
        tried("output", lambda: _output(job, cloud, write=write)),
        tried("image", lambda: _image(job, cloud)),
    ]


def _role(job: JobConfig, cloud: Cloud) -> Finding:
    if job.role is None:
        return Finding("role", "problem", "the job names no role", "set `role` to an IAM role that SageMaker may take")
    name = job.role.rpartition("/")[2]
    role = cloud.ask("iam", "get_role", f"cannot look at role `{name}`", RoleName=name)["Role"]
    if "sagemaker.amazonaws.com" not in str(role.get("AssumeRolePolicyDocument", "sagemaker.amazonaws.com")):
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
        hint = "push an image with smpkit to ECR, and set `image`"
        return Finding("image", "problem", "the job names no image", hint)
    place = _ECR.fullmatch(job.image)
    if place is None:
        return Finding("image", "info", f"image {job.image} is not in ECR, so it was not looked for")
    if place["region"] != cloud.region:
        text = f"image {job.image} is in {place['region']}, the job in {cloud.region}"
        return Finding("image", "problem", text, "push it to a repository of this region")
    wanted = {"imageDigest": place["digest"]} if place["digest"] else {"imageTag": place["tag"] or "latest"}
    repository = {"registryId": place["account"], "repositoryName": place["name"]}
    cloud.ask("ecr", "describe_images", f"cannot find image {job.image}", **repository, imageIds=[wanted])
    return Finding("image", "ok", f"image: {job.image}")
