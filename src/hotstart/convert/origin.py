"""What is converted: a model in a directory, in an object store, or on the hub, and all its small files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from msgspec import Struct

from hotstart.checkpoint.base import Checkpoint
from hotstart.checkpoint.files import INDEX, SMALL_FILES, TEMPLATES, read_json, size_limit, template_names
from hotstart.checkpoint.folder import Folder, LocalFolder
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.checkpoint.resolve import resolve
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


class Origin(Struct, frozen=True):
    """A model whose headers were read. ``small``: its other files, and where each is read."""

    shown: str
    folder: Folder
    checkpoint: Checkpoint
    small: dict[str, Callable[[], bytes]]

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
) -> Origin:
    """Find a model and read its headers; nothing of its weights, unless it is on the hub.

    ``cache``: the root of what is kept, empty where there is none. ``patience``: seconds that a silent
    store is given. ``hub_cache``, ``revision`` and ``report``: as in
    :func:`hotstart.checkpoint.resolve.resolve`. Raises ConfigError, ModelError and StorageError.
    """
    folder: Folder
    if is_location(source):
        from hotstart.checkpoint.remote import ObjectFolder, fetch_small_files, open_store

        store = open_store(source, environ=environ, patience=patience)
        folder = ObjectFolder(store, fetch_small_files(store, cache))
    else:
        folder = LocalFolder(resolve(source, revision=revision, hub_cache=hub_cache, report=report))
    checkpoint = open_checkpoint(folder)
    small = _small_files(folder)
    if "config.json" not in small:
        raise ModelError(
            f"{folder.path} holds weights but no config.json",
            expected="a model's directory with config.json, tokenizer files and weights",
            advice="Copy config.json and the tokenizer files from where the weights came from",
        )
    return Origin(folder.path, folder, checkpoint, small)


def _small_files(folder: Folder) -> dict[str, Callable[[], bytes]]:
    found: dict[str, Callable[[], bytes]] = {}
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
        names = folder.sizes()
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


def _file(path: str, limit: int) -> Callable[[], bytes]:
    def read() -> bytes:
        try:
            with open(path, "rb") as file:
                data = file.read(limit + 1)
        except OSError as error:
            raise read_error(path, error) from None
        if len(data) > limit:
            raise ModelError(
                f"{path} has more than {format_size(limit)}", expected=f"at most {format_size(limit)}"
            )
        return data

    return read


def _object(folder: ObjectFolder, name: str) -> Callable[[], bytes]:
    def read() -> bytes:
        fetched = folder.store.fetch(name, _LARGEST)
        if fetched is None or len(fetched.data) < fetched.size:
            raise StorageError(
                f"{folder.path}/{name} cannot be read whole", expected=f"at most {format_size(_LARGEST)}"
            )
        return fetched.data

    return read
