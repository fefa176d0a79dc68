"""A folder of an object store to write to: weights first, configuration last.

An object is seen when its upload is complete, so what is under way when a conversion fails is given up
with it, and what was complete is deleted. A process that is killed can do neither: parts of its uploads
stay until the bucket's own rule for incomplete uploads removes them.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hotstart.convert.target import RESERVE, Digesting, Output
from hotstart.errors import ConfigError, HotstartError, StorageError
from hotstart.storage.cloud_settings import settings_for
from hotstart.storage.location import Location
from hotstart.storage.object_errors import explain_client, refusal_of_client
from hotstart.storage.temporary import temporary_directory
from hotstart.units import format_size

log = logging.getLogger("hotstart.storage")

_PARTS = 9000
"""Of an upload; stores allow 10 000."""
_PART = 8 << 20
_AT_ONCE = 8
_SHOWN = 3
_STEP = 16 << 20


class Bucket:
    """See :class:`hotstart.convert.target.Target`."""

    def __init__(
        self, location: Location, *, environ: Mapping[str, str], patience: float, memory_limit: int
    ) -> None:
        """``memory_limit``: bytes of parts that may be on their way. Raises ConfigError."""
        self.shown = str(location)
        self.digests: dict[str, str] = {}
        self._location = location
        self._settings = settings_for(location, environ)
        self._store: Any = self._settings.open(location, patience=patience)
        self._memory = memory_limit
        self._uploads: list[_Upload] = []
        self._begun: list[str] = []
        self._staged = ""

    def check(self) -> None:
        """See :class:`hotstart.convert.target.Target`."""
        import obstore

        prefix = self._location.prefix
        try:
            listing = obstore.list_with_delimiter(self._store, prefix or None)
        except Exception as error:
            raise explain_client(self.shown, self._settings, "list", error) from None
        found = [*(meta["path"] for meta in listing["objects"]), *listing["common_prefixes"]]
        below = [path[len(prefix) :].lstrip("/") for path in found]
        if names := sorted(name for name in below if name):
            raise ConfigError(
                f"{self.shown} is not empty: it holds {', '.join(names[:_SHOWN])}",
                expected="a prefix without objects",
                advice="Nothing is overwritten: name another prefix, or delete these objects first",
            )

    def reserve(self, nbytes: int, *, named: int = 0) -> None:
        """See :class:`hotstart.convert.target.Target`. Stores have room; what is named lies here first."""
        if not named:
            return
        self._staged = self._staged or temporary_directory("hotstart-convert-")
        place, free = os.path.dirname(self._staged), shutil.disk_usage(self._staged).free
        if free < named + RESERVE:
            raise StorageError(
                f"{place} has {format_size(free)} free, where these files lie until they are uploaded",
                expected=f"{format_size(named + RESERVE)} for {self.shown}",
                advice="Make room there, or name a directory that has it: TMPDIR=DIRECTORY hotstart convert",
            )

    def open(self, name: str, *, size: int = 0, beside: int = 1) -> Output:
        """See :class:`hotstart.convert.target.Target`."""
        import obstore

        part = max(_PART, -(-size // _PARTS))
        at_once = max(1, min(_AT_ONCE, self._memory // (beside * part) - 1))
        key = self._location.key(name)
        self._begun.append(key)
        writer = obstore.open_writer(self._store, key, buffer_size=part, max_concurrency=at_once)
        upload = _Upload(writer, self, key)
        self._uploads.append(upload)
        return Digesting(upload, name, self.digests)

    def path(self, name: str) -> str:
        """See :class:`hotstart.convert.target.Target`."""
        self._staged = self._staged or temporary_directory("hotstart-convert-")
        return os.path.join(self._staged, name)

    def adopt(self, name: str) -> None:
        """See :class:`hotstart.convert.target.Target`."""
        path = self.path(name)
        output = self.open(name, size=os.path.getsize(path))
        with open(path, "rb") as file:
            while data := file.read(_STEP):
                output.write(data)
        output.close()
        os.unlink(path)

    def publish(self) -> None:
        """See :class:`hotstart.convert.target.Target`. Each object is there as soon as it is whole."""

    def discard(self) -> None:
        """See :class:`hotstart.convert.target.Target`."""
        import obstore

        for upload in self._uploads:
            upload.abandon()
        try:
            obstore.delete(self._store, self._begun)
        except Exception as error:
            gone = isinstance(error, FileNotFoundError)
            for key in self._begun if gone else ():
                with suppress(Exception):
                    obstore.delete(self._store, key)
            if not gone:
                reason = self.failed(self._location.prefix, error, "delete").found
                log.warning("objects of this conversion may be left in %s: %s", self.shown, reason)

    def failed(self, key: str, error: Exception, doing: str) -> HotstartError:
        """The error for what ``obstore`` raised."""
        name = f"{self._location.scheme}://{self._location.container}/{key}"
        problem = explain_client(name, self._settings, doing, error)
        if refusal_of_client(error).status in (401, 403, 405):
            return StorageError(
                problem.found,
                advice="The credentials must allow to write, list and delete there (of S3: s3:PutObject, "
                "s3:AbortMultipartUpload, s3:ListBucket, s3:DeleteObject)",
            )
        return problem


class _Upload:
    """An output of a bucket."""

    def __init__(self, writer: Any, bucket: Bucket, key: str) -> None:
        self._writer = writer
        self._bucket = bucket
        self._key = key
        self._whole = False

    def write(self, data: memoryview | bytes) -> None:
        """See :class:`hotstart.convert.target.Output`."""
        try:
            self._writer.write(data)
        except Exception as error:
            raise self._bucket.failed(self._key, error, "write") from None

    def close(self) -> None:
        """See :class:`hotstart.convert.target.Output`."""
        self._whole = True
        try:
            self._writer.close()
        except Exception as error:
            raise self._bucket.failed(self._key, error, "write") from None

    def abandon(self) -> None:
        """Give up an upload that is not whole; its parts are removed."""
        if not self._whole:
            self._whole = True
            given_up = ConnectionAbortedError("the conversion ended early")
            with suppress(Exception):
                self._writer.__exit__(ConnectionAbortedError, given_up, None)
