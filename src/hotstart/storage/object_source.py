"""One object, read by ranges straight into memory, whatever the network does meanwhile.

A failed range is continued from where it broke. A range that is much slower than the others is
*replaced*: its connection is closed and the rest asked for again, on another one. It is never
raced: two writers must not share a buffer.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from hotstart.errors import HotstartError, StorageError
from hotstart.storage.http_connection import Head, HttpConnection
from hotstart.storage.retry import TRANSIENT, Persistence, TransientError
from hotstart.storage.source import Cancel

if TYPE_CHECKING:
    from hotstart.storage.object_store import ObjectStore

_SLOWER = 4.0
"""Times the usual duration of a range, after which the rest of it is asked for anew."""
_NEVER_SLOW = 2.0
"""Seconds that every range may take."""
_REPLACEMENTS = 3
_USUAL_FROM = 8
"""Ranges that must have arrived before anything is called usual."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class Speed:
    """What ranges usually take; shared by all readers of a load. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds_per_byte: deque[float] = deque(maxlen=64)
        self.replaced = 0
        self.retried = 0

    def took(self, nbytes: int, seconds: float) -> None:
        """A range arrived without trouble."""
        with self._lock:
            self._seconds_per_byte.append(seconds / max(1, nbytes))

    def patience(self, nbytes: int) -> float:
        """Seconds after which a range of this length is slow."""
        with self._lock:
            if len(self._seconds_per_byte) < _USUAL_FROM:
                return float("inf")
            usual = sorted(self._seconds_per_byte)[len(self._seconds_per_byte) // 2]
        return max(_NEVER_SLOW, _SLOWER * usual * nbytes)

    def count(self, *, replaced: int = 0, retried: int = 0) -> None:
        """For the report of the load."""
        with self._lock:
            self.replaced += replaced
            self.retried += retried


class _SlowError(OSError):
    """This range is much slower than the others."""


class ObjectSource:
    """See :class:`hotstart.storage.source.Source`. ``identity`` is the ETag, asked for with each range."""

    align = 1

    def __init__(self, store: ObjectStore, key: str, size: int, etag: str, speed: Speed) -> None:
        self.name = store.name(key)
        self.size = size
        self.identity = etag
        self._store = store
        self._key = key
        self._speed = speed

    def read_into(self, buffer: memoryview, offset: int, cancel: Cancel) -> None:
        """See :class:`hotstart.storage.source.Source`; one request, and more where it breaks."""
        persistence = Persistence(self._store.patience)
        at = replacements = 0
        began = time.monotonic()
        while at < len(buffer):
            connection: HttpConnection | None = None
            try:
                connection, used = self._store.connect(self._key)
                limit = self._speed.patience(len(buffer) - at) if replacements < _REPLACEMENTS else None
                head = self._ask(connection, offset + at, offset + len(buffer), cancel)
                started = time.monotonic()
                while at < len(buffer):
                    at += connection.receive_into(buffer[at:], cancel)
                    persistence.progressed()
                    if limit is not None and at < len(buffer) and time.monotonic() - started > limit:
                        raise _SlowError("slow")
            except HotstartError:
                _drop(connection)
                raise
            except _SlowError:
                _drop(connection)
                replacements += 1
                self._speed.count(replaced=1)
            except OSError as error:
                _drop(connection)
                if connection is not None and used and not isinstance(error, TransientError):
                    used = False
                    continue  # the server had closed an idle connection: no failure of this read
                self._speed.count(retried=1)
                self._wait(persistence, error, offset + at, cancel)
            except BaseException:
                _drop(connection)
                raise
            else:
                self._store.give_back(connection, head)
        if not persistence.failures and not replacements:
            self._speed.took(len(buffer), time.monotonic() - began)

    def close(self) -> None:
        """Nothing is held."""

    def verify(self) -> None:
        """Every range was asked for by ETag: there is nothing left to compare."""

    def _ask(self, connection: HttpConnection, begin: int, end: int, cancel: Cancel) -> Head:
        """Ask for bytes ``begin`` to ``end``; the head, once it promises just them."""
        headers = {"Range": f"bytes={begin}-{end - 1}"}
        if self.identity and not self.identity.startswith("W/"):
            headers["If-Match"] = self.identity
        target, extra = self._store.target(self._key)
        head = connection.ask(target, {**headers, **extra}, cancel)
        if head.status == 206:
            self._check_range(head, begin, end)
            return head
        if head.status == 200 and begin == 0 and end == self.size and head.length in (None, end):
            self._check_etag(head)
            return head
        if head.status == 412:
            raise self.changed()
        if head.status == 200:
            raise StorageError(
                f"The server of {self.name} ignores Range and sends whole files",
                expected="a server that answers ranges (status 206)",
                advice="Serve the files by nginx, Apache or an object store, or copy them to a disk",
            )
        body = connection.body(head, 4096, cancel)
        if head.status in TRANSIENT:
            raise TransientError(self._store.wording(head, body), _seconds(head))
        raise self._store.refusal(self._key, head, body)

    def _check_range(self, head: Head, begin: int, end: int) -> None:
        found = _CONTENT_RANGE.fullmatch(head.headers.get("content-range", ""))
        if found is None or (int(found[1]), int(found[2]) + 1) != (begin, end):
            raise TransientError(
                f"asked for bytes {begin}-{end - 1}, got {head.headers.get('content-range')}"
            )
        if found[3] != "*" and int(found[3]) != self.size:
            raise self.changed()
        self._check_etag(head)

    def _check_etag(self, head: Head) -> None:
        etag = head.headers.get("etag", "")
        if self.identity and etag and etag != self.identity:
            raise self.changed()

    def changed(self) -> StorageError:
        """The error for an object that is not the one whose header was read."""
        return StorageError(
            f"{self.name} was replaced while it was read",
            expected=f"the object with ETag {self.identity} during the whole load",
            advice="Start again when the upload is complete; publish a new model under a new prefix",
        )

    def _wait(self, persistence: Persistence, error: OSError, offset: int, cancel: Cancel) -> None:
        try:
            persistence.failed(error, cancel)
        except TimeoutError:
            raise
        except OSError as last:
            raise StorageError(
                f"{self.name} gave no byte for {persistence.stuck:.0f} s at byte {offset}, "
                f"in {persistence.failures} attempts: {last}",
                advice=self._store.advice
                or "Look at the store's status and at the network between; "
                "--storage-timeout allows more time",
            ) from None


def _drop(connection: HttpConnection | None) -> None:
    if connection is not None:
        connection.close()


def _seconds(head: Head) -> float | None:
    value = head.headers.get("retry-after", "")
    return min(float(value), 60.0) if value.isdigit() and len(value) < 6 else None
