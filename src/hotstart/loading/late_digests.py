"""Digests that no start waits for: of files as they lie in memory, at idle priority.

Purpose: a damaged file is found although nobody paid for it before the first token; it is named in the
log, and the server goes on. A file without a digest gets a record that the next start compares.
How: in pieces, whenever whoever owns the thread says so, mostly once the model answers. Nothing is
read for it: files whose memory was needed meanwhile are passed over, which is said.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from hotstart.checkpoint.base import ShardFile
from hotstart.checkpoint.wording import count
from hotstart.errors import HotstartError
from hotstart.loading.digesting import Fronts, agreement, mismatch, pieces_of
from hotstart.storage.checksums import Hasher
from hotstart.storage.digests import Expected
from hotstart.storage.source import Cancel, Source
from hotstart.units import format_seconds

_PIECE, _PIECES = 4 << 20, 16
"""Bytes hashed at once, and how many of them without a pause."""


class LateDigests:
    """Compares and records. All but :meth:`arrived` and :meth:`needs` run on one thread."""

    def __init__(
        self,
        files: Sequence[ShardFile],
        numbers: set[int],
        memories: Sequence[memoryview],
        *,
        find: Callable[[], Mapping[int, Expected]],
        record: Callable[[int, str], None],
        open_source: Callable[[ShardFile], Source],
        say: Callable[[int, str], None],
    ) -> None:
        """``numbers`` of ``files`` are looked at; without ``memories`` they are read once more.

        ``find`` gives the digests that are known, ``record`` keeps one that was found and may raise
        OSError.
        """
        self._files = files
        self._todo = set(numbers)
        self._wanted = len(numbers)
        self._memories = memories
        self._find, self._record, self._open_source, self._say = find, record, open_source, say
        self._lock = threading.Lock()
        self._fronts = Fronts(numbers)
        self._hashed = dict.fromkeys(numbers, 0)
        self._steps = self._work()
        self._seconds = 0.0
        self.wrong: list[int] = []
        """Files whose digests are not what they should be."""

    def arrived(self, file: int, begin: int, end: int) -> None:
        """See :class:`hotstart.loading.follower.Follower`."""
        with self._lock:
            self._fronts.add(file, begin, end)

    def needs(self, file: int, end: int) -> bool:
        """Whether bytes of a file's memory before ``end`` have not been hashed."""
        return bool(self._memories) and file in self._todo and end > self._hashed[file]

    def lose(self, file: int) -> None:
        """The file's memory is needed: it is passed over."""
        self._todo.discard(file)

    def run(self, stop: Cancel, pause: Callable[[], None] = lambda: None) -> None:
        """Go on until ``stop``, or until what comes next has not arrived. ``pause`` is called in between."""
        began = time.monotonic()
        try:
            for number, hashed in enumerate(self._steps, 1):
                if stop.is_set() or not hashed:
                    return
                if number % _PIECES == 0:
                    pause()
        except HotstartError as error:
            self._say(logging.WARNING, f"digests: not compared: {error}")
        finally:
            self._seconds += time.monotonic() - began
        self._todo.clear()

    def _work(self) -> Iterator[bool]:
        """True after each piece, False when the next one has not arrived."""
        wanted = sorted(self._todo)
        expected = self._find() if wanted else {}
        agreed: list[Expected] = []
        recorded = 0
        for number in wanted:
            want = expected.get(number)
            hasher = Hasher(want.algorithm, want.part) if want else Hasher("sha256")
            yield from self._hash(number, hasher)
            if number not in self._todo:
                continue
            self._todo.discard(number)
            found = hasher.hexdigest()
            if want is None:
                recorded += self._kept(number, found)
            elif found == want.digest:
                agreed.append(want)
            else:
                self._tell_wrong(number, want, found)
        self._tell(agreed, recorded)

    def _hash(self, number: int, hasher: Hasher) -> Iterator[bool]:
        file = self._files[number]
        if not self._memories:
            for piece in pieces_of(self._open_source(file), _NEVER):
                hasher.update(piece)
                yield True
            return
        at = 0
        while at < file.size and number in self._todo:
            end = min(at + _PIECE, self._fronts.of(number))
            if end > at:
                hasher.update(self._memories[number][at:end])
                self._hashed[number] = end
            yield end > at
            at = max(at, end)

    def _kept(self, number: int, found: str) -> bool:
        try:
            self._record(number, found)
        except OSError as error:
            self._say(logging.WARNING, f"digests: not recorded: {error.strerror or error}")
            self._todo.clear()
            return False
        return True

    def _tell_wrong(self, number: int, want: Expected, found: str) -> None:
        self.wrong.append(number)
        error = mismatch(self._files[number], want, found)
        self._say(
            logging.ERROR,
            f"digests: {error.found}; expected {error.expected}: this server answers from damaged weights. "
            f"{error.advice}",
        )

    def _tell(self, agreed: Sequence[Expected], recorded: int) -> None:
        if agreed:
            self._say(
                logging.INFO,
                f"digests: {agreement(agreed)}, compared in {format_seconds(self._seconds)} at idle priority",
            )
        if recorded:
            files = count(recorded, "file")
            self._say(logging.INFO, f"digests: SHA-256 of {files} recorded; the next start compares them")
        left = self._wanted - len(agreed) - recorded - len(self.wrong)
        if left:
            self._say(
                logging.INFO,
                f"digests: {count(left, 'file')} of {self._wanted} passed over: the memory was needed before",
            )


class _Never:
    def is_set(self) -> bool:
        return False


_NEVER = _Never()
