"""When to ask again: after what, how soon, and until when.

A transient error never ends a start and a lasting one does, with its cause. The bound is progress,
not the number of attempts: storage that is slow but moves is asked for as long as it takes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

from hotstart.storage.source import Cancel, ReadCancelled

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 598, 599})
"""Status codes that may be gone a moment later."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
_LOOK = 0.25
"""Seconds between two looks at cancellation while waiting."""
_SILENCE = 0.25, 0.5
"""Shares of the patience for which the first and the second attempt wait for a byte; later ones: all."""


class TransientError(OSError):
    """An answer that may be another one soon. ``retry_after``: seconds that the server asked for.

    ``status``: of an answer that is no object; 0: what came was not what had been asked for.
    """

    def __init__(self, text: str, retry_after: float | None = None, status: int = 0) -> None:
        super().__init__(text)
        self.retry_after = retry_after
        self.status = status


class Persistence:
    """The attempts of one read. ``patience``: seconds without a byte after which it is given up."""

    def __init__(
        self,
        patience: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.failures = 0
        self._patience = patience
        self._clock = clock
        self._sleep = sleep
        self._last_progress = clock()
        self._pause = _FIRST_PAUSE
        self._in_vain = 0
        """Attempts since the last byte."""
        self._furthest = -1

    @property
    def stuck(self) -> float:
        """Seconds since the last byte."""
        return self._clock() - self._last_progress

    @property
    def silence(self) -> float:
        """Seconds that the attempt under way should wait for its next byte.

        Less than all the patience at first, so that a connection that died without a word leaves
        time for another; all of it later, since some storage takes its time for a first byte.
        """
        share = _SILENCE[self._in_vain] if self._in_vain < len(_SILENCE) else 1.0
        left = max(self._patience - self.stuck, min(1.0, self._patience))
        return min(share * self._patience, left)

    def progressed(self) -> None:
        """Bytes arrived."""
        self._last_progress = self._clock()
        self._pause = _FIRST_PAUSE
        self._in_vain = 0

    def reached(self, nbytes: int) -> None:
        """So much has arrived of what each attempt asks for from its beginning.

        Progress only where no attempt came as far: what always breaks at the same byte would never end.
        """
        if nbytes > self._furthest:
            self._furthest = nbytes
            self.progressed()

    def failed(self, error: OSError, cancel: Cancel) -> None:
        """Wait before the next attempt. Raises ``error`` when patience is at its end, or ReadCancelled."""
        self.failures += 1
        self._in_vain += 1
        left = self._patience - self.stuck
        if left <= 0:
            raise error
        asked = error.retry_after if isinstance(error, TransientError) else None
        # Full jitter: clients that failed together must not come back together.
        pause = self._pause * random.uniform(0.5, 1.0)
        if asked is not None:
            pause += asked
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        until = self._clock() + min(pause, left)
        while (rest := until - self._clock()) > 0:
            if cancel.is_set():
                raise ReadCancelled("waiting for another attempt")
            self._sleep(min(rest, _LOOK))


def retry_after(headers: Mapping[str, str], clock: Callable[[], float] = time.time) -> float | None:
    """Seconds that a server asks for by ``Retry-After``, a number or a date; None: it does not."""
    value = headers.get("retry-after", "")
    if value.isdecimal() and len(value) < 6:
        return float(value)
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - clock())
    except (TypeError, ValueError, OverflowError):
        return None
