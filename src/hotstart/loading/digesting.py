"""Digests of the files of a load, taken while they arrive, on threads of their own.

A digest needs its file from the first byte to the last; what arrives out of order waits. Files whose
bytes pass through buffers that are used again (a GPU's) are read once more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from hotstart.checkpoint.base import ShardFile
from hotstart.checkpoint.wording import count
from hotstart.device import host
from hotstart.errors import HotstartError, ModelError, raise_all
from hotstart.loading.copying import Ranges
from hotstart.storage.checksums import Hasher
from hotstart.storage.digests import Expected
from hotstart.storage.disk_copy import about_copy
from hotstart.storage.source import Cancel, ReadCancelled, Source

_PIECE = 4 << 20


class Fronts:
    """How much of each file has arrived from its first byte on without a gap. Not thread-safe."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._arrived = {number: Ranges() for number in numbers}
        self._front = dict.fromkeys(self._arrived, 0)

    def add(self, file: int, begin: int, end: int) -> bool:
        """These bytes are there; returns whether the front moved. Other files are passed over."""
        if file not in self._front:
            return False
        low, high = self._arrived[file].add(begin, end)
        moved = low == 0 and high > self._front[file]
        if moved:
            self._front[file] = high
        return moved

    def of(self, file: int) -> int:
        """Bytes from the start of the file."""
        return self._front[file]


class Digesting:
    """Compares files with what is expected of them, by their number in ``files``."""

    def __init__(
        self,
        files: Sequence[ShardFile],
        expected: Mapping[int, Expected],
        memories: Sequence[memoryview],
        open_source: Callable[[ShardFile], Source],
    ) -> None:
        """``memories``: where each file arrives; none: it is read by ``open_source`` instead."""
        self._files = files
        self._expected = expected
        self._memories = memories
        self._open_source = open_source
        self._changed = threading.Condition()
        self._fronts = Fronts(expected)
        self._hashed = dict.fromkeys(expected, 0)
        self._errors: dict[int, HotstartError] = {}
        self._failure: BaseException | None = None
        self._cancel = threading.Event()
        self._todo = iter(sorted(expected))
        self._threads = [
            threading.Thread(target=self._run, name=f"digest-{n}", daemon=True)
            for n in range(min(host.cores(), len(expected)))
        ]

    def start(self) -> None:
        """Begin; the files are about to arrive."""
        for thread in self._threads:
            thread.start()

    def arrived(self, file: int, begin: int, end: int) -> None:
        """See :class:`hotstart.loading.follower.Follower`."""
        with self._changed:
            if self._fronts.add(file, begin, end):
                self._changed.notify_all()

    def needs(self, file: int, begin: int, end: int) -> bool:
        """Whether these bytes have not been hashed."""
        return end > self._hashed.get(file, end)

    def wrong(self) -> list[int]:
        """The files whose digests are not what they should be, as far as is known."""
        return sorted(self._errors)

    def confirm(self) -> None:
        """Block until all files are compared, once all have arrived.

        Raises ModelError for all that differ, and what reading a file raised.
        """
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        raise_all([self._errors[file] for file in sorted(self._errors)])

    def cancel(self) -> None:
        """Give up."""
        with self._changed:
            self._cancel.set()
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    file = next(self._todo, None)
                if file is None:
                    return
                self._compare(file)
        except ReadCancelled:
            pass
        except BaseException as error:
            self._failure = error
            self.cancel()

    def _compare(self, file: int) -> None:
        expected, shard = self._expected[file], self._files[file]
        if self._memories:
            pieces = self._as_it_arrives(file)
        else:
            pieces = pieces_of(self._open_source(shard), self._cancel)
        found = digest_of(pieces, expected.algorithm, expected.part)
        self._hashed[file] = shard.size
        if found != expected.digest:
            self._errors[file] = mismatch(shard, expected, found)

    def _as_it_arrives(self, file: int) -> Iterator[memoryview]:
        memory, size, at = self._memories[file], self._files[file].size, 0
        while at < size:
            with self._changed:
                while self._fronts.of(file) <= at and not self._cancel.is_set():
                    self._changed.wait()
                front = self._fronts.of(file)
            if self._cancel.is_set():
                raise ReadCancelled(self._files[file].path)
            while at < front:
                end = min(at + _PIECE, front)
                yield memory[at:end]
                self._hashed[file] = at = end


def agreement(expected: Iterable[Expected]) -> str:
    """``SHA-256 of 3 files as SHA256SUMS says``, and so on for each kind of digest."""
    of_kind: dict[str, list[str]] = {}
    for each in expected:
        of_kind.setdefault(each.label, []).append(each.origin)
    return "; ".join(
        f"{kind} of {count(len(origins), 'file')} as {', '.join(sorted(set(origins)))} says"
        for kind, origins in of_kind.items()
    )


def digest_of(pieces: Iterable[memoryview], algorithm: str = "sha256", part: int = 0) -> str:
    """In hexadecimal; ``part``: see :class:`hotstart.storage.checksums.Hasher`."""
    total = Hasher(algorithm, part)
    for piece in pieces:
        total.update(piece)
    return total.hexdigest()


def pieces_of(source: Source, cancel: Cancel) -> Iterator[memoryview]:
    """A source from beginning to end, each piece valid until the next; closes it."""
    try:
        buffer = memoryview(bytearray(min(_PIECE, source.size)))
        for at in range(0, source.size, _PIECE):
            part = buffer[: min(_PIECE, source.size - at)]
            source.read_into(part, at, cancel)
            yield part
        source.verify()
    finally:
        source.close()


def mismatch(file: ShardFile, expected: Expected, found: str) -> ModelError:
    """The error for a file whose digest is another than what was expected of it."""
    if about_copy(file.path) is not None:
        advice = "This copy is damaged and removed now: start again, and the file comes from the store"
    elif expected.recorded:
        advice = (
            "Its bytes changed while its size, date and ETag did not: look for errors of the disk, "
            "the memory or the network, and copy the file again"
        )
    elif expected.stored:
        advice = (
            "The object is damaged in the store, or was on the way here: start again, and if it happens "
            "again upload the file anew; or publish a SHA256SUMS beside it, which goes first"
        )
    else:
        origin = os.path.basename(expected.origin)
        advice = f"The file is damaged, or {origin} belongs to another one: copy both again"
    return ModelError(
        f"{file.path} has the {expected.label} {found}",
        expected=f"{expected.digest}, by {expected.origin}",
        advice=advice,
    )
