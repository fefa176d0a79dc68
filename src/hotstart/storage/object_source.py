"""One object, read by ranges straight into memory, whatever the network does meanwhile.

A failed range is continued from where it broke. A range that is much slower than the others is
*replaced*: its connection is closed and the rest asked for again, on another one. It is never
raced: two writers must not share a buffer.
"""

from __future__ import annotations

import math
import re
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hotstart.errors import HotstartError, StorageError
from hotstart.storage.http_connection import Head, HttpConnection, StalledError, Until, never
from hotstart.storage.object_errors import advice_on_failing, code_of, no_ranges
from hotstart.storage.retry import TRANSIENT, Persistence, TransientError, retry_after
from hotstart.storage.source import Cancel

if TYPE_CHECKING:
    from hotstart.storage.object_store import Answer, ObjectStore

_SLOWER = 4.0
"""Times the usual duration of a range, after which the rest of it is asked for anew."""
_NEVER_SLOW = 0.1
"""Seconds that every range may take."""
_REPLACEMENTS = 3
_RARE = 0.125
"""Share of the ranges that may be replaced: where many are slow, other connections make it worse."""
_USUAL_FROM = 8
"""Ranges that must have arrived before anything is called usual."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_LAST_MODIFIED = "Last-Modified: "
_TRANSIENT_CODES = frozenset(
    {"InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException"}
)
_EXPIRED_CODES = frozenset({"ExpiredToken", "RequestExpired", "TokenRefreshRequired"})


class Speed:
    """What ranges usually take; shared by all readers of a load. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, int]] = deque(maxlen=64)
        """Seconds per byte of a range, and how many were in flight with it."""
        self._inside = 0
        self._arrived = 0
        self.replaced = 0
        self.retried = 0

    @contextmanager
    def reading(self, nbytes: int) -> Iterator[None]:
        """Measure a range; one that fails says nothing."""
        began = time.monotonic()
        with self._lock:
            self._inside += 1
            inside = self._inside
        try:
            yield
            with self._lock:
                self._arrived += 1
                self._recent.append(((time.monotonic() - began) / max(1, nbytes), inside))
        finally:
            with self._lock:
                self._inside -= 1

    def patience(self, nbytes: int) -> float:
        """Seconds after which a range of this length is slow; infinite when that cannot be said.

        Where more ranges share the line than before, each takes longer.
        """
        with self._lock:
            if len(self._recent) < _USUAL_FROM:
                return math.inf
            usual = statistics.median(seconds for seconds, _ in self._recent)
            shared = self._inside / statistics.median(inside for _, inside in self._recent)
        return max(_NEVER_SLOW, _SLOWER * usual * max(1.0, shared) * nbytes)

    def retry(self) -> None:
        """Count a range that is asked for again after a failure."""
        with self._lock:
            self.retried += 1

    def replace(self) -> bool:
        """Whether a range that has become slow is to be replaced, which is counted."""
        with self._lock:
            allowed = self.replaced <= self._arrived * _RARE
            self.replaced += allowed
        return allowed


class _SlowError(OSError):
    """This range is much slower than the others."""


class _RefusedError(Exception):
    """Credentials or signature are not accepted (any more)."""


