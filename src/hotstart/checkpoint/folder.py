"""Where a model's files lie: a directory, or a folder of an object store.

What a checkpoint means does not depend on it; how files are found and bytes are had does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from hotstart.checkpoint.base import ShardFile
from hotstart.checkpoint.refusals import no_directory
from hotstart.checkpoint.safetensors import Header, read_header
from hotstart.storage.access import check_directory
from hotstart.storage.source import FileSource, Source

if TYPE_CHECKING:
    from hotstart.config.settings import LoadConfig, ModelConfig

_COPIES = "original"
"""The folder in which publishers keep the weights in their own layout."""


class Folder(Protocol):
    """See the module."""

    path: str
    """What messages call it."""
    small_files: str
    """The directory that holds configuration, tokenizer and index; of an object store, fetched copies."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each file by name, those in ``original/`` too. Of an object store: a listing, so slow.

        Raises ModelError when there is no such folder, StorageError when it may not be listed.
        """
        ...

    def header(self, name: str, file: int) -> Header | None:
        """The validated header of a weight file; None when there is no such file.

        ``file`` becomes :attr:`TensorRef.file`. Raises ModelError and StorageError.
        """
        ...

    def source(self, file: ShardFile, *, direct: bool = False) -> Source:
        """The bytes of a file whose header was read; it must still be the same. Raises StorageError."""
        ...


class LocalFolder:
    """See :class:`Folder`."""

    def __init__(self, path: str) -> None:
        self.path = self.small_files = path

    def sizes(self) -> dict[str, int]:
        """See :class:`Folder`."""
        if not os.path.isdir(self.path):
            raise no_directory(self.path)
        check_directory(self.path)
        found: dict[str, int] = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                found[entry.name] = _size(entry)
                if entry.name == _COPIES and entry.is_dir():
                    with os.scandir(entry.path) as copies:
                        found |= {f"{_COPIES}/{copy.name}": _size(copy) for copy in copies}
        return found

    def header(self, name: str, file: int) -> Header | None:
        """See :class:`Folder`."""
        path = os.path.join(self.path, name)
        return read_header(path, file) if os.path.lexists(path) else None

    def source(self, file: ShardFile, *, direct: bool = False) -> Source:
        """See :class:`Folder`."""
        return FileSource(file.path, direct=direct, pinned=file.identity)


def shown_folder(model: ModelConfig) -> str:
    """What messages call the folder of a resolved model."""
    if not model.location:
        return model.path
    from hotstart.storage.location import parse_location

    return str(parse_location(model.location))


def open_folder(model: ModelConfig, load: LoadConfig) -> Folder:
    """Where the files of a resolved model lie. Raises ConfigError."""
    if not model.location:
        return LocalFolder(model.path)
    from hotstart.checkpoint.remote import ObjectFolder, open_store
    from hotstart.storage.variables import with_options

    environ = with_options(os.environ, load.model_loader_extra_config)
    store = open_store(model.location, environ=environ, patience=load.storage_timeout)
    copies = None
    if load.disk_cache is not None:
        from hotstart.storage.disk_copy import DiskCopies, Limit

        copies = DiskCopies(Limit.parse(load.disk_cache))
    return ObjectFolder(store, model.path, copies)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:
        return 0  # a dangling link: reading it gives the error that says so
