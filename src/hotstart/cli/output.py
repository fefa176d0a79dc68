"""Standard output of commands that answer at once."""

from __future__ import annotations

import os
import sys

from hotstart.errors import StorageError


def say(text: str) -> None:
    """Print to standard output. Raises StorageError where it cannot be written, on a full disk."""
    try:
        print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_output()
        raise StorageError(
            f"standard output cannot be written: {error.strerror or error}",
            advice="make room on its disk, or send the output somewhere else",
        ) from None


def discard_output() -> None:
    """After a failure to write: what is left in the buffer would be written at exit, and fail once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
