"""Download what was submitted beside the request, with the credentials of the job's role."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from smpkit.errors import LaunchError
from smpkit_container.environment import Environment

__all__ = ["download"]


def download(environment: Environment, uri: str, target: Path, what: str) -> None:
    """Download an object to a file.

    Args:
        what: for the message, such as `the source archive`.

    Raises:
        LaunchError: it cannot be downloaded.
    """
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    parts = urlsplit(uri)
    region = str(environment.framework.get("sagemaker_region") or "") or None
    try:
        boto3.client("s3", region_name=region).download_file(parts.netloc, parts.path.lstrip("/"), str(target))
    except (BotoCoreError, ClientError, OSError) as error:
        raise LaunchError(
            f"{what} {uri} cannot be downloaded: {error}", hint="the job's role needs s3:GetObject for it"
        ) from error
