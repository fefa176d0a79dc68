"""Reads of files that do not come back: noticed, tried once more, and given up with a name.

A read of a network file system or of a failing disk may sleep in the kernel for ever, and no call can
take it back. So the reader that made it is left alone: another one takes over its range on a new
descriptor. Storage that is slow but moves is never given up, since each read that ends counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from hotstart.errors import StorageError
from hotstart.units import format_seconds

log = logging.getLogger("hotstart.storage")

_LOOK_EVERY = 0.5
T = TypeVar("T")


class Reading(Generic[T]):
    """A range that one reader brings in, read by read."""

    def __init__(self, work: T, name: str, offset: int, *, attempt: int) -> None:
        self.work = work
        """What the owner needs to take it over."""
        self.name = name
        self.offset = offset
        """Of the read in flight."""
        self.attempt = attempt
        self.abandoned = False
        """Another reader has it now: whatever comes in late does not count."""
        self.since = 0.0


class Watch(Generic[T]):
    """Thread-safe. ``take_over`` gets the work, the offset it came to, and the attempt's number."""

    def __init__(
        self,
        patience: float,
        take_over: Callable[[T, int, int], None],
        fail: Callable[[BaseException], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``patience``: seconds that one read may take."""
        self._patience = patience
        self._take_over = take_over
        self._fail = fail
        self._clock = clock
        self._lock = threading.Lock()
        self._readings: set[Reading[T]] = set()
        self._ended = threading.Event()
        self.taken_over = 0
        """Reads that stood still and were made again."""

    def start(self) -> None:
        """Look regularly, on a thread of its own, until :meth:`end`."""
        threading.Thread(target=self._run, name="weights-watch", daemon=True).start()

    def end(self) -> None:
        """There is nothing more to watch."""
        self._ended.set()

    def begin(self, work: T, name: str, offset: int, *, attempt: int = 1) -> Reading[T]:
        """A reader begins with a range."""
        reading = Reading(work, name, offset, attempt=attempt)
        reading.since = self._clock()
        with self._lock:
            self._readings.add(reading)
        return reading

    def moved(self, reading: Reading[T], offset: int) -> bool:
        """A read has ended, the next begins at ``offset``. False: the range was taken over meanwhile."""
        with self._lock:
            if reading.abandoned:  # its offset stays where the other one begins
                return False
            reading.offset, reading.since = offset, self._clock()
            return True

    def finish(self, reading: Reading[T]) -> None:
        """The reader is done with the range, one way or the other."""
        with self._lock:
            self._readings.discard(reading)

    def look(self) -> None:
        """Take over what stands still; give up what stood still before."""
        now = self._clock()
        with self._lock:
            late = [r for r in self._readings if now - r.since > self._patience and not r.abandoned]
            for reading in late:
                reading.abandoned = True
        for reading in late:
            age = format_seconds(now - reading.since)
            if reading.attempt > 1:
                self._fail(
                    StorageError(
                        f"{reading.name} gave no byte at offset {reading.offset} for {age}, "
                        "and none on a new descriptor before",
                        advice="Look at the storage (dmesg, the file server, the network between); "
                        "if it is only slow, --storage-timeout allows more time",
                    )
                )
                return
            log.warning(
                "%s gives no byte at offset %d since %s: reading on with a new descriptor",
                reading.name,
                reading.offset,
                age,
            )
            self.taken_over += 1
            self._take_over(reading.work, reading.offset, reading.attempt + 1)

    def _run(self) -> None:
        try:
            while not self._ended.wait(min(_LOOK_EVERY, self._patience / 4)):
                self.look()
        except BaseException as error:  # no thread can be had: without a watch the load might never end
            self._fail(error)
