"""Where bytes come from, behind one interface; here: local and mounted files."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from typing import Protocol

from hotstart.errors import HotstartError, ModelError, StorageError
from hotstart.storage.access import read_error

DIRECT_ALIGN = 4096
"""Bytes; the strictest block size of the devices and file systems in use."""
STEP = 16 << 20
"""Bytes of one system call: the granularity of cancelling."""


class Cancel(Protocol):
    """Tells a reader to give up; ``threading.Event`` is one."""

    def is_set(self) -> bool:
        """Whether to stop now."""
        ...


class ReadCancelled(Exception):  # noqa: N818 - not an error: somebody asked for it
    """The read was given up because its Cancel was set."""


class Source(Protocol):
    """Bytes by offset. Blocking and thread-safe; one thread per range in flight."""

    name: str
    size: int
    """Bytes."""
    identity: str
    """Pins the content for the whole load: inode, time and size of a file; the ETag of an object."""
    align: int
    """What address, offset and length of a read must be multiples of; 1: nothing."""

    def read_into(self, buffer: memoryview, offset: int, cancel: Cancel) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on.

        Raises StorageError when they cannot be had or are not the pinned content any more, and
        ReadCancelled.
        """
        ...

    def verify(self) -> None:
        """Raise StorageError when the content is not the pinned one any more."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class FileSource:
    """A file that stays the same file for the whole load, whatever happens to its name."""

    def __init__(self, path: str, *, direct: bool = False, pinned: str = "") -> None:
        """Open a regular file; ``direct`` bypasses the page cache (O_DIRECT).

        ``pinned`` is the identity that the file must still have; empty: any. Raises StorageError
        when it cannot be opened, cannot be read directly, or is another file by now.
        """
        self.name = path
        self.align = DIRECT_ALIGN if direct else 1
        self.drops_behind = False
        """Whether pages are dropped from the page cache once read: for cold files where memory is tight."""
        self.descriptor_for_each_reader = False
        """For network file systems, which often limit what one open file gets."""
        self._flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_DIRECT if direct else 0)
        try:
            self._fd = os.open(path, self._flags)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                raise StorageError(
                    f"The file system of {path} has no direct reads", advice="Use --read-strategy buffered"
                ) from None
            raise read_error(path, error, doing="open") from None
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise ModelError(f"{path} is no regular file", expected="a weight file")
        self.size = status.st_size
        self.identity = identity(status)
        if pinned and self.identity != pinned:
            os.close(self._fd)
            raise StorageError(
                f"{path} was replaced or changed after its header was read",
                expected="files that stay as they are during a load",
                advice="Wait until the copy into this directory is complete, then start again",
            )

    def read_into(self, buffer: memoryview, offset: int, cancel: Cancel) -> None:
        """See :class:`Source`. A direct read may reach past the end by less than ``align``."""
        end = min(offset + len(buffer), self.size)
        if offset < 0 or offset + len(buffer) > _round_up(self.size, self.align):
            raise ValueError(
                f"bytes {offset} to {offset + len(buffer)} of {self.name}, which has {self.size}"
            )
        position = offset
        try:
            while position < end:
                if cancel.is_set():
                    raise ReadCancelled(self.name)
                part = buffer[position - offset : position - offset + STEP]
                got = os.preadv(self._reader_fd(), [part], position)
                if got <= 0 or (position + got < end and got % self.align):
                    raise self.changed()
                position += got
            if self.drops_behind:
                os.posix_fadvise(self._fd, offset, end - offset, os.POSIX_FADV_DONTNEED)
            self.verify()
        except OSError as error:
            if isinstance(error, HotstartError):
                raise
            raise read_error(self.name, error, offset=position) from None

    def verify(self) -> None:
        """Raise StorageError when the file is not as it was when it was opened."""
        try:
            found = identity(os.fstat(self._fd))
        except OSError as error:
            raise read_error(self.name, error) from None
        if found != self.identity:
            raise self.changed()

    def fileno(self) -> int:
        """The descriptor, for readers in native code."""
        return self._fd

    def close(self) -> None:
        """Close the descriptor."""
        # A read that hung may come back and go on: not with another file that has the number by then.
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _reader_fd(self) -> int:
        """The descriptor that this thread reads from."""
        if not self.descriptor_for_each_reader:
            return self._fd
        own: _Descriptor | None = getattr(_readers, "own", None)
        if own is None or own.source is not self:
            _readers.own = own = _Descriptor(self, self._fd, self._flags)
        return own.fd

    def changed(self) -> StorageError:
        """The error for a file that is not as it was."""
        size = os.fstat(self._fd).st_size
        how = f"shrank from {self.size} to {size} bytes" if size < self.size else "was changed"
        return StorageError(
            f"{self.name} {how} while it was being read",
            expected="files that stay as they are during a load",
            advice="Wait until the copy into this directory is complete; replace files by rename",
        )


class _Descriptor:
    """The same open file once more, until its thread ends or goes on to another file.

    A thread has at most one, so that a checkpoint of many files does not use up the limit on open files.
    """

    def __init__(self, source: FileSource, fd: int, flags: int) -> None:
        self.source = source
        self.fd, self._own = fd, False
        # By this name it is the same file even if another took its place.
        with contextlib.suppress(OSError):
            self.fd, self._own = os.open(f"/proc/self/fd/{fd}", flags), True
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # twice as far ahead

    def __del__(self) -> None:
        if self._own:
            os.close(self.fd)


_readers = threading.local()


def identity(status: os.stat_result) -> str:
    """What pins a file's content: it is another file, or was written to, when this differs."""
    return f"{status.st_dev:x}:{status.st_ino}:{status.st_mtime_ns}:{status.st_size}"


def _round_up(size: int, align: int) -> int:
    return -(-size // align) * align
