"""Paths as people write them."""

from __future__ import annotations

import os

from hotstart.errors import StorageError


def absolute(path: str) -> str:
    """The path from the root, with ``~`` spelled out.

    Raises StorageError for a relative one when the working directory is gone.
    """
    try:
        return os.path.abspath(os.path.expanduser(path))
    except FileNotFoundError:
        raise StorageError(
            f"{path} is a relative path, and the working directory no longer exists",
            expected="a path from the root, or a working directory that is there",
            advice="cd to a directory that exists, or pass the whole path",
        ) from None
