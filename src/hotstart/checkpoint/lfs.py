"""Pointer stubs of git's large-file storage, which stand where the real file should be."""

from __future__ import annotations

import re

from hotstart.errors import ModelError
from hotstart.units import format_size

MAX_STUB = 1024
"""The specification bounds a pointer file to this many bytes."""

_FIRST = b"version https://git-lfs.github.com/spec/"
_SIZE = re.compile(rb"^size (\d{1,19})$", re.MULTILINE)


def stub_error(path: str, head: bytes) -> ModelError | None:
    """The error for a file that begins with ``head``, when it is a stub.

    Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
    """
    if not head.startswith(_FIRST):
        return None
    match = _SIZE.search(head[:MAX_STUB])
    true_size = f"a file of {int(match[1])} bytes ({format_size(int(match[1]))})" if match else "the file"
    return ModelError(
        f"{path} is a pointer stub of git large-file storage, not the file itself",
        expected=true_size,
        advice="Copied by git: run `git lfs install && git lfs pull` in the clone. Synced from a bucket: "
        "the stub was uploaded there, so pull in the clone that it came from and sync again",
    )
