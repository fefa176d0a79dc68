"""A folder of an object store to write to: weights first, configuration last.

An object is seen when its upload is complete, so what is under way when a conversion fails is given up
with it, and what was complete is deleted, if it is still what was written. A process that is killed can do
neither: parts of its uploads stay until the bucket's own rule for incomplete uploads removes them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hotstart.checkpoint.wording import count, few
from hotstart.convert.objects import Objects
from hotstart.convert.target import RESERVE, Digesting, Output
from hotstart.errors import ConfigError, StorageError
from hotstart.storage.cloud_settings import settings_for
from hotstart.storage.location import Location
from hotstart.storage.temporary import temporary_directory
from hotstart.units import format_size

_PARTS = 9000
"""Of an upload; stores allow 10 000."""
_SMALLEST = 5 << 20
"""Bytes of a part, but the last; S3 and Google take no smaller ones."""
_PART = 8 << 20
_AT_ONCE = 8
_HELD = 2
"""Parts of an output in memory at least: one on its way, one being filled."""
_STEP = 1 << 20


class Bucket:
    """See :class:`hotstart.convert.target.Target`."""

    def __init__(
        self, location: Location, *, environ: Mapping[str, str], patience: float, memory_limit: int
    ) -> None:
        """``memory_limit``: bytes of weights in memory; half of them may be on their way.

        Raises ConfigError.
        """
        self.shown = str(location)
        self.digests: dict[str, str] = {}
        self._memory = memory_limit // 2
        self._objects = Objects(location, settings_for(location, environ), patience=patience)
        self._uploads: list[_Upload] = []
        self._staged = ""

    @property
    def left(self) -> str:
        """See :class:`hotstart.convert.target.Target`."""
        if not (names := self._objects.left):
            return ""
        return (
            f"{count(len(names), 'object')} of it may be left in {self.shown}: {few(names)}; "
            "delete them, or name another prefix the next time"
        )

    def check(self) -> None:
        """See :class:`hotstart.convert.target.Target`."""
        self.together(0)
        self._objects.check_empty()

    def reserve(self, nbytes: int, *, named: int = 0) -> None:
        """See :class:`hotstart.convert.target.Target`. Stores have room; what is named lies here first."""
        if named:
            self._staged = self._staged or temporary_directory("hotstart-convert-")
            place, free = os.path.dirname(self._staged), shutil.disk_usage(self._staged).free
            if free < named + RESERVE:
                raise StorageError(
                    f"{place} has {format_size(free)} free, where these files lie until they are uploaded",
                    expected=f"{format_size(named + RESERVE)} for {self.shown}",
                    advice="Make room there, or name a directory that has it: "
                    "TMPDIR=DIRECTORY hotstart convert",
                )
        self._objects.claim()

    def together(self, size: int) -> int:
        """See :class:`hotstart.convert.target.Target`."""
        least = _HELD * _part(size, _SMALLEST)
        if self._memory < least:
            raise ConfigError(
                f"--memory-limit {format_size(2 * self._memory)} is too small to write to {self.shown}: "
                f"half of it is for uploads, and one has {_HELD} parts of {format_size(least // _HELD)} in "
                "memory",
                expected=f"at least {-(-2 * least >> 20)}MiB",
            )
        return self._memory // least

    def open(self, name: str, *, size: int = 0, beside: int = 1) -> Output:
        """See :class:`hotstart.convert.target.Target`."""
        share = self._memory // beside
        part = _part(size, _PART if share >= _HELD * _PART else _SMALLEST)
        at_once = max(1, min(_AT_ONCE, share // part - 1))
        upload = _Upload(self._objects, name, size, part, at_once)
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

    def settle(self) -> None:
        """See :class:`hotstart.convert.target.Target`."""
        self._objects.recheck()

    def publish(self) -> None:
        """See :class:`hotstart.convert.target.Target`. Each object is there as soon as it is whole."""
        self._objects.release()

    def discard(self) -> None:
        """See :class:`hotstart.convert.target.Target`."""
        for upload in self._uploads:
            upload.abandon()
        self._objects.delete()


class _Upload:
    """An output of a bucket: in parts, or at once where one part is enough."""

    def __init__(self, objects: Objects, name: str, size: int, part: int, at_once: int) -> None:
        self._objects = objects
        self._name = name
        self._key = objects.location.key(name)
        self._part = part
        self._at_once = at_once
        self._written = 0
        self._whole: bytearray | None = bytearray() if size <= part else None
        self._writer: Any = None

    def write(self, data: memoryview | bytes) -> None:
        """See :class:`hotstart.convert.target.Output`."""
        self._written += len(data)
        if self._whole is not None:
            if len(self._whole) + len(data) <= self._part:
                self._whole += data
                return
            begun, self._whole = self._whole, None
            self._upload(begun)
        self._upload(data)

    def close(self) -> None:
        """See :class:`hotstart.convert.target.Output`."""
        if self._whole is not None:
            self._objects.put(self._name, bytes(self._whole))
            self._whole = None
            return
        self._objects.check_absent(self._name)  # no store creates only what is absent when it comes in parts
        writer, self._writer = self._writer, None
        self._objects.ending(self._name, self._written)
        try:
            writer.close()
        except Exception as error:
            self._writer = writer
            raise self._objects.failed(self._key, error, "write") from None
        self._objects.ended(self._name)

    def abandon(self) -> None:
        """Give up an upload that is not whole; its parts are removed."""
        writer, self._writer, self._whole = self._writer, None, None
        if writer is not None:
            given_up = ConnectionAbortedError("the conversion ended early")
            # Parts under way are cut off, not waited for: obstore's writer has no way to. One that a store
            # has whole by then is the store's to refuse, or to remove with the upload.
            with suppress(Exception):
                writer.__exit__(ConnectionAbortedError, given_up, None)

    def _upload(self, data: memoryview | bytes | bytearray) -> None:
        import obstore

        try:
            if self._writer is None:
                self._writer = obstore.open_writer(
                    self._objects.store, self._key, buffer_size=self._part, max_concurrency=self._at_once
                )
            view = memoryview(data)
            for begin in range(0, len(view), _STEP):  # what is written at once is held beside the parts
                self._writer.write(view[begin : begin + _STEP])
        except Exception as error:
            raise self._objects.failed(self._key, error, "write") from None


def _part(size: int, least: int) -> int:
    return max(least, -(-size // _PARTS))
