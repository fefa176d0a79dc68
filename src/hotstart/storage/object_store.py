"""An object store as a loader needs it: list a folder, sign a request, keep connections.

``obstore`` finds credentials, lists and signs. The bytes come over connections of our own
(:mod:`hotstart.storage.http_connection`), which are several times faster. A web server needs none of
it: its files are asked for by address.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlencode

from msgspec import Struct

from hotstart.errors import HotstartError, StorageError
from hotstart.storage.cloud_settings import CloudSettings, settings_for
from hotstart.storage.connections import Connections
from hotstart.storage.http_connection import Head, HttpConnection, Until, at, never
from hotstart.storage.location import Location, quoted
from hotstart.storage.object_errors import (
    Refusal,
    cause_of,
    code_of,
    explain,
    explain_client,
    no_ranges,
    wording,
)
from hotstart.storage.object_source import ObjectSource, Speed, check_plain, is_transient, validator
from hotstart.storage.retry import Persistence, TransientError, retry_after

if TYPE_CHECKING:
    from hotstart.storage.object_listing import ObjectInfo
    from hotstart.storage.source import Cancel, Source

log = logging.getLogger("hotstart.storage")

_SIGNED_FOR = 3600.0
_RENEW_BEFORE = 600.0
"""Seconds: a signature is renewed this long before it ends, so that no request meets its end."""
_FIRST_CONTACT = 10.0
"""Seconds for which a store that never answered is asked: a wrong address is likelier than an outage."""
_HASTY = 3.0
"""Seconds for what a start can do without."""
_LISTING = 4 << 20
"""Bytes of a page of a listing, at most."""
_RANGE = re.compile(r"bytes 0-(\d+)/(\d+)")
_ONE_RANGE = 8 << 20
"""Bytes; what is not longer can be read whole from a server that knows no ranges."""


class Fetched(Struct, frozen=True):
    """The beginning of an object, or all of it."""

    data: bytes
    size: int
    """Of the whole object."""
    identity: str
    """See :func:`hotstart.storage.object_source.validator`."""
    unchanged: bool = False
    """It is the one that the caller knows; ``data`` is empty."""


class Answer(Struct, frozen=True):
    """A request's answer, of which the head has been read."""

    connection: HttpConnection
    head: Head
    epoch: int
    """Of the credentials that signed it."""


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
        self._environ = environ
        self.settings: CloudSettings = settings_for(location, environ)
        self.speed = Speed()
        self._lock = threading.Lock()
        self._connections = Connections(patience=patience, tls=self.settings.tls)
        self._answered = False
        self._sources = 0
        self._epoch = 0
        self._urls: dict[str, tuple[str, float]] = {}
        self._store: Any = None

    def name(self, key: str) -> str:
        """How a key is called in messages."""
        return f"{self.location.scheme}://{self.location.container}/{key}"

    def names(self, folder: str) -> list[str]:
        """The objects of a folder in the location's; none where it is absent or cannot be listed.

        For what a model can do without: one attempt of a few seconds, no more than a page; a reason
        is logged, nothing is raised.
        """
        if self.location.is_web:
            return []
        from hotstart.storage.object_listing import list_names, names_in

        prefix = self.location.key(folder)
        try:
            if not self.settings.base_url:
                hasty = self.settings.open(self.location, patience=_HASTY, retries=0)
                return list_names(hasty, prefix)
            return names_in(self._ask_for_listing(prefix), prefix)  # spares who signs nothing an import
        except Exception as error:
            reason = error if isinstance(error, HotstartError) else self.failed(error, "list", folder)
            log.info("%s is not looked for in %s: %s", folder, self.location, reason.found)
            return []

    def list(self) -> dict[str, ObjectInfo]:
        """The objects of the location's folder, by name relative to it; of a web server: none.

        Raises ModelError when there is no such folder, StorageError when it may not be listed.
        """
        if self.location.is_web:
            return {}
        from hotstart.storage.object_listing import list_folder

        try:
            return list_folder(self._obstore(), self.location)
        except HotstartError:
            raise
        except Exception as error:
            raise self.failed(error, "list", self.location.prefix) from None

    def fetch(
        self, name: str, limit: int, *, known: str = "", optional: bool = False, cancel: Cancel = NEVER
    ) -> Fetched | None:
        """The first ``limit`` bytes of a file in the folder; None when there is none.

        ``known``: an identity; the object is not sent again if it still has it. ``optional``: a file
        that may not be read counts as absent, for a store says the same of one that does not exist
        to those who may not list. Raises StorageError.
        """
        key = self.location.key(name)
        if not self.settings.signs:
            from hotstart.storage.client_source import fetch_first

            return fetch_first(self, self._obstore(), key, limit, known, optional)
        headers = {"Range": f"bytes=0-{limit - 1}"}
        if known:
            conditional = known.partition("Last-Modified: ")
            headers |= {"If-Modified-Since": conditional[2]} if conditional[1] else {"If-None-Match": known}
        persistence = Persistence(self.patience)
        while True:
            try:
                return self._fetch_once(key, limit, headers, optional, persistence, cancel)
            except HotstartError:  # noqa: PERF203 - any attempt may fail
                raise
            except OSError as error:
                self.wait(key, persistence, error, cancel)

    def source(self, key: str, size: int, identity: str) -> Source:
        """Reads of an object that must stay the one with this identity. Close it."""
        if not self.settings.signs:
            from hotstart.storage.client_source import ClientSource

            return ClientSource(self, self._obstore(), key, size, identity)
        with self._lock:
            self._sources += 1
        return ObjectSource(self, key, size, identity, self.speed)

    def closed(self) -> None:
        """A source was closed; with the last one, idle connections are."""
        with self._lock:
            self._sources -= 1
            last = self._sources == 0
        if last:
            self._connections.close()

    def ask(self, key: str, headers: Mapping[str, str], cancel: Cancel, *, until: Until = never) -> Answer:
        """Ask for a key, signed. The caller gives the connection back, or closes it.

        ``until``: when a server that stays silent is given up. Raises
        StorageError for what will not change, OSError for what may.
        """
        epoch = self._epoch
        headers = {**self.settings.headers, **headers}
        connection, head = self._connections.get(self._url(key), headers, cancel, until=until)
        self._answered = True
        return Answer(connection, head, epoch)

    def ask_head(
        self, key: str, headers: Mapping[str, str], query: Mapping[str, str], cancel: Cancel, *, until: Until
    ) -> Head:
        """What a store says of an object without sending it; ``headers`` and ``query`` are signed too.

        Raises as :meth:`ask` does.
        """
        headers = {**self.settings.headers, **headers}
        url = self._url_of_head(key, headers, query)
        connection, head = self._connections.get(url, headers, cancel, until=until, method="HEAD")
        self.give_back(connection)
        self._answered = True
        return head

    def give_back(self, connection: HttpConnection) -> None:
        """Keep a connection for another request if its answer was read to the end, else close it."""
        self._connections.give_back(connection)

    def renew(self, epoch: int) -> bool:
        """Look for credentials and sign anew, after requests of ``epoch`` were refused.

        Whoever comes later finds it done. False: requests are not signed, there is nothing to renew.
        Raises ConfigError.
        """
        if self.settings.base_url:
            return False
        with self._lock:
            if self._epoch == epoch:
                self.settings = settings_for(self.location, self._environ)
                self._store = None
                self._urls.clear()
                self._epoch += 1
                log.warning("%s refuses what it allowed before: signing anew", self.location)
        return True

    def wording(self, head: Head, body: bytes) -> str:
        """The server's own words."""
        return wording(head, body)

    def refusal(self, key: str, head: Head, body: bytes) -> HotstartError:
        """The error for an answer that no retry will change."""
        return explain(self.name(key), self.settings, head, body)

    def close(self) -> None:
        """Close idle connections."""
        self._connections.close()

    def wait(self, key: str, persistence: Persistence, error: OSError, cancel: Cancel) -> None:
        """Before the next attempt at a key. Raises StorageError when patience is at its end."""
        unheard = not self._answered and isinstance(error, (ConnectionRefusedError, socket.gaierror))
        if unheard and persistence.stuck > _FIRST_CONTACT:
            raise self._given_up(key, error, persistence)
        try:
            persistence.failed(error, cancel)
        except OSError as last:
            raise self._given_up(key, last, persistence) from None

    def _fetch_once(
        self,
        key: str,
        limit: int,
        headers: Mapping[str, str],
        optional: bool,
        persistence: Persistence,
        cancel: Cancel,
    ) -> Fetched | None:
        answer = self.ask(key, headers, cancel, until=at(time.monotonic() + persistence.silence))
        connection, head = answer.connection, answer.head
        try:
            if head.status in (200, 206):
                persistence.reached(0)
                body = connection.body(
                    head, limit, cancel, progressed=persistence.reached, silence=persistence.silence
                )
            else:
                body = connection.body(head, 64 << 10, cancel, silence=persistence.silence)
        except BaseException:
            connection.close()
            raise
        self.give_back(connection)
        if head.status == 404 and code_of(body) != "NoSuchBucket":
            return None
        if head.status == 304:
            return Fetched(b"", 0, headers.get("If-None-Match", ""), unchanged=True)
        if head.status == 416 and head.headers.get("content-range") == "bytes */0":
            return Fetched(b"", 0, validator(head))  # an empty object has no first byte
        if "Range" in headers and (head.status == 416 or (head.status == 400 and b"range" in body.lower())):
            # It asks for more than there is, which some servers refuse.
            whole = {name: value for name, value in headers.items() if name != "Range"}
            return self._fetch_once(key, limit, whole, optional, persistence, cancel)
        if is_transient(head, body):
            raise TransientError(wording(head, body), retry_after(head.headers), head.status)
        if optional and head.status == 403 and code_of(body) in ("", "AccessDenied"):
            return None
        if head.status not in (200, 206):
            raise self.refusal(key, head, body)
        check_plain(self.name(key), head)
        if head.status == 200:
            if "Range" in headers and (head.length or 0) > max(limit, _ONE_RANGE):
                raise no_ranges(self.name(key))
            return Fetched(body, len(body) if head.length is None else head.length, validator(head))
        found = _RANGE.fullmatch(head.headers.get("content-range", ""))
        if found is None or int(found[1]) + 1 != len(body) or len(body) != min(limit, int(found[2])):
            raise TransientError(f"{len(body)} bytes came as {head.headers.get('content-range')!a}")
        return Fetched(body, int(found[2]), validator(head))

    def _ask_for_listing(self, prefix: str) -> bytes:
        """A page of the objects of a folder, as XML. Raises StorageError and OSError."""
        of_azure = {"restype": "container", "comp": "list"}
        kind = of_azure if self.location.scheme == "az" else {"list-type": "2"}
        query = urlencode({**kind, "delimiter": "/", "prefix": f"{prefix}/"})
        query += f"&{self.settings.query}" if self.settings.query else ""
        until, headers = at(time.monotonic() + _HASTY), self.settings.headers
        connection, head = self._connections.get(
            f"{self.settings.base_url}?{query}", headers, NEVER, until=until
        )
        try:
            body = connection.body(head, _LISTING, NEVER, silence=_HASTY)
        except BaseException:
            connection.close()
            raise
        self.give_back(connection)
        if head.status != 200:
            raise self.refusal(prefix, head, body)
        return body

    def _url(self, key: str) -> str:
        if self.settings.base_url:
            query = f"?{self.settings.query}" if self.settings.query else ""
            return f"{self.settings.base_url}/{quoted(key)}{query}"
        now = time.monotonic()
        with self._lock:
            url, until = self._urls.get(key, ("", 0.0))
            epoch = self._epoch
        if now < until - _RENEW_BEFORE:
            return url
        url = self._sign("GET", key)
        expires = self.settings.expires()  # a signature is worth no more than the keys that made it
        left = _SIGNED_FOR if expires is None else min(_SIGNED_FOR, expires.timestamp() - time.time())
        with self._lock:
            if epoch == self._epoch:  # else the keys that signed it have been given up meanwhile
                self._urls[key] = url, now + left
        return url

    def _url_of_head(self, key: str, headers: Mapping[str, str], query: Mapping[str, str]) -> str:
        if self.settings.base_url:
            url = self._url(key)
            return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}" if query else url
        if self.location.scheme == "az":
            return self._url(key)  # Azure signs for reading, by whatever method
        url = self._sign("HEAD", key)
        provider = self.settings.credential_provider
        if provider is None:
            return url
        from hotstart.storage import aws_signature
        from hotstart.storage.aws_credentials import Provider

        assert isinstance(provider, Provider)
        keys, region = provider.keys(), self.settings.config["region"]
        return aws_signature.sign("HEAD", url, keys, region, headers=headers, query=query)

    def _sign(self, method: Literal["GET", "HEAD"], key: str) -> str:
        if self.location.scheme == "az":
            from hotstart.storage import azure_signature

            account, secret = self.settings.config["account_name"], self.settings.config["account_key"]
            container = self.location.container
            query = azure_signature.sign(account, secret, container, key, seconds=_SIGNED_FOR)
            return f"{self.settings.endpoint}/{container}/{quoted(key)}?{query}"
        import obstore

        try:
            return str(obstore.sign(self._obstore(), method, key, timedelta(seconds=_SIGNED_FOR)))
        except HotstartError:
            raise
        except Exception as error:
            raise self.failed(error, "sign a request for", key) from None

    def _obstore(self) -> Any:
        if self._store is None:
            self._store = self.settings.open(self.location, patience=self.patience)
        return self._store

    def failed(self, error: Exception, doing: str, key: str) -> HotstartError:
        """The error for what ``obstore`` raised."""
        return explain_client(self.name(key), self.settings, doing, error)

    def _given_up(self, key: str, error: OSError, persistence: Persistence) -> StorageError:
        status = error.status if isinstance(error, TransientError) else 0
        found = f"{self.name(key)} cannot be reached: {error}"
        if status:
            found = f"{self.name(key)}: {error}, for {persistence.stuck:.0f} s"
        return StorageError(
            f"{found} ({self.settings.described})",
            advice=cause_of(Refusal(status, "", str(error)), self.settings),
        )
