"""What every request passes before its route: identity, keys, and errors outside a route's reach.

Plain ASGI: a wrapper around ``send`` costs on each streamed chunk, so there is one only where a
header must be added.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotstart.config.settings import HttpConfig
from hotstart.frontend.errors import ApiError
from hotstart.frontend.parsing import ClientGoneError

OPEN_PATHS = frozenset(
    [
        "/health",
        "/livez",
        "/readyz",
        "/ping",
        "/version",
        "/metrics",
        "/load",
        "/tokenize",
        "/detokenize",
        "/startup",
        "/startup/events",
        "/startup.json",
        "/openapi.json",
    ]
)
"""What ``--api-key`` does not guard. Everything else is guarded, unknown paths included."""

_GIVEN_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}\Z")


class Doorway:
    """Sets ``scope["state"]["request_id"]`` and ``root_path``, checks keys, swallows lost clients."""

    def __init__(self, app: ASGIApp, http: HttpConfig) -> None:
        self._app = app
        self._root_path = http.root_path.rstrip("/")
        self._return_ids = http.enable_request_id_headers
        self._digests = [hashlib.sha256(key.encode()).digest() for key in http.api_key if key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or answer 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        identity = given if _GIVEN_ID.match(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = identity
        scope["root_path"] = self._root_path
        if self._return_ids:
            send = _with_header(send, b"x-request-id", identity.encode())
        with contextlib.suppress(ClientGoneError):
            if self._digests and not self._may_enter(scope, headers.get(b"authorization", b"")):
                error = ApiError(
                    401, "The API key is missing or wrong; send it as `Authorization: Bearer KEY`."
                )
                await error.response()(scope, receive, send)
            else:
                await self._app(scope, receive, send)

    def _may_enter(self, scope: Scope, authorization: bytes) -> bool:
        path: str = scope["path"]
        if self._root_path and path.startswith(self._root_path + "/"):
            path = path[len(self._root_path) :]
        if path in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, so that the time tells nothing about which one was close.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _with_header(send: Send, name: bytes, value: bytes) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (name, value)]}
        await send(message)

    return sending
