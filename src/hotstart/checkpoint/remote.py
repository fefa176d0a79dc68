"""A model in an object store: its small files fetched into the cache, its weights read where they are."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from hotstart.checkpoint.base import ShardFile
from hotstart.checkpoint.files import MAX_TOKENIZER
from hotstart.checkpoint.layout import INDEX
from hotstart.checkpoint.safetensors import Header, header_length, parse_header
from hotstart.errors import ConfigError, ModelError, StorageError
from hotstart.storage.location import parse_location
from hotstart.storage.object_store import NEVER, Fetched, ObjectStore
from hotstart.storage.source import Source

_HEAD = 1 << 20
"""Bytes asked for first of a weight file: most headers fit, and each request costs a round trip."""
_SMALL = (
    "config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip


class ObjectFolder:
    """See :class:`hotstart.checkpoint.folder.Folder`."""

    def __init__(self, store: ObjectStore, small_files: str) -> None:
        """``small_files``: where :func:`fetch_small_files` put them."""
        self.path = str(store.location)
        self.small_files = small_files
        self.store = store

    def sizes(self) -> dict[str, int]:
        """See :class:`hotstart.checkpoint.folder.Folder`."""
        return {name: info.size for name, info in self.store.list().items()}

    def header(self, name: str, file: int) -> Header | None:
        """See :class:`hotstart.checkpoint.folder.Folder`."""
        first = self.store.fetch(name, _HEAD)
        if first is None:
            return None
        path = f"{self.path}/{name}"
        length = header_length(path, first.data, first.size)
        text = first.data[8 : 8 + length]
        if len(text) < length:
            rest = bytearray(length - len(text))
            self._open(name, first.size, first.identity).read_into(memoryview(rest), 8 + len(text), NEVER)
            text += bytes(rest)
        return parse_header(path, first.size, text, file, first.identity)

    def source(self, file: ShardFile, *, direct: bool = False) -> Source:
        """See :class:`hotstart.checkpoint.folder.Folder`."""
        if direct:
            raise ConfigError(f"{file.path} is no file of this machine", expected="--read-strategy auto")
        return self._open(file.path[len(self.path) + 1 :], file.size, file.identity)

    def _open(self, name: str, size: int, etag: str) -> Source:
        return self.store.source(self.store.location.key(name), size, etag)


def open_store(location: str, *, environ: Mapping[str, str], patience: float) -> ObjectStore:
    """The store of a location as it stands on the command line. Raises ConfigError."""
    return ObjectStore(parse_location(location), environ=environ, patience=patience)


def fetch_small_files(store: ObjectStore, cache: str) -> str:
    """The directory with the small files of a model, as they are in the store now.

    Files that did not change since an earlier start are not fetched again. ``cache`` is a directory
    that is kept; the result lies in it and is never changed later. Raises ModelError when there is
    no model, StorageError when the store cannot be reached or the cache not be written.
    """
    with ThreadPoolExecutor(len(_SMALL)) as pool:
        found = dict(
            zip(_SMALL, pool.map(lambda name: store.fetch(name, MAX_TOKENIZER), _SMALL), strict=True)
        )
    files = {name: file for name, file in found.items() if file is not None}
    if "config.json" not in files:
        raise _no_model(store, files)
    if short := [name for name, file in files.items() if len(file.data) < file.size]:
        raise ModelError(
            f"{store.name(store.location.key(short[0]))} is too large: {files[short[0]].size} bytes"
        )
    digest = hashlib.sha256(str(store.location).encode())
    for name, file in sorted(files.items()):
        digest.update(f"{name}\0{hashlib.sha256(file.data).hexdigest()}\0".encode())
    target = os.path.join(cache, "small-files", digest.hexdigest()[:32])
    if not os.path.isdir(target):
        _write(target, files)
    return target


def _write(target: str, files: Mapping[str, Fetched]) -> None:
    """All of them or nothing, however many processes do it at once."""
    parent = os.path.dirname(target)
    try:
        os.makedirs(parent, mode=0o700, exist_ok=True)
        fresh = tempfile.mkdtemp(prefix=".new-", dir=parent)
    except OSError as error:
        raise StorageError(f"The cache {parent} cannot be written: {error.strerror}") from None
    try:
        for name, file in files.items():
            with open(os.path.join(fresh, name), "wb") as out:
                out.write(file.data)
        with contextlib.suppress(FileExistsError, OSError):
            os.rename(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if not os.path.isdir(target):
        raise StorageError(f"{target} cannot be written", advice="Free space, or pass another --cache-root")


def _no_model(store: ObjectStore, files: Mapping[str, Fetched]) -> ModelError:
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
