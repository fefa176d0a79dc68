"""What is converted: a model in a directory, in an object store, or on the hub, and all its small files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

from msgspec import Struct

from hotstart.checkpoint.base import Checkpoint
from hotstart.checkpoint.files import INDEX, SMALL_FILES, TEMPLATES, read_json, size_limit, template_names
from hotstart.checkpoint.folder import Folder, LocalFolder
from hotstart.checkpoint.resolve import resolve
from hotstart.convert.opening import open_weights
from hotstart.convert.planned import Planned
from hotstart.convert.reading import READERS
from hotstart.convert.tensorizer_source import TensorizerFolder
from hotstart.errors import HotstartError, ModelError, StorageError
from hotstart.storage.access import read_error
from hotstart.storage.digests import SUMS
from hotstart.storage.location import is_location
from hotstart.units import format_size

if TYPE_CHECKING:
    from hotstart.checkpoint.remote import ObjectFolder

_KINDS = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py", ".md", ".yaml", ".yml")
"""Ends of names that belong to a model and are no weights."""
_PAPERS = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_LARGEST = 512 << 20
_STEP = 1 << 20


class SmallFile(Struct, frozen=True):
    """A file of a model that is no weight file, and need not be small."""

    size: int
    read: Callable[[], Iterator[bytes]]
    """Its bytes in steps, from the first one on. Raises StorageError."""


class Origin(Struct, frozen=True):
    """A model whose headers were read. ``small``: its other files."""

    shown: str
    folder: Folder
    checkpoint: Checkpoint
    small: dict[str, SmallFile]
    tensors: tuple[Planned, ...]
    """As a plain checkpoint has them."""
    readers: int = READERS
    """Threads that its bytes may be asked for by."""

    @property
    def config(self) -> dict[str, object]:
        """The content of config.json. Raises ModelError."""
        return read_json(
            os.path.join(self.folder.small_files, "config.json"), shown=f"{self.shown}/config.json"
        )


def open_origin(
    source: str,
    *,
    environ: Mapping[str, str],
    cache: str,
    patience: float,
    hub_cache: str | None = None,
    revision: str | None = None,
    report: Callable[[int, int], None] | None = None,
    keyfile: str | None = None,
    joins: bool = True,
) -> Origin:
    """Find a model and read its headers; its weights only where they are on the hub, or to be joined.

    ``cache``: the root of what is kept, empty where there is none. ``patience``: seconds that a silent
    store is given. ``hub_cache``, ``revision`` and ``report``: as in
    :func:`hotstart.checkpoint.resolve.resolve`, ``keyfile`` and ``joins`` as in
    :func:`hotstart.convert.opening.open_weights`. Raises ConfigError, ModelError and StorageError.
    """
    folder: Folder
    if is_location(source):
        from hotstart.checkpoint.remote import ObjectFolder, fetch_small_files, open_store

        store = open_store(source, environ=environ, patience=patience)
        folder = ObjectFolder(store, fetch_small_files(store, cache))
    else:
        folder = LocalFolder(resolve(source, revision=revision, hub_cache=hub_cache, report=report))
    weights = open_weights(folder, keyfile=keyfile, joins=joins)
    small = _small_files(folder)
    if "config.json" not in small:
        raise ModelError(
            f"{folder.path} holds weights but no config.json",
            expected="a model's directory with config.json, tokenizer files and weights",
            advice="Copy config.json and the tokenizer files from where the weights came from",
        )
    readers = 1 if isinstance(weights.checkpoint.folder, TensorizerFolder) else READERS
    return Origin(folder.path, folder, weights.checkpoint, small, weights.tensors, readers)


def _small_files(folder: Folder) -> dict[str, SmallFile]:
    found: dict[str, SmallFile] = {}
    listed = _listed(folder)
    for name in sorted({*SMALL_FILES, *listed, *_templates(folder)} - {INDEX, SUMS}):
        path = os.path.join(folder.small_files, name)
        if os.path.isfile(path):
            found[name] = _file(path, size_limit(name) or _LARGEST)
        elif not isinstance(folder, LocalFolder) and name in listed and name not in SMALL_FILES:
            found[name] = _object(cast("ObjectFolder", folder), name)
    return found


def _listed(folder: Folder) -> list[str]:
    """What else lies beside the weights, as far as it can be listed."""
    try:
        local = isinstance(folder, LocalFolder)
        names = folder.sizes() if local else cast("ObjectFolder", folder).listing()
    except HotstartError:
        return []  # of a store that gives no listing, what a start reads is all that there is
    return [
        name
        for name in names
        if "/" not in name
        and not name.startswith(".")
        and not name.endswith(".index.json")
        and (name.endswith(_KINDS) or name.startswith(_PAPERS))
    ]


def _templates(folder: Folder) -> list[str]:
    try:
        names = os.listdir(os.path.join(folder.small_files, TEMPLATES))
    except OSError:
        return []
    return [f"{TEMPLATES}/{name}" for name in template_names(names)]


def _file(path: str, limit: int) -> SmallFile:
    def read() -> Iterator[bytes]:
        left = size
        try:
            with open(path, "rb") as file:
                while left and (data := file.read(min(_STEP, left))):
                    left -= len(data)
                    yield data
        except OSError as error:
            raise read_error(path, error) from None
        if left:
            raise StorageError(f"{path} became shorter while it was read", expected=f"{size} bytes")

    try:
        with open(path, "rb") as file:  # what may not be read is known before anything is written
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise read_error(path, error) from None
    _check_size(path, size, limit)
    return SmallFile(size, read)


def _object(folder: ObjectFolder, name: str) -> SmallFile:
    path = f"{folder.path}/{name}"
    first = folder.store.fetch(name, 1)
    if first is None:
        raise StorageError(f"{path} went while the store was listed", expected="a store that nobody changes")
    size, identity = first.size, first.identity
    _check_size(path, size, _LARGEST)

    def read() -> Iterator[bytes]:
        from hotstart.storage.object_store import NEVER

        source = folder.store.source(folder.store.location.key(name), size, identity)
        try:
            for begin in range(0, size, _STEP):
                data = bytearray(min(_STEP, size - begin))
                source.read_into(memoryview(data), begin, NEVER)
                yield bytes(data)
        finally:
            source.close()

    return SmallFile(size, read)


def _check_size(path: str, size: int, limit: int) -> None:
    if size > limit:
        raise ModelError(
            f"{path} has more than {format_size(limit)}", expected=f"at most {format_size(limit)}"
        )