class ObjectSource:
    """See :class:`hotstart.storage.source.Source`. ``identity`` (see :func:`validator`) pins each range."""

    align = 1

    def __init__(self, store: ObjectStore, key: str, size: int, identity: str, speed: Speed) -> None:
        self.name = store.name(key)
        self.size = size
        self.identity = identity
        self._store = store
        self._key = key
        self._speed = speed
        self._closed = False

    def read_into(self, buffer: memoryview, offset: int, cancel: Cancel) -> None:
        """See :class:`hotstart.storage.source.Source`; one request, and more where it breaks."""
        if offset < 0 or offset + len(buffer) > self.size:
            raise ValueError(
                f"bytes {offset} to {offset + len(buffer)} of {self.name}, which has {self.size}"
            )
        left = _Left(buffer, offset, Persistence(self._store.patience))
        with self._speed.reading(len(buffer)):
            self._read(left, cancel)

    def _read(self, left: _Left, cancel: Cancel) -> None:
        replacements = 0
        while len(left.view):
            slow = self._slow(len(left.view)) if replacements < _REPLACEMENTS else never
            try:
                self._attempt(left, slow, cancel)
            except HotstartError:
                raise
            except _SlowError:
                replacements += 1
            except OSError as error:
                self._speed.retry()
                self._wait(left, error, cancel)

    def _slow(self, nbytes: int) -> Until:
        """When an attempt that begins now will be slow; what is usual may be learned meanwhile."""
        began = time.monotonic()

        def slow() -> float:
            too_early = time.monotonic() < began + _NEVER_SLOW
            return math.inf if too_early else began + self._speed.patience(nbytes)

        return slow

    def close(self) -> None:
        """The store's connections close with its last source."""
        if not self._closed:
            self._closed = True
            self._store.closed()

    def verify(self) -> None:
        """Each answer was compared with what is pinned: there is nothing left to compare."""

    def _attempt(self, left: _Left, slow: Until, cancel: Cancel) -> None:
        """Ask for what is left and receive it; from ``slow`` on it is worth another connection."""
        try:
            answer = self._ask(left, slow, cancel)
        except StalledError:
            if time.monotonic() < slow():
                raise
            self._speed.replace()
            raise _SlowError from None
        try:
            while len(left.view):
                self._receive(answer.connection, left, slow, cancel)
                # Where bytes have arrived it was this process that was slow, or held up by an import.
                if len(left.view) and time.monotonic() >= slow() and not answer.connection.readable:
                    if self._speed.replace():
                        raise _SlowError
                    slow = self._slow(len(left.view))
        except BaseException:
            answer.connection.close()
            raise
        self._store.give_back(answer.connection)

    def _receive(self, connection: HttpConnection, left: _Left, slow: Until, cancel: Cancel) -> None:
        """Some bytes, or none when it becomes ``slow`` before."""
        silent = time.monotonic() + left.persistence.silence
        try:
            got = connection.receive_into(left.view, cancel, until=lambda: min(slow(), silent))
        except StalledError:
            if time.monotonic() < slow():
                raise
            return
        if got == 0:
            raise TransientError("the answer is shorter than its range")
        left.arrived(got)

    def _ask(self, left: _Left, slow: Until, cancel: Cancel) -> Answer:
        """The answer to a request for what is left, once its head promises just that."""
        epoch = -1
        silent = time.monotonic() + left.persistence.silence

        def until() -> float:
            return min(slow(), silent)

        while True:
            headers = {"Range": f"bytes={left.offset}-{left.end - 1}", **self._condition()}
            answer = self._store.ask(self._key, headers, cancel, until=until)
            try:
                self._check(answer, left, cancel)
            except _RefusedError as refused:
                answer.connection.close()
                error = refused.args[0]
                if epoch >= 0:
                    raise self._refused_again(error) from None
                epoch = answer.epoch
                if not self._store.renew(epoch):
                    raise error from None
            except BaseException:
                answer.connection.close()
                raise
            else:
                return answer

    def _condition(self) -> dict[str, str]:
        """What makes the server refuse a range of another object; weak ETags can only be compared."""
        if self.identity.startswith(_LAST_MODIFIED):
            return {"If-Unmodified-Since": self.identity[len(_LAST_MODIFIED) :]}
        return {"If-Match": self.identity} if self.identity.startswith('"') else {}

    def _check(self, answer: Answer, left: _Left, cancel: Cancel) -> None:
        head = answer.head
        if head.status == 206:
            check_plain(self.name, head)
            self._check_range(head, left)
        elif head.status == 200 and (left.offset, left.end) == (0, self.size):
            check_plain(self.name, head)
            if head.length not in (None, self.size):
                raise self.changed()
        elif head.status == 200:
            raise no_ranges(self.name)
        elif head.status in (412, 416):
            raise self.changed()
        else:
            silence = left.persistence.silence
            raise self._error(head, answer.connection.body(head, 64 << 10, cancel, silence=silence))
        if not agree(self.identity, validator(head)):
            raise self.changed()

    def _error(self, head: Head, body: bytes) -> Exception:
        if is_transient(head, body):
            return TransientError(self._store.wording(head, body), retry_after(head.headers), head.status)
        refusal = self._store.refusal(self._key, head, body)
        if head.status in (401, 403) or code_of(body) in _EXPIRED_CODES:
            return _RefusedError(refusal)
        if head.status == 404:
            return StorageError(
                f"{self.name} is gone; it was there when its header was read",
                expected="files that stay as they are during a load",
                advice="Publish a new model under a new prefix, and delete the old one later",
            )
        return refusal

    def _check_range(self, head: Head, left: _Left) -> None:
        text = head.headers.get("content-range", "")
        found = _CONTENT_RANGE.fullmatch(text)
        if found is not None and found[3] != "*" and int(found[3]) != self.size:
            raise self.changed()
        if found is None or (int(found[1]), int(found[2]) + 1) != (left.offset, left.end):
            raise TransientError(f"asked for bytes {left.offset}-{left.end - 1}, got {text!a}")
        if head.length not in (None, len(left.view)):
            raise TransientError(f"asked for {len(left.view)} bytes, {head.length} are announced")

    def changed(self) -> StorageError:
        """The error for an object that is not the one whose header was read."""
        what = f"with {_named(self.identity)}" if self.identity else f"of {self.size} bytes"
        return StorageError(
            f"{self.name} was replaced while it was read",
            expected=f"the object {what} during the whole load",
            advice="Start again when the upload is complete; publish a new model under a new prefix",
        )

    def _refused_again(self, error: HotstartError) -> HotstartError:
        return type(error)(
            f"In the middle of the load, and again after signing anew: {error.found}",
            expected=error.expected,
            advice=error.advice or "The credentials have expired or were withdrawn: renew them",
        )

    def _wait(self, left: _Left, error: OSError, cancel: Cancel) -> None:
        try:
            left.persistence.failed(error, cancel)
        except OSError as last:
            busy = isinstance(last, TransientError) and advice_on_failing(last.status)
            raise StorageError(
                f"{self.name} gave no byte for {left.persistence.stuck:.0f} s at byte {left.offset}, "
                f"in {left.persistence.failures} attempts: {last}",
                advice=busy
                or "Look at the store's status and at the network between; "
                "--storage-timeout allows more time",
            ) from None


