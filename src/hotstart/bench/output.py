"""The files that a benchmark is to write, looked at before it has run for an hour."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hotstart.errors import StorageError, raise_all


def check_outputs(files: Mapping[str, object]) -> None:
    """Raise ``StorageError`` for a file, by the flag that names it, that could not be written in the end."""
    raise_all([problem for flag, path in files.items() if path for problem in _problems(flag, str(path))])


def _problems(flag: str, path: str) -> list[StorageError]:
    if os.path.isdir(path):
        return [StorageError(f"{flag} {path} is a directory", expected="a file")]
    # A regular file is replaced, which asks for its directory; a pipe or a terminal is written to.
    places = [path, os.path.dirname(os.path.realpath(path))]
    if any(os.access(place, os.W_OK) for place in places):
        return []
    return [
        StorageError(
            f"{flag} {path} cannot be written",
            advice="name a file in a directory that exists and is writable",
        )
    ]
