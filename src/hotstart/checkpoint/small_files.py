"""The small files of a model in an object store, kept in the cache from one start to the next.

Purpose: a start asks for each of them once, in parallel, and gets none that it has.
Safety: a *generation* is a directory whose files were all in the store at one moment; it is written
aside, renamed into place and never changed. A set in which anything is new is looked at twice, and
counts when the second look finds it as it was. Generations that no start used for a week go.
Failure: whatever is wrong with what is kept, it is fetched again. Where nothing can be kept, the files
lie in a temporary directory that goes with the process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

import msgspec
from msgspec import Struct

from hotstart.checkpoint.files import CONFIG, SMALL_FILES, TEMPLATES, size_limit, template_names
from hotstart.errors import ModelError, StorageError
from hotstart.storage.object_store import ObjectStore
from hotstart.storage.temporary import temporary_directory
from hotstart.units import format_size

log = logging.getLogger("hotstart.storage")

_MANIFEST = ".generation.json"
_LOOKS = 4
_KEPT = 7 * 86400.0
"""Seconds after which a generation that nobody used goes."""


class SmallFile(Struct, frozen=True):
    """A file as the store had it. ``digest``: SHA-256 of its bytes."""

    identity: str
    size: int
    digest: str


class SmallFiles:
    """Those of one folder of a store. ``place``: the directory of its generations; empty: there is none."""

    def __init__(self, store: ObjectStore, place: str) -> None:
        self.found: dict[str, SmallFile] = {}
        """By name, those that are in the store."""
        self._store = store
        self._place = place
        self._data: dict[str, bytes] = {}
        """By digest, what was fetched."""
        self._kept = ""

    def fetch(self) -> str | None:
        """The directory of the generation that is in the store now; None: there is no ``config.json``.

        Raises ModelError for a file that is too large and for a folder that does not come to rest,
        StorageError when the store cannot be reached or the files be written nowhere.
        """
        known = self._newest()
        self.found = self._look(known)
        if self.found == known and known:
            return self._kept
        for _ in range(_LOOKS):
            before, self.found = self.found, self._look(self.found)
            if self.found == before:
                break
        else:
            raise ModelError(
                f"{self._store.location} changes while it is looked at",
                expected="a folder whose upload is complete",
                advice="Start again when it is; publish a new model under a new prefix",
            )
        return self._write() if CONFIG in self.found else None

    def _look(self, known: Mapping[str, SmallFile]) -> dict[str, SmallFile]:
        """What is in the store, given what was there before."""
        listed: SimpleQueue[list[str]] = SimpleQueue()
        # Nobody waits for a listing of a store that gives no configuration.
        ask = threading.Thread(target=lambda: listed.put(self._store.names(TEMPLATES)), daemon=True)
        ask.start()
        with ThreadPoolExecutor(len(SMALL_FILES)) as pool:

            def get(names: Iterable[str]) -> dict[str, SmallFile]:
                names = list(names)
                files = pool.map(lambda name: self._get(name, known.get(name)), names)
                return {name: file for name, file in zip(names, files, strict=True) if file is not None}

            found = get(SMALL_FILES)
            if CONFIG in found:
                found |= get(f"{TEMPLATES}/{name}" for name in template_names(listed.get()))
        return found

    def _get(self, name: str, known: SmallFile | None) -> SmallFile | None:
        limit = size_limit(name) or 0
        fetched = self._store.fetch(
            name, limit, known=known.identity if known else "", optional=name != CONFIG
        )
        if fetched is None or (fetched.unchanged and known):
            return known if fetched else None
        if fetched.size > limit:
            raise ModelError(
                f"{self._store.name(self._store.location.key(name))} has {format_size(fetched.size)}",
                expected=f"at most {format_size(limit)}",
            )
        file = SmallFile(fetched.identity, fetched.size, hashlib.sha256(fetched.data).hexdigest())
        self._data[file.digest] = fetched.data
        return file

    def _newest(self) -> dict[str, SmallFile]:
        """The generation used last, marked as used again; empty when there is none that is whole."""
        if not self._place:
            return {}
        with suppress(OSError):
            for path in sorted(_generations(self._place), key=_used, reverse=True):
                with suppress(OSError, msgspec.MsgspecError):
                    with open(os.path.join(path, _MANIFEST), "rb") as file:
                        known = msgspec.json.decode(file.read(), type=dict[str, SmallFile])
                    if all(
                        os.path.getsize(os.path.join(path, name)) == known[name].size and size_limit(name)
                        for name in known
                    ):
                        os.utime(path)  # before the store is asked: nobody may remove it meanwhile
                        self._kept = path
                        return known
        return {}

    def _write(self) -> str:
        if self._place:
            try:
                return self._keep()
            except OSError as error:
                log.warning("small files: %s cannot be written (%s)", self._place, error.strerror)
        directory = temporary_directory("hotstart-small-files-")
        try:
            self._write_to(directory)
        except OSError as error:
            raise _unwritable(directory, error) from None
        log.info("small files: in %s until this process ends", directory)
        return directory

    def _keep(self) -> str:
        """All of them or nothing, however many processes do it at once. Raises OSError."""
        target = os.path.join(self._place, _digest(self.found))
        os.makedirs(self._place, mode=0o700, exist_ok=True)
        fresh = tempfile.mkdtemp(prefix=".new-", dir=self._place)
        try:
            self._write_to(fresh)
            if not self._is_whole(target):
                shutil.rmtree(target, ignore_errors=True)
            with suppress(FileExistsError, OSError):
                os.rename(fresh, target)
            os.utime(target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        _remove_old(os.path.dirname(self._place))
        return target

    def _write_to(self, directory: str) -> None:
        for name, file in self.found.items():
            self._put(name, file, os.path.join(directory, name))
        with open(os.path.join(directory, _MANIFEST), "wb") as out:
            out.write(msgspec.json.encode(self.found))

    def _put(self, name: str, file: SmallFile, path: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        data = self._data.get(file.digest)
        if data is None:
            shutil.copyfile(os.path.join(self._kept, name), path)
            return
        with open(path, "wb") as out:
            out.write(data)

    def _is_whole(self, path: str) -> bool:
        """Whether a generation, if it is there, has all its files."""
        try:
            return all(
                os.path.getsize(os.path.join(path, name)) == file.size for name, file in self.found.items()
            )
        except OSError:
            return not os.path.lexists(path)


def _digest(files: Mapping[str, SmallFile]) -> str:
    text = "".join(f"{name}\0{file.digest}\0" for name, file in sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _generations(place: str) -> list[str]:
    with os.scandir(place) as entries:
        return [entry.path for entry in entries if not entry.name.startswith(".") and entry.is_dir()]


def _used(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0  # removed meanwhile


def _remove_old(places: str) -> None:
    """Of every folder of every store: what was left behind or not used for a week."""
    too_old = time.time() - _KEPT
    with suppress(OSError):
        for place in os.listdir(places):
            folder = os.path.join(places, place)
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                if 0.0 < _used(path) < too_old:
                    shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                os.rmdir(folder)  # if it is empty


def _unwritable(place: str, error: OSError) -> StorageError:
    return StorageError(
        f"The small files of the model can be written neither to the cache nor to {place}: {error.strerror}",
        expected="room for some megabytes",
        advice="Pass a writable directory by --cache-root, or mount an empty one at /tmp",
    )
