"""Directories that go with the process, however it ends.

Purpose: files for which there is no cache, and which libraries want to open by their names.
Safety: a directory is locked by the process that made it; the kernel takes the lock away with the
process. It is never the working directory, which may be anything.
Failure: what a killed process left is removed by the next one that makes a directory.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress

from hotstart.errors import StorageError

_OWNED: list[str] = []


def temporary_directory(prefix: str) -> str:
    """An empty directory for this user alone. Raises StorageError when none can be made."""
    tried = [place for place in (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", "/dev/shm") if place]
    for place in filter(os.path.isabs, tried):
        with suppress(OSError):
            _remove_abandoned(place, prefix)
            directory = tempfile.mkdtemp(prefix=prefix, dir=place)
            lock(directory)  # held until the process ends
            _OWNED.append(directory)
            return directory
    raise StorageError(
        f"No temporary directory can be made in {', '.join(tried)}",
        expected="one of them to be writable, where there is no cache",
        advice="Pass a writable directory by --cache-root, or mount an empty one at /tmp",
    )


@atexit.register
def remove_temporary() -> None:
    """Remove the directories of this process now; for who ends it without the interpreter's own end."""
    while _OWNED:
        shutil.rmtree(_OWNED.pop(), ignore_errors=True)


def _remove_abandoned(place: str, prefix: str) -> None:
    with os.scandir(place) as entries:
        left = [
            entry.path
            for entry in entries
            if entry.name.startswith(prefix)
            and entry.is_dir(follow_symlinks=False)
            and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        ]
    for path in left:
        with suppress(OSError):
            fd = lock(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)


def lock(directory: str) -> int:
    """The descriptor that holds a directory's lock. Raises OSError where another process has it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd
