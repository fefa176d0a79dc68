"""An object store as a loader needs it: list a folder, sign a request, keep connections.

``obstore`` finds credentials, lists and signs. The bytes come over connections of our own
(:mod:`hotstart.storage.http_connection`), which are several times faster. A web server needs none of
it: its files are asked for by address.
"""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec import Struct

from hotstart.errors import HotstartError, StorageError
from hotstart.storage.cloud_settings import CloudSettings, settings_for
from hotstart.storage.http_connection import Head, HttpConnection
from hotstart.storage.location import Location, quoted
from hotstart.storage.object_errors import explain, wording
from hotstart.storage.object_source import ObjectSource, Speed
from hotstart.storage.retry import TRANSIENT, Persistence, TransientError

if TYPE_CHECKING:
    from hotstart.storage.source import Cancel

_SIGNED_FOR = 3600.0
_RENEW_BEFORE = 600.0
"""Seconds: a signature is renewed this long before it ends, so that no request meets its end."""
_SIZE = re.compile(r"bytes \d+-\d+/(\d+)")


class ObjectInfo(Struct, frozen=True):
    """What a listing says of an object."""

    size: int
    etag: str


class Fetched(Struct, frozen=True):
    """The beginning of an object, or all of it."""

    data: bytes
    size: int
    """Of the whole object."""
    etag: str


class _Never:
    def is_set(self) -> bool:
        return False


NEVER = _Never()
"""A :class:`~hotstart.storage.source.Cancel` for what is never cancelled."""


class ObjectStore:
    """One bucket, container or web server. Thread-safe.

    ``patience``: seconds without a byte after which a read is given up.
    """

    def __init__(self, location: Location, *, environ: Mapping[str, str], patience: float = 60.0) -> None:
        """Find out how to reach it; asks nobody yet. Raises ConfigError."""
        self.location = location
        self.patience = patience
        self.settings: CloudSettings = settings_for(location, environ)
        self.speed = Speed()
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str, int], list[HttpConnection]] = defaultdict(list)
        self._urls: dict[str, tuple[str, float]] = {}
        self._store: Any = None

    @property
    def advice(self) -> str:
        """What to look at when requests fail, beyond the store's own words."""
        return self.settings.advice

    def name(self, key: str) -> str:
        """How a key is called in messages."""
        return f"{self.location.scheme}://{self.location.container}/{key}"

    def list(self) -> dict[str, ObjectInfo]:
        """The objects of the location's folder, by name relative to it. Raises StorageError."""
        if self.location.is_web:
            return {}
        import obstore

        prefix = self.location.prefix
        found: dict[str, ObjectInfo] = {}
        try:
            for page in obstore.list(self._obstore(), prefix or None, chunk_size=1000):
                for meta in page:
                    name = meta["path"][len(prefix) :].lstrip("/")
                    found[name] = ObjectInfo(meta["size"], meta["e_tag"] or "")
        except Exception as error:
            raise self._failed(error, "list", prefix) from None
        return found

    def fetch(self, name: str, limit: int, *, cancel: Cancel = NEVER) -> Fetched | None:
        """The first ``limit`` bytes of a file in the folder; None when there is none. Raises StorageError."""
        key = self.location.key(name)
        persistence = Persistence(self.patience)
        while True:
            connection: HttpConnection | None = None
            try:
                connection, _ = self.connect(key)
                target, headers = self.target(key)
                head = connection.ask(target, {**headers, "Range": f"bytes=0-{limit - 1}"}, cancel)
                body = connection.body(head, limit, cancel)
                if head.status in TRANSIENT:
                    raise TransientError(wording(head, body))
                if head.status == 206 and head.length == len(body):
                    self.give_back(connection, head)
                else:
                    connection.close()
                return self._fetched(key, head, body)
            except HotstartError:
                raise
            except OSError as error:
                if connection is not None:
                    connection.close()
                try:
                    persistence.failed(error, cancel)
                except OSError as last:
                    raise self._unreachable(key, last) from None

    def source(self, key: str, size: int, etag: str) -> ObjectSource:
        """Reads of an object that must stay the one with this ETag."""
        return ObjectSource(self, key, size, etag, self.speed)

    def connect(self, key: str) -> tuple[HttpConnection, bool]:
        """A connection to where the key is served from, and whether it was used before."""
        parts = urlsplit(self._url(key))
        port = parts.port or (443 if parts.scheme == "https" else 80)
        place = (parts.scheme, parts.hostname or "", port)
        with self._lock:
            if self._idle[place]:
                return self._idle[place].pop(), True
        connection = HttpConnection(*place, patience=self.patience, tls=self.settings.tls())
        return connection, False

    def give_back(self, connection: HttpConnection, head: Head) -> None:
        """The answer has been read to its end: keep the connection if the server does."""
        if not head.keeps:
            connection.close()
            return
        with self._lock:
            self._idle[connection.place].append(connection)

    def target(self, key: str) -> tuple[str, dict[str, str]]:
        """What stands behind GET, and headers that authorise it."""
        parts = urlsplit(self._url(key))
        return (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), {}

    def wording(self, head: Head, body: bytes) -> str:
        """The server's own words."""
        return wording(head, body)

    def refusal(self, key: str, head: Head, body: bytes) -> HotstartError:
        """The error for an answer that no retry will change."""
        return explain(self.name(key), self.settings, head, body)

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    def _fetched(self, key: str, head: Head, body: bytes) -> Fetched | None:
        if head.status == 404:
            return None
        etag = head.headers.get("etag", "")
        if head.status == 200:
            return Fetched(body, head.length if head.length is not None else len(body), etag)
        if head.status == 206:
            found = _SIZE.fullmatch(head.headers.get("content-range", ""))
            return Fetched(body, int(found[1]) if found else len(body), etag)
        if head.status == 416:  # an empty object has no first byte
            return Fetched(b"", 0, etag)
        raise self.refusal(key, head, body)

    def _url(self, key: str) -> str:
        if self.settings.base_url:
            query = f"?{self.location.query}" if self.location.query else ""
            return f"{self.settings.base_url}/{quoted(key)}{query}"
        now = time.monotonic()
        with self._lock:
            url, until = self._urls.get(key, ("", 0.0))
        if now < until - _RENEW_BEFORE:
            return url
        import obstore

        try:
            url = obstore.sign(self._obstore(), "GET", key, timedelta(seconds=_SIGNED_FOR))
        except Exception as error:
            raise self._failed(error, "sign a request for", key) from None
        with self._lock:
            self._urls[key] = url, now + _SIGNED_FOR
        return url

    def _obstore(self) -> Any:
        if self._store is None:
            self._store = self.settings.open(self.location)
        return self._store

    def _failed(self, error: Exception, doing: str, key: str) -> StorageError:
        text = re.sub(r"\s+", " ", str(error))[:400]
        return StorageError(
            f"Cannot {doing} {self.name(key)}: {text} ({self.settings.described})", advice=self.advice
        )

    def _unreachable(self, key: str, error: OSError) -> StorageError:
        return StorageError(
            f"{self.name(key)} cannot be reached: {error} ({self.settings.described})",
            advice=self.advice or "Check the endpoint and the network",
        )
