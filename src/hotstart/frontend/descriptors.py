"""The open files of this process: some are kept from connections, and who is refused is said aloud."""

from __future__ import annotations

import errno
import logging
import os
import resource
import sys
import time

from hotstart.checkpoint.wording import count

log = logging.getLogger("hotstart.http")

_RESERVE = 32
"""Descriptors kept from connections, at most; files, pipes and DNS need some at any time."""
_WARN_SECONDS = 10.0


class Descriptors:
    """At the limit itself accepting fails, and the event loop drops connections without a word."""

    def __init__(self) -> None:
        self._refused = 0
        self._warned = float("-inf")

    def refuse(self, number: int | None = None) -> bool:
        """Whether a new connection is one too many, which is counted and logged.

        ``number`` is its descriptor; None where that is not known, which costs opening a file.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            return False
        # The kernel gives out the lowest free number, so a high one means that all below are taken.
        if (_next_number() if number is None else number) < limit - min(_RESERVE, limit // 8):
            return False
        self._refused += 1
        if (now := time.monotonic()) - self._warned >= _WARN_SECONDS:
            log.warning(
                "refused %s: nearly all of the %d files that this process may have open "
                "are taken; raise the limit (ulimit -n), or have clients reuse connections",
                count(self._refused, "connection"),
                limit,
            )
            self._refused, self._warned = 0, now
        return True


def _next_number() -> int:
    try:
        number = os.open(os.devnull, os.O_RDONLY)
    except OSError as error:
        return sys.maxsize if error.errno in (errno.EMFILE, errno.ENFILE) else 0
    os.close(number)
    return number
