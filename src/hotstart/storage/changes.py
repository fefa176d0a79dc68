"""Whether files are still what they were: the question when a mapped file has killed a process."""

from __future__ import annotations

import os
from collections.abc import Iterable

from msgspec import Struct

from hotstart.errors import StorageError


class FileState(Struct, frozen=True):
    """A file as it was seen."""

    path: str
    size: int
    mtime_ns: int


def note(paths: Iterable[str]) -> tuple[FileState, ...]:
    """The present state of files; absent ones are left out."""
    states = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            continue
        states.append(FileState(path, status.st_size, status.st_mtime_ns))
    return tuple(states)


def changed(before: Iterable[FileState]) -> list[StorageError]:
    """One error for each file that shrank, vanished or was written to since."""
    return [
        StorageError(
            f"{state.path} {how} while the server had it mapped",
            expected="weight files that stay as they are while they are served",
            advice="Replace a file by rename (mv), never in place; copy the model again, then start",
        )
        for state in before
        if (how := _how(state))
    ]


def _how(state: FileState) -> str:
    try:
        status = os.stat(state.path)
    except OSError as error:
        return f"cannot be looked at any more ({error.strerror})"
    if status.st_size < state.size:
        return f"shrank from {state.size} to {status.st_size} bytes"
    if status.st_size != state.size or status.st_mtime_ns != state.mtime_ns:
        return f"was written to (it had {state.size} bytes and has {status.st_size})"
    return ""
