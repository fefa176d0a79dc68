"""Copies of objects on a local disk, so that the next start need not ask the network for them.

Purpose: a complete copy is an ordinary file, mapped and read like any other; of a partial one the
chunks that are there are read from the disk and the rest from the store.
Safety: an entry's name is a digest of the object's name, identity (ETag) and size, so a replaced
object is another entry. Every chunk has a checksum (:mod:`hotstart.storage.disk_copy_index`). A file
gets its final name once all of it is on the disk. One process writes an entry, any number use it;
both are locks of the kernel, which end with their process. What is in use is never removed.
Failure: whatever is wrong with a copy, its bytes come from the store.

    DIR/lock              held while somebody looks for room
    DIR/<key>/about.json  whose copy it is
    DIR/<key>/partial     the bytes so far; ``data`` once complete
    DIR/<key>/chunks      checksums of the chunks that are there
    DIR/<key>/use, write  locks; ``use`` also tells when the entry was used last
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import threading
from contextlib import suppress

import msgspec
from msgspec import Struct

from hotstart.errors import ConfigError
from hotstart.storage.disk_copy_index import ChunkTable
from hotstart.units import format_size, parse_size

_KEY = re.compile(r"[0-9a-f]{32}")
_SPARE = 0.1
"""Share of the file system that stays free where no size is given."""


class About(Struct, frozen=True):
    """Whose copy an entry is."""

    name: str
    identity: str
    size: int


class NoRoomError(OSError):
    """There is no room for a copy within the limit, or on the disk."""


class Limit(Struct, frozen=True):
    """What ``--disk-cache`` says."""

    directory: str
    nbytes: int | None
    """None: as much as leaves a tenth of the file system free."""

    @classmethod
    def parse(cls, text: str) -> Limit:
        """``DIR`` or ``DIR:SIZE``. Raises ConfigError."""
        directory, colon, size = text.rpartition(":")
        try:
            nbytes = parse_size(size) if colon and "/" not in size else None
        except ValueError:
            nbytes = -1
        if nbytes is None:
            directory = text
        if not directory or (nbytes is not None and nbytes <= 0):
            raise ConfigError(
                f"--disk-cache {text}", expected="a directory, or DIR:SIZE such as /var/cache/models:200GB"
            )
        return cls(os.path.abspath(os.path.expanduser(directory)), nbytes)

    @property
    def bound(self) -> str:
        """What keeps copies from filling the disk."""
        if self.nbytes is not None:
            return f"the limit is {format_size(self.nbytes)}"
        return f"a tenth of {self.directory} stays free"


class DiskCopies:
    """The copies below one directory, as this process uses them. Thread-safe.

    Nothing here ever raises for a start's sake: a directory that cannot be used holds nothing.
    """

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}

    def entry(self, name: str, identity: str, size: int) -> Entry | None:
        """The entry of an object, held from now on; None when there is none.

        An object without an identity has no copy: nothing would tell that it was replaced.
        """
        about = About(name, identity, size)
        key = _key(about)
        with self._lock:
            if not identity or key in self._entries:
                return self._entries.get(key)
            entry = Entry.hold(os.path.join(self.limit.directory, key), about)
            if entry is not None:
                self._entries[key] = entry
            return entry

    def create(self, name: str, identity: str, size: int) -> Entry:
        """The entry of an object, a new one if there is none, after making room for it.

        Raises NoRoomError, and OSError for a directory that cannot be written.
        """
        found = self.entry(name, identity, size)
        if found is not None:
            return found
        about = About(name, identity, size)
        directory = self.limit.directory
        os.makedirs(directory, mode=0o700, exist_ok=True)
        with open(os.path.join(directory, "lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = os.path.join(directory, _key(about))
            if not os.path.isdir(path):
                self._make_room(size)
            _create(path, about)
        entry = self.entry(name, identity, size)
        if entry is None:
            raise OSError(errno.EIO, f"{path} was removed again")
        return entry

    def close(self) -> None:
        """Hold nothing any more; the end of the process does the same."""
        with self._lock:
            while self._entries:
                self._entries.popitem()[1].close()

    def _make_room(self, size: int) -> None:
        """Remove what was used longest ago until ``size`` more bytes fit. Raises NoRoomError."""
        directory = self.limit.directory
        entries = [
            os.path.join(directory, name)
            for name in os.listdir(directory)
            if _KEY.fullmatch(name) or name.startswith(".gone-")
        ]
        sizes = {path: _size_of(path) for path in entries}
        for path in sorted(entries, key=_used):
            if self._fits(sizes, size):
                return
            if _remove_unused(path):
                del sizes[path]
        if not self._fits(sizes, size):
            raise NoRoomError(
                errno.ENOSPC,
                f"{format_size(size)} more do not fit: {self.limit.bound}, "
                f"{format_size(sum(sizes.values()))} are in use by servers",
            )

    def _fits(self, sizes: dict[str, int], size: int) -> bool:
        status = os.statvfs(self.limit.directory)
        free = status.f_bavail * status.f_frsize
        if self.limit.nbytes is not None:
            return sum(sizes.values()) + size <= self.limit.nbytes and size <= free
        return size <= free - _SPARE * status.f_blocks * status.f_frsize


class Entry:
    """One object's copy, held: nobody removes it while this process lives."""

    def __init__(self, path: str, about: About, use: int) -> None:
        self.path = path
        self.about = about
        self.data = os.path.join(path, "data")
        self.partial = os.path.join(path, "partial")
        self.chunks = os.path.join(path, "chunks")
        self._use = use

    @classmethod
    def hold(cls, path: str, about: About) -> Entry | None:
        """An entry that is there and is the copy of this object; marked as used."""
        lock = os.path.join(path, "use")
        try:
            use = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(use, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Removed and made again while the lock was taken: the lock is of an entry that is gone.
            if os.fstat(use).st_ino == os.stat(lock).st_ino:
                with open(os.path.join(path, "about.json"), "rb") as file:
                    if msgspec.json.decode(file.read(), type=About) == about:
                        with suppress(OSError):
                            os.utime(lock)
                        return cls(path, about, use)
        except (OSError, msgspec.MsgspecError):
            pass
        os.close(use)
        return None

    @property
    def complete(self) -> bool:
        """Whether the copy is an ordinary file of the right size."""
        try:
            return os.stat(self.data).st_size == self.about.size
        except OSError:
            return False

    def table(self) -> ChunkTable:
        """The checksums, as they are on the disk now."""
        return ChunkTable(self.chunks, self.about.size)

    def lock_for_writing(self) -> int | None:
        """A descriptor to close when all is written; None: another process writes this copy.

        Raises OSError.
        """
        fd = os.open(os.path.join(self.path, "write"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def close(self) -> None:
        """Hold it no more."""
        os.close(self._use)

    def publish(self) -> None:
        """All of the partial copy is on the disk: give it its final name. Raises OSError."""
        os.rename(self.partial, self.data)
        _sync_directory(self.path)

    def discard(self) -> None:
        """Remove the bytes, so that the next start makes them anew; open descriptors keep theirs."""
        for path in (self.data, self.partial, self.chunks):
            with suppress(OSError):
                os.unlink(path)


def about_copy(path: str) -> About | None:
    """Whose copy a file is, when it is a complete one of an entry."""
    if os.path.basename(path) != "data" or not _KEY.fullmatch(os.path.basename(os.path.dirname(path))):
        return None
    try:
        with open(os.path.join(os.path.dirname(path), "about.json"), "rb") as file:
            return msgspec.json.decode(file.read(), type=About)
    except (OSError, msgspec.MsgspecError):
        return None


def _key(about: About) -> str:
    text = f"{about.name}\0{about.identity}\0{about.size}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _create(path: str, about: About) -> None:
    os.makedirs(path, mode=0o700, exist_ok=True)
    fresh = os.path.join(path, f".about-{os.getpid()}")
    with open(fresh, "wb") as file:
        file.write(msgspec.json.encode(about))
    os.rename(fresh, os.path.join(path, "about.json"))
    with open(os.path.join(path, "use"), "ab"):
        pass
    os.utime(os.path.join(path, "use"))


def _size_of(path: str) -> int:
    """Bytes that an entry has, or will have once it is complete."""
    try:
        with open(os.path.join(path, "about.json"), "rb") as file:
            return msgspec.json.decode(file.read(), type=About).size
    except (OSError, msgspec.MsgspecError):
        return 0


def _used(path: str) -> float:
    try:
        return os.stat(os.path.join(path, "use")).st_mtime
    except OSError:
        return 0.0


def _remove_unused(path: str) -> bool:
    """Remove an entry unless some process uses or writes it."""
    held: list[int] = []
    try:
        for name in ("use", "write"):
            fd = os.open(os.path.join(path, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            held.append(fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Out of the way first: nobody finds it half removed.
        gone = os.path.join(os.path.dirname(path), f".gone-{os.path.basename(path)[-32:]}-{os.getpid()}")
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        for fd in held:
            os.close(fd)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
