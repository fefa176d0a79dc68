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

    @property
    def reserve(self) -> int:
        """How many are kept from connections."""
        return min(_RESERVE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)

    def refuse(self, number: int | None = None) -> bool:
        """Whether a new connection is one too many, which is counted and logged.

        ``number`` is its descriptor; None where that is not known, which costs a few system calls.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            return False
        # The kernel gives out the lowest free number, so a high one means that all below are taken.
        reserve = self.reserve
        if not (_reserve_is_used(limit, reserve) if number is None else number >= limit - reserve):
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


def _reserve_is_used(limit: int, reserve: int) -> bool:
    # Numbers below may be free again when one of the last is looked at, though not many.
    return _lowest_free() >= limit - 2 * reserve and any(map(_is_open, range(limit - reserve, limit)))


def _lowest_free() -> int:
    try:
        number = os.open(os.devnull, os.O_RDONLY)
    except OSError as error:
        return sys.maxsize if error.errno in (errno.EMFILE, errno.ENFILE) else 0
    os.close(number)
    return number


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
