"""A hub of one model on loopback: the endpoints that huggingface_hub asks for a snapshot, no more."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """What the stand-in holds and what it was asked."""

    def __init__(self, name: str, files: dict[str, bytes]) -> None:
        self.name = name
        self.files = files
        self.revisions = {"main", COMMIT}
        self.token: str | None = None
        """The only token that may read; None: everybody may."""
        self.gated = False
        self.requests: list[tuple[str, str, str | None]] = []
        """(method, path, Authorization)."""
        self.endpoint = ""
        self.open = threading.Event()
        """Unless set, a fetch of weights stays without an answer; from the start it is."""
        self.open.set()
        self.held = threading.Event()
        """Set once a fetch waits for :attr:`open`."""

    @property
    def downloaded(self) -> set[str]:
        """Names of the files that were fetched."""
        prefix = f"/{self.name}/resolve/{COMMIT}/"
        return {
            path[len(prefix) :] for method, path, _ in self.requests if method == "GET" and prefix in path
        }


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Run the stand-in on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append((self.command, path, self.headers.get("Authorization")))
            status, headers, content = respond(hub, path, self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                if path.endswith(".safetensors") and not hub.open.is_set():
                    hub.held.set()
                    hub.open.wait()
                with contextlib.suppress(ConnectionError):  # the client may be gone
                    self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.open.set()
        server.shutdown()
        thread.join()
        server.server_close()


def respond(hub: Hub, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body."""
    api, resolve = f"/api/models/{hub.name}", f"/{hub.name}/resolve/"
    if not path.startswith((api + "/", resolve)):
        return _error(404, "RepoNotFound", "Repository not found")
    if hub.token is not None and authorization != f"Bearer {hub.token}":
        if hub.gated:
            return _error(403, "GatedRepo", "Access to this model is restricted")
        return _error(401, "RepoNotFound", "Repository not found")
    if path.startswith(resolve):
        name = path[len(resolve) :].partition("/")[2]
        content = hub.files.get(name)
        if content is None:
            return _error(404, "EntryNotFound", "Entry not found")
        return 200, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}, content
    kind, _, revision = path[len(api) + 1 :].partition("/")
    if revision not in hub.revisions:
        return _error(404, "RevisionNotFound", "Invalid rev id")
    if kind == "tree":
        rows = [
            {"type": "file", "oid": _digest(content), "size": len(content), "path": name}
            for name, content in hub.files.items()
        ]
        return _json(rows)
    siblings = [{"rfilename": name} for name in hub.files]
    return _json({"_id": "1", "id": hub.name, "modelId": hub.name, "sha": COMMIT, "siblings": siblings})


def _json(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _error(status: int, code: str, message: str) -> tuple[int, dict[str, str], bytes]:
    body = json.dumps({"error": message}).encode()
    return (
        status,
        {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"},
        body,
    )


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
