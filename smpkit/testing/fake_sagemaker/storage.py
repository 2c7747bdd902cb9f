"""The fake's S3: buckets that exist, objects in memory."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from smpkit.testing.fake_sagemaker.client import Handler, client_error
from smpkit_estimator.backend import Clock

__all__ = ["FakeObject", "FakeStorage"]


@dataclass(frozen=True)
class FakeObject:
    """An object, and how it was to be encrypted."""

    content: bytes
    modified: datetime
    kms_key: str | None = None


class FakeStorage:
    """All buckets. Any bucket exists unless its name is in `missing_buckets`.

    `objects` maps `s3://bucket/key` to an object; tests may read and fill it.
    """

    def __init__(self, clock: Clock, page_keys: int = 1000) -> None:
        self._clock = clock
        self.page_keys = page_keys
        self.objects: dict[str, FakeObject] = {}
        self.missing_buckets: set[str] = set()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Method of the client -> what answers it."""
        return {
            "put_object": self.put_object,
            "head_object": self.head_object,
            "head_bucket": self.head_bucket,
            "get_object": self.get_object,
            "delete_object": self.delete_object,
            "list_objects_v2": self.list_objects_v2,
        }

    def put(self, uri: str, content: bytes = b"") -> None:
        """Put an object there as a training job would."""
        self.objects[uri] = FakeObject(content, self._clock.now())

    def put_object(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Store an object."""
        self._check_bucket(request, "PutObject", "NoSuchBucket")
        body = request.get("Body", b"")
        content = body if isinstance(body, bytes) else body.read()
        self.objects[_uri(request)] = FakeObject(content, self._clock.now(), request.get("SSEKMSKeyId"))
        return {}

    def head_object(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Tell whether an object is there; as S3 does, without saying whether it is the bucket that is missing."""
        self._check_bucket(request, "HeadObject", "404")
        found = self.objects.get(_uri(request))
        if found is None:
            raise client_error("404", "Not Found", "HeadObject", 404)
        return {"ContentLength": len(found.content), "LastModified": found.modified}

    def head_bucket(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Tell whether a bucket is there."""
        self._check_bucket(request, "HeadBucket", "404")
        return {}

    def get_object(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Read an object."""
        self._check_bucket(request, "GetObject", "NoSuchBucket")
        found = self.objects.get(_uri(request))
        if found is None:
            raise client_error("NoSuchKey", "The specified key does not exist.", "GetObject", 404)
        return {"Body": io.BytesIO(found.content), "ContentLength": len(found.content)}

    def delete_object(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Delete an object, if it is there."""
        self._check_bucket(request, "DeleteObject", "NoSuchBucket")
        self.objects.pop(_uri(request), None)
        return {}

    def list_objects_v2(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """List objects by name, a page at a time."""
        self._check_bucket(request, "ListObjectsV2", "NoSuchBucket")
        bucket = f"s3://{request['Bucket']}/"
        keys = sorted(uri.removeprefix(bucket) for uri in self.objects if uri.startswith(bucket))
        keys = [key for key in keys if key.startswith(request.get("Prefix", ""))]
        start = int(request.get("ContinuationToken", "0"))
        page = keys[start : start + self.page_keys]
        more = len(keys) > start + self.page_keys
        found = [(key, self.objects[bucket + key]) for key in page]
        return {
            "Contents": [{"Key": key, "Size": len(o.content), "LastModified": o.modified} for key, o in found],
            "IsTruncated": more,
            **({"NextContinuationToken": str(start + self.page_keys)} if more else {}),
        }

    def _check_bucket(self, request: Mapping[str, Any], operation: str, code: str) -> None:
        if request["Bucket"] in self.missing_buckets:
            message = "The specified bucket does not exist" if code == "NoSuchBucket" else "Not Found"
            raise client_error(code, message, operation, 404)


def _uri(request: Mapping[str, Any]) -> str:
    return f"s3://{request['Bucket']}/{request['Key']}"
