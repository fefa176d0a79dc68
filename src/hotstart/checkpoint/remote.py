"""A model in an object store: its small files fetched into the cache, its weights read where they are."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hotstart.checkpoint.base import ShardFile
from hotstart.checkpoint.files import CONFIG, INDEX
from hotstart.checkpoint.layout import SINGLE
from hotstart.checkpoint.safetensors import Header, header_length, parse_header
from hotstart.checkpoint.small_files import SmallFiles
from hotstart.errors import ConfigError, ModelError
from hotstart.storage.location import parse_location
from hotstart.storage.object_store import NEVER, Fetched, ObjectStore
from hotstart.storage.source import FileSource, Source, identity

if TYPE_CHECKING:
    from hotstart.storage.disk_copy import DiskCopies, Entry

_HEAD = 1 << 20
"""Bytes asked for first of a weight file: most headers fit, and each request costs a round trip."""


class ObjectFolder:
    """See :class:`hotstart.checkpoint.folder.Folder`."""

    def __init__(self, store: ObjectStore, small_files: str, copies: DiskCopies | None = None) -> None:
        """``small_files``: where :func:`fetch_small_files` put them. ``copies``: of weight files."""
        self.path = str(store.location)
        self.small_files = small_files
        self.store = store
        self.copies = copies
        self._single: Fetched | None = None

    def sizes(self) -> dict[str, int]:
        """See :class:`hotstart.checkpoint.folder.Folder`; without an index, only the one file if it is there.

        It is asked for by name first: a listing may be long, or not allowed.
        """
        indexed = os.path.lexists(os.path.join(self.small_files, INDEX))
        if not indexed or self.store.location.is_web:
            self._single = self.store.fetch(SINGLE, _HEAD, optional=not self.store.location.is_web)
            if self._single is not None:
                return {SINGLE: self._single.size}
            if self.store.location.is_web:
                raise ModelError(
                    f"There is no {SINGLE} in {self.path}"
                    if indexed
                    else f"There is neither {INDEX} nor {SINGLE} in {self.path}",
                    expected="one of them, for the files of a web server cannot be listed",
                    advice="Start without --ignore-index, beside an index that names the files"
                    if indexed
                    else "Put the index beside the weights, as it was published",
                )
        return self.listing()

    def listing(self) -> dict[str, int]:
        """Bytes of every file by name, by a listing; see :meth:`sizes`. Of a web server: none."""
        return {name: info.size for name, info in self.store.list().items()}

    def header(self, name: str, file: int) -> Header | None:
        """See :class:`hotstart.checkpoint.folder.Folder`."""
        first, self._single = (self._single if name == SINGLE else None), None
        first = first or self.store.fetch(name, _HEAD)
        if first is None:
            return None
        path = f"{self.path}/{name}"
        length = header_length(path, first.data, first.size)
        text = first.data[8 : 8 + length]
        if len(text) < length:
            rest = bytearray(length - len(text))
            source = self._open(name, first.size, first.identity)
            source.read_into(memoryview(rest), 8 + len(text), NEVER)
            source.close()
            text += bytes(rest)
        header = parse_header(path, first.size, text, file, first.identity)
        copy = self._copy_of(header.file)
        if copy is not None and copy.complete:
            # The header is the store's own; the copy is compared with its checksums after the start.
            with suppress(OSError):
                pinned = identity(os.stat(copy.data))
                return Header(replace(header.file, path=copy.data, identity=pinned), header.tensors)
        return header

    def source(self, file: ShardFile, *, direct: bool = False) -> Source:
        """See :class:`hotstart.checkpoint.folder.Folder`."""
        if os.path.isabs(file.path):
            return FileSource(file.path, direct=direct, pinned=file.identity)
        if direct:
            raise ConfigError(f"{file.path} is no file of this machine", expected="--read-strategy auto")
        source = self.stored(file)
        copy = self._copy_of(file)
        if copy is None:
            return source
        from hotstart.storage.disk_copy_source import CopiedSource

        return CopiedSource(source, copy)

    def stored(self, file: ShardFile) -> Source:
        """The bytes of a file as the store has them, whatever lies on the disk."""
        return self._open(file.path[len(self.path) + 1 :], file.size, file.identity)

    def warm_up(self) -> None:
        """Find credentials, connect and import what that takes, on a thread, before the first read must.

        Asks for one byte. What fails here fails again where it is reported.
        """

        def ask() -> None:
            with suppress(Exception):
                self.store.fetch(CONFIG, 1, optional=True)

        threading.Thread(target=ask, name="warm-up", daemon=True).start()

    def copy_name(self, file: ShardFile) -> str:
        """What a copy of a file that lies in the store is called: not every kind of identity is unique."""
        key = self.store.location.key(file.path[len(self.path) + 1 :])
        name = self.store.name(key)
        return name if file.identity.startswith('"') else f"{name} at {self.store.settings.endpoint}"

    def _copy_of(self, file: ShardFile) -> Entry | None:
        if self.copies is None:
            return None
        return self.copies.entry(self.copy_name(file), file.identity, file.size)

    def _open(self, name: str, size: int, etag: str) -> Source:
        return self.store.source(self.store.location.key(name), size, etag)


def open_store(location: str, *, environ: Mapping[str, str], patience: float) -> ObjectStore:
    """The store of a location as it stands on the command line. Raises ConfigError."""
    return ObjectStore(parse_location(location), environ=environ, patience=patience)


def fetch_small_files(store: ObjectStore, cache: str) -> str:
    """The directory with the small files of a model, as they are in the store now.

    Files that did not change since an earlier start are not fetched again. ``cache`` is a directory
    that is kept, empty where there is none; the result lies in it and is never changed later. Where it
    cannot be written, the result goes with this process. Raises ModelError when there is no model,
    StorageError when the store cannot be reached or the files be written nowhere.
    """
    name = f"{store.location}\0{store.settings.described}"
    place = hashlib.sha256(name.encode()).hexdigest()[:16]
    files = SmallFiles(store, os.path.join(cache, "small-files", place) if cache else "")
    directory = files.fetch()
    if directory is None:
        raise _no_model(store, files.found)
    return directory


def _no_model(store: ObjectStore, files: Mapping[str, object]) -> ModelError:
    location = store.location
    if location.is_web or files:
        return ModelError(f"There is no config.json in {location}", advice="Check the address")
    names = sorted(store.list())
    if names:
        return ModelError(
            f"There is no config.json in {location}, which holds {', '.join(names[:5])}",
            expected="the folder of one model",
        )
    return ModelError(f"There is nothing in {location}", advice="Check bucket and prefix")
