"""A directory to write to: filled beside its place under another name, and renamed when it is whole.

Safety: the directory beside is locked by the process that fills it; the kernel takes the lock away with
the process. Failure: what a killed process left is removed by the next conversion to the same place.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shlex
import shutil
import tempfile
from contextlib import suppress

from hotstart.config.paths import absolute
from hotstart.convert.target import RESERVE, Digesting, Output
from hotstart.errors import ConfigError, HotstartError, StorageError
from hotstart.storage.access import owner, who
from hotstart.storage.temporary import lock as lock_directory
from hotstart.units import format_size

log = logging.getLogger("hotstart.storage")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STEP = 1 << 20
_MANY = 1 << 20
"""Of files at once: more than any conversion writes."""


class Directory:
    """See :class:`hotstart.convert.target.Target`."""

    def __init__(self, path: str) -> None:
        self.shown = self._path = absolute(path).rstrip("/") or "/"
        self.digests: dict[str, str] = {}
        self._parent, self._name = os.path.split(self._path)
        self._filling = ""
        self._lock = -1
        self._open: list[_File] = []

    @property
    def left(self) -> str:
        """See :class:`hotstart.convert.target.Target`."""
        if not self._filling or not os.path.lexists(self._filling):
            return ""
        return f"{self._filling} may be left; remove it: rm -r {shlex.quote(self._filling)}"

    def check(self) -> None:
        """See :class:`hotstart.convert.target.Target`."""
        if os.path.lexists(self._path):
            self._check_empty()
        elif not os.path.isdir(self._parent):
            raise ConfigError(
                f"{self._parent}, where {self._name} is to be written, is no directory",
                expected="a directory that exists",
                advice=f"Mount it, or make it: mkdir -p {self._parent}",
            )

    def reserve(self, nbytes: int, *, named: int = 0) -> None:
        """See :class:`hotstart.convert.target.Target`."""
        free = shutil.disk_usage(self._parent).free
        if free < nbytes + RESERVE:
            raise StorageError(
                f"{self._parent} has {format_size(free)} free",
                expected=f"{format_size(nbytes + RESERVE)} for {self._path}",
                advice="Make room there, or write somewhere else",
            )
        self._make()

    def together(self, size: int) -> int:
        """See :class:`hotstart.convert.target.Target`."""
        return _MANY

    def open(self, name: str, *, size: int = 0, beside: int = 1) -> Output:
        """See :class:`hotstart.convert.target.Target`."""
        path = os.path.join(self._filling, name)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = _File(path, os.path.join(self._path, name))
        except OSError as error:
            raise write_error(os.path.join(self._path, name), error) from None
        self._open.append(file)
        return Digesting(file, name, self.digests)

    def path(self, name: str) -> str:
        """See :class:`hotstart.convert.target.Target`."""
        return os.path.join(self._filling, name)

    def adopt(self, name: str) -> None:
        """See :class:`hotstart.convert.target.Target`."""
        try:
            with open(self.path(name), "rb") as file:
                digest = hashlib.sha256()
                while data := file.read(_STEP):
                    digest.update(data)
                os.fsync(file.fileno())
            self.digests[name] = digest.hexdigest()
        except OSError as error:
            raise write_error(os.path.join(self._path, name), error) from None

    def settle(self) -> None:
        """See :class:`hotstart.convert.target.Target`. The name of this directory is nobody else's."""

    def publish(self) -> None:
        """See :class:`hotstart.convert.target.Target`."""
        try:
            for directory, _, _ in os.walk(self._filling):
                _sync(directory)
            os.rename(self._filling, self._path)  # an empty directory gives way
            _sync(self._parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise self._not_empty() from None
            raise write_error(self._path, error) from None
        self._unlock()
        self._filling = ""

    def discard(self) -> None:
        """See :class:`hotstart.convert.target.Target`."""
        for file in self._open:
            file.abandon()
        if self._filling:
            shutil.rmtree(self._filling, ignore_errors=True)
        self._unlock()

    def _check_empty(self) -> None:
        if not os.path.isdir(self._path) or os.path.islink(self._path):
            kind = "a symbolic link" if os.path.islink(self._path) else "a file"
            raise ConfigError(f"{self._path} is {kind}", expected="a new directory, or an empty one")
        if os.listdir(self._path):
            raise self._not_empty()
        if os.path.ismount(self._path):
            raise ConfigError(
                f"{self._path} is a mount point, which a whole directory cannot replace",
                expected="a directory below it",
                advice=f"Write to {self._path}/model",
            )

    def _not_empty(self) -> HotstartError:
        with suppress(OSError):
            some = sorted(os.listdir(self._path))[:3]
            return ConfigError(
                f"{self._path} is not empty: it holds {', '.join(some)}",
                expected="a new directory, or an empty one",
                advice="Nothing is overwritten: name another directory, or remove this one first",
            )
        return ConfigError(f"{self._path} is not empty", expected="a new directory, or an empty one")

    def _make(self) -> None:
        prefix = f".{self._name}.converting-"
        try:
            self._remove_abandoned(prefix)
            self._filling = tempfile.mkdtemp(prefix=prefix, dir=self._parent)
            self._lock = self._locked()
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(self._filling, 0o777 & ~umask)
        except OSError as error:
            raise write_error(self._path, error) from None

    def _locked(self) -> int:
        """The lock of the directory, whose name is nobody else's even where there are no locks."""
        try:
            return lock_directory(self._filling)
        except OSError as error:
            log.warning(
                "%s has no locks (%s): what this conversion leaves if it is killed must be removed by hand",
                self._parent,
                error.strerror,
            )
            return -1

    def _unlock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _remove_abandoned(self, prefix: str) -> None:
        with os.scandir(self._parent) as entries:
            left = [entry.path for entry in entries if entry.name.startswith(prefix)]
        for path in left:
            with suppress(OSError):
                lock = lock_directory(path)
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


class _File:
    """An output of a directory."""

    def __init__(self, path: str, shown: str) -> None:
        self._shown = shown
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: memoryview | bytes) -> None:
        """See :class:`hotstart.convert.target.Output`."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise write_error(self._shown, error) from None

    def close(self) -> None:
        """See :class:`hotstart.convert.target.Output`."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise write_error(self._shown, error) from None
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptor, whatever was written."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def write_error(path: str, error: OSError) -> StorageError:
    """Why something cannot be written; nothing of it is left."""
    parent = os.path.dirname(path)
    if error.errno in _FULL:
        what = "the limit on file sizes (ulimit -f)" if error.errno == errno.EFBIG else "its disk or quota"
        return StorageError(
            f"{path} cannot be written: {error.strerror}; what was written is removed",
            advice=f"Make room, or raise {what}, then convert again",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(
            f"{path} cannot be written: {error.strerror} ({who()}; {parent}: {owner(parent)})",
            expected="a directory that this user may write to",
            advice="Name another directory, or run as its owner",
        )
    return StorageError(
        f"{path} cannot be written: {error.strerror or error}; what was written is removed",
        advice="Look for the device's errors in the kernel log (dmesg)",
    )


def _sync(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
