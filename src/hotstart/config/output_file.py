"""A file that a flag names for us to write: whole or not at all, and never more than that file.

A regular file is replaced at once, behind its symbolic links and with its owner and mode. What is no regular
file stays what it is: a pipe or a terminal is written to, a disk is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import time

from hotstart.errors import StorageError

PATIENCE = 1.0
"""Seconds that the reader of a pipe may take for each part; its writer may have others to serve."""
_NO_ROOM_BESIDE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""The file may be writable where its directory is not, or a mount point of its own."""


def write_output(flag: str, path: str, content: bytes, *, patience: float = PATIENCE) -> None:
    """Write what ``flag`` asks for. Raises StorageError that names it."""
    try:
        _write(path, content, patience)
    except OSError as error:
        raise _cannot(flag, path, error.strerror or str(error)) from None


def check_output(flag: str, path: str) -> None:
    """Raise StorageError for what cannot be written, before the work whose results it is to hold."""
    folder = os.path.dirname(os.path.realpath(path))
    code = 0
    if os.path.isdir(path):
        code = errno.EISDIR
    elif not os.path.isdir(folder):
        code = errno.ENOENT
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        code = errno.EACCES
    if code:
        raise _cannot(flag, path, os.strerror(code))


def _cannot(flag: str, path: str, why: str) -> StorageError:
    return StorageError(
        f"{flag} {path} cannot be written: {why}",
        advice="name a file in a directory that exists and is writable",
    )


def _write(path: str, content: bytes, patience: float) -> None:
    try:
        status = os.stat(path)
    except FileNotFoundError:  # or a link to a file that is still to be made
        _replace(os.path.realpath(path), content)
        return
    for stream in (1, 2):  # /dev/stdout, or the file of the log: nothing that is there may go
        if _is(stream, status):
            _write_all(stream, content, patience)
            return
    if stat.S_ISREG(status.st_mode):
        target = os.path.realpath(path)
        try:
            _replace(target, content, like=status)
        except OSError as error:
            if error.errno not in _NO_ROOM_BESIDE:
                raise
            _write_in_place(target, content, patience)
    elif stat.S_ISBLK(status.st_mode):
        raise OSError("it is a disk, whose content would be lost")
    else:
        _write_in_place(path, content, patience)


def _is(stream: int, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(status, os.fstat(stream))
    except OSError:
        return False  # closed


def _replace(path: str, content: bytes, *, like: os.stat_result | None = None) -> None:
    import tempfile

    # A name that nobody can guess, and so not occupy by a link to some other file.
    fd, aside = tempfile.mkstemp(prefix=".", suffix=".part", dir=os.path.dirname(path))
    try:
        with open(fd, "wb") as file:
            file.write(content)
            if like is None:
                os.fchmod(fd, 0o666 & ~_umask())
            else:
                with contextlib.suppress(PermissionError):  # only root gives files away
                    os.fchown(fd, like.st_uid, like.st_gid)
                os.fchmod(fd, stat.S_IMODE(like.st_mode))
        os.replace(aside, path)
    except OSError:
        os.unlink(aside)
        raise


def _umask() -> int:
    """The kernel tells it without a moment in which it is another one."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
    except (OSError, StopIteration):
        return 0o077


def _write_in_place(path: str, content: bytes, patience: float) -> None:
    try:
        # Opening a pipe would wait for its reader otherwise.
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise OSError("nobody reads from it") if error.errno == errno.ENXIO else error from None
    try:
        _write_all(fd, content, patience)
    finally:
        os.close(fd)


def _write_all(fd: int, content: bytes, patience: float) -> None:
    left = memoryview(content)
    ready = select.poll()
    ready.register(fd, select.POLLOUT)
    deadline = time.monotonic() + patience
    while left:
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise OSError(f"its reader has taken nothing for {patience:g} s")
        try:
            # What poll promises a pipe that may block; a larger part would wait for its reader.
            left = left[os.write(fd, left[: select.PIPE_BUF]) :]
        except BlockingIOError:
            continue
        deadline = time.monotonic() + patience
