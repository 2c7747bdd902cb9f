"""The API server, through Kubernetes's official client: objects as plain mappings, and in plain words why it refused.

Nothing else imports the client, which the extra `smpkit[kubernetes]` brings.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smpkit.config.words import quoted
from smpkit.errors import CloudError, SmpkitError, UnreachableError, UsageError

Object = Mapping[str, Any]

_TIMEOUT = (10, 60)
"""To connect, and between two parts of an answer, in seconds."""
_PAGE = 500
_PATHS: Mapping[str, str] = {
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
}
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""What a pod is told of itself."""


class Api:
    """One namespace of one cluster. All methods raise CloudError in plain words, UnreachableError if no answer came."""

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client  # the official package's `ApiClient`
        self.namespace = namespace

    @property
    def host(self) -> str:
        """The URL of the API server."""
        host: str = self._client.configuration.host
        return host

    def version(self) -> str:
        version: str = json.loads(self._ask("GET", "/version", "cannot reach the cluster"))["gitVersion"]
        return version

    def create(self, manifest: Object, *, dry: bool = False) -> Object:
        """Create an object; with `dry`, only learn whether it could be created."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        query = {"dryRun": "All"} if dry else {}
        return self._object("POST", kind, "", f"cannot create the {kind} `{name}`", query=query, body=manifest)

    def read(self, kind: str, name: str) -> Object | None:
        try:
            return self._object("GET", kind, f"/{name}", f"cannot read the {kind} `{name}`")
        except _MissingError:
            return None

    def patch(self, kind: str, name: str, change: Object) -> Object:
        """Merge a change into an object."""
        return self._object("PATCH", kind, f"/{name}", f"cannot change the {kind} `{name}`", body=change)

    def delete(self, kind: str, name: str) -> None:
        """Delete an object and what belongs to it."""
        body = {"propagationPolicy": "Background"}
        self._object("DELETE", kind, f"/{name}", f"cannot delete the {kind} `{name}`", body=body)

    def list(self, kind: str, selector: str) -> Iterator[Object]:
        """Yield the objects with these labels."""
        query = {"labelSelector": selector, "limit": str(_PAGE)}
        while True:
            page = self._object("GET", kind, "", f"cannot list {kind}s", query=query)
            yield from page["items"]
            query["continue"] = page.get("metadata", {}).get("continue") or ""
            if not query["continue"]:
                return

    def log(self, pod: str, since_seconds: float | None = None, tail: int | None = None) -> bytes | None:
        """Return what a pod's container has printed, each line behind its time; None if the pod is gone."""
        query = {"timestamps": "true"}
        if since_seconds is not None:
            query["sinceSeconds"] = str(max(1, math.ceil(since_seconds)))
        if tail is not None:
            query["tailLines"] = str(tail)
        path = f"{_PATHS['Pod'].format(self.namespace)}/{pod}/log"
        try:
            return self._ask("GET", path, f"cannot read the log of the pod `{pod}`", query=query)
        except _MissingError:
            return None

    def _object(self, method: str, kind: str, rest: str, doing: str, **more: Any) -> Object:
        answer: Object = json.loads(self._ask(method, _PATHS[kind].format(self.namespace) + rest, doing, **more))
        return answer

    def _ask(
        self, method: str, path: str, doing: str, query: Mapping[str, str] | None = None, body: Object | None = None
    ) -> bytes:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            response = self._client.call_api(
                path, method, query_params=list((query or {}).items()), body=body, auth_settings=["BearerToken"],
                header_params={"Content-Type": kind, "Accept": "*/*"}, _return_http_data_only=True,
                _preload_content=False, _request_timeout=_TIMEOUT,
            )  # fmt: skip
            return bytes(response.read())
        except ApiException as error:
            raise _refusal(error, doing, self) from None
        except HTTPError as error:
            reason = str(getattr(error, "reason", None) or error)
            hint = "`kubectl cluster-info` shows whether the cluster answers; `--profile` chooses another context"
            raise UnreachableError(f"{doing}: {self.host} did not answer: {reason}", hint=hint) from None


class _MissingError(CloudError):
    """There is no such object."""


def connect(context: str | None, namespace: str | None) -> Api:
    """Open a cluster: with the kubeconfig's context, or in a pod with its own service account; nothing is asked yet."""
    try:
        from kubernetes import client, config
    except ImportError:
        hint = "`pip install 'smpkit[kubernetes]'`"
        raise UsageError("Kubernetes needs its client, which is not installed", hint=hint) from None
    options = client.Configuration()
    options.retries = 0  # who waits or follows tries again, and says so
    doing = "cannot use Kubernetes"
    file = os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        contexts, active = config.list_kube_config_contexts(file)
    except config.ConfigException as error:
        if context is None:
            with contextlib.suppress(config.ConfigException):
                config.load_incluster_config(client_configuration=options)
                own = _OWN_NAMESPACE.read_text(encoding="utf-8").strip() if _OWN_NAMESPACE.is_file() else "default"
                return Api(client.ApiClient(options), namespace or own)
        hint = "KUBECONFIG names the file; your cluster's provider has a command that writes it"
        raise CloudError(f"{doing}: {str(error).rstrip('.').lower()}", hint=hint) from None
    names = [entry["name"] for entry in contexts]
    if context is not None and context not in names:
        hint = f"those are {', '.join(names)}"
        raise UsageError(f"{doing}: the kubeconfig has no context {quoted(context)}", hint=hint)
    chosen = active if context is None else contexts[names.index(context)]
    try:
        config.load_kube_config(file, chosen["name"], client_configuration=options)
    except config.ConfigException as error:
        raise CloudError(f"{doing}: {error}", hint="look at the kubeconfig with `kubectl config view`") from None
    return Api(client.ApiClient(options), namespace or chosen["context"].get("namespace") or "default")


def _refusal(error: Any, doing: str, api: Api) -> SmpkitError:
    try:
        message = str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{error.status} {error.reason}"
    words = "the cluster does not know these credentials" if error.status == 401 else " ".join(message.split())
    if error.status in (429, 500, 502, 503, 504):
        return UnreachableError(f"{doing}: {words}", hint="try again in a minute")
    hints = {
        401: "log in again as your cluster's provider says; `kubectl get pods` then works, too",
        403: f"a Role in the namespace `{api.namespace}` must allow it",
        409: "`--name` gives another name",
    }
    kind = _MissingError if error.status == 404 else CloudError
    return kind(f"{doing}: {words}", hint=hints.get(error.status))
