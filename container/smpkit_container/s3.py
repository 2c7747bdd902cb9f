"""Download what was submitted beside the request, and upload what the script leaves, as the job's role."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from smpkit.errors import LaunchError
from smpkit_container.environment import Environment

__all__ = ["download", "fetch", "put"]


def download(environment: Environment, uri: str, target: Path, what: str) -> None:
    """Download an object to a file.

    Args:
        what: for the message, such as `the source archive`.

    Raises:
        LaunchError: it cannot be downloaded.
    """
    fetch(uri, target, what, _region(environment))


def fetch(uri: str, target: Path, what: str, region: str | None = None) -> None:
    """Download an object to a file, as `download` does, before the job's own region is known."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    parts = urlsplit(uri)
    try:
        boto3.client("s3", region_name=region).download_file(parts.netloc, parts.path.lstrip("/"), str(target))
    except (BotoCoreError, ClientError, OSError) as error:
        raise LaunchError(
            f"{what} {uri} cannot be downloaded: {error}", hint="the job's role needs s3:GetObject for it"
        ) from error


def put(path: Path, uri: str, region: str | None = None) -> None:
    """Upload a file.

    Raises:
        LaunchError: it cannot be uploaded.
    """
    import boto3
    from boto3.exceptions import Boto3Error
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    parts = urlsplit(uri)
    config = Config(connect_timeout=10, read_timeout=30, retries={"total_max_attempts": 3})
    try:
        client = boto3.client("s3", region_name=region, config=config)
        client.upload_file(str(path), parts.netloc, parts.path.lstrip("/"))
    except (Boto3Error, BotoCoreError, ClientError, OSError, ValueError) as error:
        hint = "the job's role needs s3:PutObject for it"
        raise LaunchError(f"{path} cannot be uploaded to {uri}: {error}", hint=hint) from error


def _region(environment: Environment) -> str | None:
    return str(environment.framework.get("sagemaker_region") or "") or None
