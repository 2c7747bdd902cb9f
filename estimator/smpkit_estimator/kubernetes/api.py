"""The API server, through Kubernetes's official client: objects as plain mappings, and in plain words why it refused.

Nothing else imports the client, which the extra `smpkit[kubernetes]` brings.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smpkit.config.words import quoted
from smpkit.errors import CloudError, SmpkitError, UnreachableError, UsageError
from smpkit_estimator.kubernetes.manifests import JOBSET

__all__ = ["Api", "Object", "connect"]

Object = Mapping[str, Any]

_TIMEOUT = (10, 60)
"""To connect, and between two parts of an answer, in seconds."""
_CHUNK_BYTES = 1 << 20
_PAGE = 500
_KINDS: Mapping[str, tuple[str, str]] = {
    "ConfigMap": ("CoreV1Api", "config_map"),
    "Job": ("BatchV1Api", "job"),
    "PersistentVolumeClaim": ("CoreV1Api", "persistent_volume_claim"),
    "Pod": ("CoreV1Api", "pod"),
    "Secret": ("CoreV1Api", "secret"),
    "Service": ("CoreV1Api", "service"),
}
"""Kind -> class of the client, and the end of its methods' names."""
_CUSTOM = {"JobSet": (*JOBSET.split("/"), "jobsets"), "LocalQueue": ("kueue.x-k8s.io", "", "localqueues")}
"""Kind -> group, version (empty: the one that the cluster prefers), plural."""
_INSTALL = "`pip install 'smpkit[kubernetes]'`"