class _Left:
    """What of a range has not arrived yet."""

    def __init__(self, buffer: memoryview, offset: int, persistence: Persistence) -> None:
        self.view = buffer
        self.offset = offset
        self.end = offset + len(buffer)
        self.persistence = persistence

    def arrived(self, nbytes: int) -> None:
        self.view = self.view[nbytes:]
        self.offset += nbytes
        self.persistence.progressed()


def validator(head: Head) -> str:
    """What pins an object's content: its ETag; without one its time, ``Last-Modified: …``; or nothing."""
    if etag := head.headers.get("etag", ""):
        return etag
    modified = head.headers.get("last-modified", "")
    return _LAST_MODIFIED + modified if modified else ""


def is_transient(head: Head, body: bytes) -> bool:
    """Whether an answer may be another one a moment later."""
    return head.status in TRANSIENT or code_of(body) in _TRANSIENT_CODES


def check_plain(name: str, head: Head) -> None:
    """Raise StorageError when the bytes that come are not those that were stored."""
    encoding = head.headers.get("content-encoding", "").lower()
    if encoding.replace("aws-chunked", "").strip(" ,") not in ("", "identity"):
        raise StorageError(
            f"{name} comes compressed (Content-Encoding: {encoding[:20]})",
            expected="the file as it is",
            advice="Upload it without Content-Encoding, or turn compression off for this folder",
        )


def agree(pinned: str, found: str) -> bool:
    """Whether two validators may be of one object; one of another kind, or none, says nothing."""
    if not pinned or not found or pinned.startswith(_LAST_MODIFIED) != found.startswith(_LAST_MODIFIED):
        return True
    return pinned.removeprefix("W/") == found.removeprefix("W/")


def _named(identity: str) -> str:
    return identity if identity.startswith(_LAST_MODIFIED) else f"ETag {identity}"
