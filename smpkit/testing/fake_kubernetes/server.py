"""`FakeKubernetes`: the API server, over HTTP on the loopback address, for whoever has the token."""

from __future__ import annotations

import hmac
import json
import re
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from smpkit.testing.fake_kubernetes.controller import Controller
from smpkit.testing.fake_kubernetes.store import Object, Store
from smpkit.testing.fake_kubernetes.strict import refusals

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FakeKubernetes"]

_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/(?P<version>[^/]+))(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>log))?"
)
_KINDS = {
    "configmaps": "ConfigMap",
    "jobs": "Job",
    "jobsets": "JobSet",
    "localqueues": "LocalQueue",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "pods": "Pod",
    "secrets": "Secret",
    "services": "Service",
}
_VERBS = {"DELETE": "delete", "GET": "get", "PATCH": "patch", "POST": "create"}


class _Refused(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class FakeKubernetes:
    """A cluster of one namespace that runs the containers of Jobs as processes of this machine.

    The official client talks to it over HTTP, with a token, as to a real one. Objects are read strictly, by the
    client's own models. What it does not do: images, resources, scheduling; volumes are `hostPath`, `emptyDir`,
    ConfigMaps and Secrets.
    """

    def __init__(self, *, jobset: bool = False, kueue: bool = False, namespace: str = "team") -> None:
        """Start it; `close`, or the end of a `with` block, kills everything that runs.

        Args:
            jobset: whether the cluster has JobSets.
            kueue: whether it has Kueue, with the LocalQueue `gpus`; `admit` lets a job run.
        """
        self.namespace = namespace
        self.token = secrets.token_hex(16)
        self.forbidden: set[str] = set()
        """What the token may not do, such as `create secrets`, or `list jobs everywhere`."""
        self.lost_answers: set[str] = set()
        """What is done once without an answer, such as `create jobs`."""
        self.requests: list[tuple[str, str, Any]] = []
        """What came: method, path, body."""
        self.store = Store()
        self.groups = {"batch": "v1", **({"jobset.x-k8s.io": "v1alpha2"} if jobset else {})}
        self._folder = Path(tempfile.mkdtemp(prefix="smpkit-kubernetes-"))
        self.controller = Controller(self.store, self._folder)
        if kueue:
            self.groups["kueue.x-k8s.io"] = "v1beta1"
            self.store.add({"kind": "LocalQueue", "metadata": {"name": "gpus"}}, namespace)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def write_kubeconfig(self, path: Path) -> Path:
        """Write the file that leads clients here, by `KUBECONFIG`."""
        context = {"cluster": "fake", "user": "me", "namespace": self.namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": self.token}}],
            "contexts": [{"name": "fake", "context": context}],
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(config), encoding="utf-8")
        return path

    def pods(self, job: str) -> list[str]:
        """Return the names of a job's pods, in the order of their hosts."""
        found = self.store.find("Pod", self.namespace, f"smpkit/job={job}")
        return sorted(pod["metadata"]["name"] for pod in found)

    def admit(self, job: str) -> None:
        """Let a job that waits in a queue run, as Kueue does."""
        for each in self.store.find("Job", self.namespace, f"smpkit/job={job}"):
            self.store.change(each, {"spec": {"suspend": False}})
            self.controller.sync(each)

    def evict(self, pod: str) -> None:
        """Take a pod from its node, as a drain or a preemption does."""
        self.controller.evict(pod)

    def close(self) -> None:
        """Kill what runs, and answer no more."""
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()
        self.controller.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- answers -----------------------------------------------------------------------------------------------------

    def answer(self, method: str, target: str, body: Any) -> tuple[Any, bool]:
        """Return the answer to a request, and whether it is to be lost.

        Raises:
            _Refused: with the status.
        """
        parts = urlsplit(target)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self.requests.append((method, target, body))
        if parts.path in ("/version", "/version/"):
            return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}, False
        if parts.path in ("/apis", "/apis/"):
            return {"kind": "APIGroupList", "groups": [_group(*each) for each in self.groups.items()]}, False
        if parts.path.endswith("/selfsubjectaccessreviews"):
            asked = body["spec"]["resourceAttributes"]
            doing = f"{asked['verb']} {asked['resource']}" + ("" if asked.get("namespace") else " everywhere")
            return {**body, "status": {"allowed": doing not in self.forbidden}}, False
        found = _PATH.fullmatch(parts.path)
        if found is None or (found["group"] or "batch") not in self.groups:
            raise _Refused(404, "NotFound", f"the server could not find {parts.path}")
        verb = "list" if method == "GET" and not found["name"] else _VERBS[method]
        if found["namespace"] not in (self.namespace, None):
            if verb == "list":
                return _page(_KINDS[found["plural"]], [], query), False
            raise _Refused(404, "NotFound", f'{found["plural"]} "{found["name"]}" not found')
        doing = f"{verb} {found['plural']}" + (" everywhere" if found["namespace"] is None else "")
        if doing in self.forbidden:
            text = f'{found["plural"]} is forbidden: User "me" cannot {verb} resource "{found["plural"]}"'
            raise _Refused(403, "Forbidden", text)
        answer = self._object(verb, found, query, body)
        lost = doing in self.lost_answers
        self.lost_answers.discard(doing)
        return answer, lost

    def _object(self, verb: str, found: re.Match[str], query: Mapping[str, str], body: Any) -> Any:
        kind, name = _KINDS[found["plural"]], found["name"]
        with self.store.lock:
            if verb == "list":
                items = self.store.find(kind, self.namespace, query.get("labelSelector", ""))
                return _page(kind, items, query)
            if verb == "create":
                return self._create(body)
            made = self.store.get(kind, self.namespace, name)
            if made is None:
                raise _Refused(404, "NotFound", f'{found["plural"]} "{name}" not found')
            if found["sub"] == "log":
                return self._log(name, query)
            if verb == "patch":
                self.store.change(made, body)
                if kind == "Job":
                    self.controller.sync(made)
            elif verb == "delete":
                for each in [made, *self._owned(made)]:
                    self.controller.forget(each)
                self.store.remove(kind, self.namespace, name)
            return made

    def _owned(self, made: Object) -> list[Object]:
        uid = made["metadata"]["uid"]
        jobs = self.store.find("Job", self.namespace)
        return [job for job in jobs if any(o["uid"] == uid for o in job["metadata"].get("ownerReferences", ()))]

    def _create(self, body: Any) -> Object:
        wrong = refusals(body)
        if wrong:
            raise _Refused(
                422, "Invalid", f'{body["kind"]} "{body["metadata"]["name"]}" is invalid: {"; ".join(wrong)}'
            )
        made = self.store.add(body, self.namespace)
        if made is None:
            text = f'{body["kind"].lower()}s "{body["metadata"]["name"]}" already exists'
            raise _Refused(409, "AlreadyExists", text)
        if made["kind"] == "Job":
            self.controller.sync(made)
        elif made["kind"] == "JobSet":
            self._create_child(made)
        return made

    def _create_child(self, jobset: Object) -> None:
        """Do what the JobSet controller does for a JobSet of one Job."""
        metadata, [replicated] = jobset["metadata"], jobset["spec"]["replicatedJobs"]
        spec = json.loads(json.dumps(replicated["template"]["spec"]))
        spec["template"]["spec"]["subdomain"] = jobset["spec"]["network"]["subdomain"]
        spec["suspend"] = jobset["spec"].get("suspend", False)
        owner = {"apiVersion": jobset["apiVersion"], "kind": "JobSet", "name": metadata["name"], "uid": metadata["uid"]}
        child = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": f"{metadata['name']}-{replicated['name']}-0",
                "labels": dict(replicated["template"]["metadata"]["labels"]),
                "ownerReferences": [owner],
            },
            "spec": spec,
        }
        made = self.store.add(child, self.namespace)
        assert made is not None
        self.controller.sync(made)

    def _log(self, name: str, query: Mapping[str, str]) -> bytes:
        run = self.controller.runs.get(name)
        if run is None:
            raise _Refused(400, "BadRequest", f'container "launcher" in pod "{name}" is waiting to start')
        seconds = query.get("sinceSeconds")
        since = datetime.now(timezone.utc) - timedelta(seconds=int(seconds)) if seconds else None
        tail = query.get("tailLines")
        return run.log(since, int(tail) if tail else None)


def _group(name: str, version: str) -> dict[str, Any]:
    one = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [one], "preferredVersion": one}


def _page(kind: str, items: list[Object], query: Mapping[str, str]) -> dict[str, Any]:
    first, limit = int(query.get("continue") or 0), int(query.get("limit") or 500)
    more = {"continue": str(first + limit)} if first + limit < len(items) else {}
    return {"kind": f"{kind}List", "metadata": more, "items": items[first : first + limit]}


def _handler(cluster: FakeKubernetes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            try:
                if not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {cluster.token}"):
                    raise _Refused(401, "Unauthorized", "Unauthorized")
                answer, lost = cluster.answer(self.command, self.path, json.loads(body) if body else None)
                code = 200
            except _Refused as error:
                code, lost = error.code, False
                answer = {"kind": "Status", "status": "Failure", "message": str(error), "reason": error.reason}
            if lost:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            with cluster.store.lock:
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(code)
            kind = "text/plain" if isinstance(answer, bytes) else "application/json"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_DELETE = do_GET = do_PATCH = do_POST = _serve  # noqa: N815 - names of the standard library

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Say nothing."""

    return Handler