class Api:
    """One namespace of one cluster. All methods raise CloudError in plain words, UnreachableError if no answer came."""

    def __init__(self, client: Any, namespace: str) -> None:
        """Take a client of the official package, `ApiClient`."""
        self._client = client
        self.namespace = namespace

    @property
    def host(self) -> str:
        """The URL of the API server."""
        host: str = self._client.configuration.host
        return host

    def version(self) -> str:
        """Return the cluster's version."""
        from kubernetes import client

        call = client.VersionApi(self._client).get_code
        version: str = self._called(call, "cannot reach the cluster")["gitVersion"]
        return version

    def has_group(self, group: str) -> bool:
        """Tell whether the cluster serves an API group, such as `jobset.x-k8s.io`."""
        return group in self._groups()

    def _groups(self) -> dict[str, str]:
        """Return the API groups that the cluster serves, with the versions that it prefers."""
        from kubernetes import client

        found = self._called(client.ApisApi(self._client).get_api_versions, "cannot look at the cluster's APIs")
        return {each["name"]: each["preferredVersion"]["version"] for each in found["groups"]}

    def create(self, manifest: Object) -> Object:
        """Create an object."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        made: Object = self._called(self._method("create", kind), f"cannot create the {kind} `{name}`", body=manifest)
        return made

    def read(self, kind: str, name: str) -> Object | None:
        """Return an object; None if there is none."""
        doing = f"cannot read the {kind} `{name}`"
        found: Object | None = self._called(self._method("get", kind), doing, missing=None, name=name)
        return found

    def patch(self, kind: str, name: str, change: Object) -> Object:
        """Merge a change into an object."""
        doing = f"cannot change the {kind} `{name}`"
        changed: Object = self._called(self._method("patch", kind), doing, name=name, body=dict(change))
        return changed

    def delete(self, kind: str, name: str) -> None:
        """Delete an object and what belongs to it; nothing if there is none."""
        body = {"propagationPolicy": "Background"}
        self._called(
            self._method("delete", kind), f"cannot delete the {kind} `{name}`", missing={}, name=name, body=body
        )

    def list(self, kind: str, selector: str) -> Iterator[Object]:
        """Yield the objects with these labels."""
        method, token = self._method("list", kind), ""
        while True:
            more = {"_continue": token} if token else {}
            doing = f"cannot list {kind}s"
            page = self._called(method, doing, label_selector=selector, limit=_PAGE, **more)
            yield from page["items"]
            token = page.get("metadata", {}).get("continue") or ""
            if not token:
                return

    def namespaces_of_jobs(self, selector: str) -> set[str]:
        """Return the namespaces that have Jobs with these labels."""
        from kubernetes import client

        call = client.BatchV1Api(self._client).list_job_for_all_namespaces
        page = self._called(call, "cannot list Jobs of all namespaces", label_selector=selector, limit=_PAGE)
        return {each["metadata"]["namespace"] for each in page["items"]}

    def may(
        self, verb: str, resource: str, group: str = "", subresource: str = "", *, everywhere: bool = False
    ) -> bool:
        """Tell whether this identity may do something in the namespace, or in all of them."""
        from kubernetes import client

        attributes = {"namespace": "" if everywhere else self.namespace, "verb": verb, "resource": resource}
        attributes |= {"group": group, **({"subresource": subresource} if subresource else {})}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        call = client.AuthorizationV1Api(self._client).create_self_subject_access_review
        return bool(self._called(call, "cannot ask for the permissions", body=review)["status"]["allowed"])

    def log(self, pod: str, since_seconds: float | None = None, tail: int | None = None) -> bytes | None:
        """Return what a pod's container has printed, each line behind its time; None if the pod is gone.

        Args:
            since_seconds: only what was printed so long ago at most.
            tail: only so many lines of the end.
        """
        from kubernetes import client

        options: dict[str, Any] = {"timestamps": True}
        if since_seconds is not None:
            options["since_seconds"] = max(1, math.ceil(since_seconds))
        if tail is not None:
            options["tail_lines"] = tail
        call = client.CoreV1Api(self._client).read_namespaced_pod_log
        arguments = {"name": pod, "namespace": self.namespace, **options}
        found: bytes | None = self._answer(call, f"cannot read the log of the pod `{pod}`", None, arguments)
        return found

    def _method(self, verb: str, kind: str) -> Any:
        """Return the client's method for one kind of object of the namespace, as a function of the rest."""
        from kubernetes import client

        if kind in _CUSTOM:
            group, version, plural = _CUSTOM[kind]
            version = version or self._groups()[group]
            place = {"group": group, "version": version, "namespace": self.namespace, "plural": plural}
            custom = getattr(client.CustomObjectsApi(self._client), f"{verb}_namespaced_custom_object")
            return lambda **rest: custom(**place, **rest)
        owner, ending = _KINDS[kind]
        api = getattr(client, owner)(self._client)
        method = getattr(api, f"{'read' if verb == 'get' else verb}_namespaced_{ending}")
        return lambda **rest: method(namespace=self.namespace, **rest)

    def _called(self, call: Any, doing: str, *, missing: Any = ..., **arguments: Any) -> Any:
        data = self._answer(call, doing, missing, arguments)
        return data if not isinstance(data, bytes) else json.loads(data)

    def _answer(self, call: Any, doing: str, missing: Any, arguments: Mapping[str, Any]) -> Any:
        """Call, and return the answer as it came; `missing` for what is not there, unless that is an error (...)."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            response = call(**arguments, _preload_content=False, _request_timeout=_TIMEOUT)
            return b"".join(response.stream(_CHUNK_BYTES))
        except ApiException as error:
            if error.status == 404 and missing is not ...:
                return missing
            raise _refusal(error, doing, self) from None
        except HTTPError as error:
            reason = str(getattr(error, "reason", None) or error)
            hint = "`kubectl cluster-info` shows whether the cluster answers; `--profile` chooses another context"
            raise UnreachableError(f"{doing}: {self.host} did not answer: {reason}", hint=hint) from None


def connect(context: str | None, namespace: str | None) -> Api:
    """Open a cluster: with the kubeconfig's context, or in a pod with its own service account; nothing is asked yet.

    Raises:
        UsageError: the client is not installed, or there is no such context.
        CloudError: there is no kubeconfig, or it is damaged.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        raise UsageError("Kubernetes needs its client, which is not installed", hint=_INSTALL) from None
    options = client.Configuration()
    options.retries = 0  # who waits or follows tries again, and says so
    doing = "cannot use Kubernetes"
    file = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    try:
        contexts, active = config.list_kube_config_contexts(file)
    except config.ConfigException as error:
        if context is None and _in_cluster(options):
            own = _own_namespace()
            return Api(client.ApiClient(options), namespace or own)
        hint = "KUBECONFIG names the file; your cluster's provider has a command that writes it"
        raise CloudError(f"{doing}: {str(error).rstrip('.').lower()}", hint=hint) from None
    names = [each["name"] for each in contexts]
    if context is not None and context not in names:
        hint = f"those are {', '.join(names)}"
        raise UsageError(f"{doing}: the kubeconfig has no context {quoted(context)}", hint=hint)
    chosen = active if context is None else contexts[names.index(context)]
    try:
        config.load_kube_config(file, chosen["name"], client_configuration=options)
    except config.ConfigException as error:
        raise CloudError(f"{doing}: {error}", hint="look at the kubeconfig with `kubectl config view`") from None
    found = namespace or chosen["context"].get("namespace") or "default"
    return Api(client.ApiClient(options), found)


def _in_cluster(options: Any) -> bool:
    from kubernetes import config

    try:
        config.load_incluster_config(client_configuration=options)
    except config.ConfigException:
        return False
    return True


def _own_namespace() -> str:
    file = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return file.read_text(encoding="utf-8").strip() if file.is_file() else "default"


def _refusal(error: Any, doing: str, api: Api) -> SmpkitError:
    try:
        said = str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        said = f"{error.status} {error.reason}"
    words = " ".join(said.split())
    if error.status == 401:
        hint = "log in again as your cluster's provider says; `kubectl get pods` then works, too"
        return CloudError(f"{doing}: the cluster does not know these credentials", hint=hint)
    if error.status == 403:
        return CloudError(f"{doing}: {words}", hint=f"a Role in the namespace `{api.namespace}` must allow it")
    if error.status == 409:
        return CloudError(f"{doing}: {words}", hint="`--name` gives another name")
    if error.status in (429, 500, 502, 503, 504):
        return UnreachableError(f"{doing}: {words}", hint="try again in a minute")
    return CloudError(f"{doing}: {words}")
