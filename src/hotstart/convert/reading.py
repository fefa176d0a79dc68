"""Stored bytes in order, read ahead by several threads within a bound of memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from hotstart.checkpoint.base import Checkpoint
from hotstart.convert.planned import Chunk, Columns, Constant, Interleaved, Planned, chunks
from hotstart.storage.source import Source

Write = Callable[[int, "memoryview | bytes"], None]
"""Takes the next bytes of a rank."""

READERS = 4
_CHUNK = 16 << 20
_SMALLEST = 64 << 10
_CONSTANTS = 1 << 20


class Reader:
    """``with Reader(checkpoint, limit) as reader: reader.deliver(tensor, write)``.

    ``limit``: bytes that may be in flight, beyond which only a matrix row is ever read. ``readers``:
    threads; one reads everything in order.
    """

    def __init__(self, checkpoint: Checkpoint, limit: int, readers: int = READERS) -> None:
        assert checkpoint.folder is not None
        self._checkpoint = checkpoint
        self._folder = checkpoint.folder
        self._most = max(_SMALLEST, min(_CHUNK, limit // (READERS + 2)))
        self._ahead = max(1, limit // self._most - 2)  # one is handed over, and may be cut into another
        self._sources: dict[int, Source] = {}
        self._cancel = threading.Event()
        self._pool = ThreadPoolExecutor(min(readers, self._ahead), thread_name_prefix="convert")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._cancel.set()
        self._pool.shutdown(cancel_futures=True)
        for source in self._sources.values():
            source.close()

    def deliver(
        self,
        tensors: Sequence[Planned],
        write: Callable[[Planned], Write],
        whole: Callable[[Planned], None] = lambda tensor: None,
    ) -> None:
        """Read what ``tensors`` are made of, in order.

        ``write`` is asked for each of them before its first byte, ``whole`` is told after its last.
        Raises StorageError.
        """
        arriving = self._arriving(chunk for tensor in tensors for chunk in self._chunks_of(tensor))
        for tensor in tensors:
            take = write(tensor)
            for piece in tensor.pieces:
                if isinstance(piece, Constant):
                    _repeat(piece, take)
                    continue
                several = len(piece.refs) if isinstance(piece, Interleaved) else 1
                for place, _ in enumerate(chunks(piece, self._most)):
                    if place % several == 0:
                        _hand_over([next(arriving) for _ in range(several)], take)
            whole(tensor)

    def _chunks_of(self, tensor: Planned) -> Iterator[Chunk]:
        for piece in tensor.pieces:
            yield from chunks(piece, self._most)

    def _arriving(self, wanted: Iterator[Chunk]) -> Iterator[tuple[Chunk, memoryview]]:
        """Chunks in order with their bytes; a few are on their way."""
        reading: deque[tuple[Chunk, Future[memoryview]]] = deque()
        for chunk in wanted:
            reading.append((chunk, self._pool.submit(self._read, chunk, self._source(chunk.file))))
            if len(reading) >= self._ahead:
                first, future = reading.popleft()
                yield first, future.result()
        while reading:
            first, future = reading.popleft()
            yield first, future.result()

    def _read(self, chunk: Chunk, source: Source) -> memoryview:
        buffer = memoryview(bytearray(chunk.nbytes))
        source.read_into(buffer, chunk.offset, self._cancel)
        return buffer

    def _source(self, file: int) -> Source:
        source = self._sources.get(file)
        if source is None:
            source = self._sources[file] = self._folder.source(self._checkpoint.files[file])
        return source


def _hand_over(arrived: Sequence[tuple[Chunk, memoryview]], write: Write) -> None:
    chunk, data = arrived[0]
    piece = chunk.piece
    if isinstance(piece, Interleaved):
        rows = chunk.nbytes // (piece.refs[0].nbytes // piece.rows)
        write(0, _interleave([part for _, part in arrived], rows))
        return
    if not isinstance(piece, Columns):
        for rank in piece.ranks:
            write(rank, data)
        return
    rows = chunk.nbytes // piece.pitch
    for rank, (start, width) in enumerate(piece.cuts):
        out = bytearray(rows * width)
        for row in range(rows):
            begin = row * piece.pitch + start
            out[row * width : (row + 1) * width] = data[begin : begin + width]
        write(rank, memoryview(out))


def _interleave(parts: Sequence[memoryview], rows: int) -> memoryview:
    """The first row of each part, then the second of each, and so on."""
    widths = [len(part) // rows for part in parts]
    out, at = bytearray(rows * sum(widths)), 0
    for row in range(rows):
        for part, width in zip(parts, widths, strict=True):
            out[at : at + width] = part[row * width : (row + 1) * width]
            at += width
    return memoryview(out)


def _repeat(piece: Constant, write: Write) -> None:
    most = max(1, _CONSTANTS // len(piece.value))
    for done in range(0, piece.times, most):
        data = piece.value * min(most, piece.times - done)
        for rank in piece.ranks:
            write(rank, data)
