"""Why a path cannot be read, in words an operator can act on."""

from __future__ import annotations

import errno
import os
import stat

from hotstart.errors import HotstartError, ModelError, StorageError


def check_directory(path: str) -> None:
    """Raise StorageError unless every parent may be searched and the directory listed and searched."""
    if (blocked := _first_without_search(os.path.join(path, "entry"))) is not None:
        raise _no_search(path, blocked, doing="open files in")
    try:
        with os.scandir(path) as entries:
            next(entries, None)
    except OSError as error:
        raise read_error(path, error, doing="list") from None


def read_exactly(fd: int, length: int, offset: int) -> bytes:
    """``length`` bytes from ``offset`` on. Raises OSError, also when the file ends before."""
    parts = []
    while length:
        part = os.pread(fd, length, offset)
        if not part:
            raise OSError(errno.ENODATA, "the file shrank while it was read")
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return b"".join(parts)


def read_error(path: str, error: OSError, *, doing: str = "read", offset: int | None = None) -> HotstartError:
    """The error for ``OSError`` on a path; refusals name the uid, the owner, the mode and the component."""
    if error.errno in (errno.EACCES, errno.EPERM):
        if (blocked := _first_without_search(path)) is not None:
            return _no_search(path, blocked, doing=doing)
        return StorageError(
            f"Cannot {doing} {path}: {who()} has no permission ({owner(path)})",
            expected="read permission (r)",
            advice=f"Run chmod o+r {path}, or run as its owner or group",
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        advice = ""
        if os.path.islink(path):
            target = os.readlink(path)
            advice = f"It is a symbolic link to {target}, which is absent here: mount or copy the target too"
        return ModelError(f"{path} does not exist", advice=advice)
    if error.errno == errno.ELOOP:
        return ModelError(f"{path} is a symbolic link that leads to itself", advice="Replace it by the file")
    at = "" if offset is None else f" at byte {offset}"
    return StorageError(
        f"Cannot {doing} {path}{at}: {error.strerror or type(error).__name__}",
        advice=_ADVICE.get(error.errno or 0, "Look for the device's errors in the kernel log (dmesg)"),
    )


def who() -> str:
    """``uid 1000 (groups 27, 1000)`` of this process."""
    groups = sorted({os.getegid(), *os.getgroups()})
    return f"uid {os.geteuid()} (groups {', '.join(map(str, groups))})"


def owner(path: str) -> str:
    """``owner 0:0, mode drwx------``."""
    try:
        status = os.stat(path)
    except OSError:
        return "owner unknown"
    return f"owner {status.st_uid}:{status.st_gid}, mode {stat.filemode(status.st_mode)}"


def _first_without_search(path: str) -> str | None:
    """The first directory above the path that this process may not search."""
    parts = os.path.abspath(path).split(os.sep)
    for end in range(1, len(parts)):
        directory = os.sep.join(parts[:end]) or os.sep
        if os.path.isdir(directory) and not os.access(directory, os.X_OK, effective_ids=True):
            return directory
    return None


def _no_search(path: str, blocked: str, *, doing: str) -> StorageError:
    return StorageError(
        f"Cannot {doing} {path}: {who()} may not search the directory {blocked} ({owner(blocked)})",
        expected="search permission (x) on it and on every directory above",
        advice=f"Run chmod o+x {blocked}, or run as a user or group that may",
    )


_GONE = "The file system was unmounted, or its helper process (FUSE) is gone: mount it again"
_ADVICE = {
    errno.ESTALE: "The file was replaced on the server while open: start again; replace files by rename",
    errno.ENOTCONN: _GONE,
    errno.ECONNABORTED: _GONE,
    errno.ETIMEDOUT: "The file server does not answer: check the network and the server",
    errno.ENODATA: "Wait until the copy into this directory is complete",
    errno.EHOSTDOWN: "The file server is down",
    errno.EMFILE: "Too many files are open: raise the limit (ulimit -n)",
}
