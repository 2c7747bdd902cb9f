"""Download what was submitted beside the request, and upload why a job failed, as the job's role."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from smpkit.errors import LaunchError

__all__ = ["fetch", "put"]


def fetch(uri: str, target: Path, what: str, region: str | None = None) -> None:
    """Download an object to a file.

    Args:
        what: for the message, such as `the source archive`.

    Raises:
        LaunchError: it cannot be downloaded.
    """
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    parts = urlsplit(uri)
    try:
        boto3.client("s3", region_name=region).download_file(parts.netloc, parts.path.lstrip("/"), str(target))
    except (BotoCoreError, ClientError, OSError) as error:
        hint = "the job's role needs s3:GetObject for it"
        raise LaunchError(f"{what} {uri} cannot be downloaded: {error}", hint=hint) from error


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
