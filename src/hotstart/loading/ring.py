"""Files to device memory through small pinned buffers that are used again and again.

Each thread owns a stream and a few buffers: it reads the next chunk of a file into one while the
device copies from the others. Nothing here needs torch, so all of it runs while torch is imported.

Why these numbers: 8 threads with 2 buffers of 8 MiB moved 28 to 30 GB/s from the page cache to an
H200, and more threads or larger buffers were slower. Reads are whole buffers wherever the storage is
fast (:mod:`hotstart.loading.pace`), since every read gives up the interpreter lock and asks for it
again, which many small ones would make a concurrent import pay for.

Files are read through the page cache or past it as :mod:`hotstart.loading.choice` has it for all
readers. Past it, addresses, offsets and lengths are multiples of a page while tensors begin anywhere:
the pages around a chunk are read, and copies begin inside. Chunks end at page boundaries, so a buffer
is never too small for that.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from hotstart.checkpoint.base import Checkpoint, TensorRef
from hotstart.device import host
from hotstart.device.base import HostBuffer
from hotstart.errors import EngineError, HotstartError, StorageError
from hotstart.loading.arena import Arena
from hotstart.loading.choice import Choice, choose_for_gpu, describe
from hotstart.loading.flow import Flow
from hotstart.loading.opened import Opened, begin_trial
from hotstart.loading.pace import Pace
from hotstart.loading.stats import stats_of
from hotstart.loading.tally import LoadReport, Tally
from hotstart.loading.watch import Watch
from hotstart.messages import LoadStats
from hotstart.storage.source import ReadCancelled, Source
from hotstart.units import format_size

THREADS = 8
DISTANT_FIRST, DISTANT_THREADS, DISTANT_BUFFERS = 8, 32, 1
"""Of an object store, whose ranges take long: readers at first and at most, and buffers of each."""
BUFFERS = 2
BUFFER_BYTES = 8 << 20
# Reading over a hole this small costs less than another read.
GAP = 64 << 10
_PAGE = 4096


class Copy(Struct, frozen=True):
    """A piece of a chunk and its destination."""

    at: int
    """Offset inside the chunk."""
    dst: int
    nbytes: int


class Chunk(Struct, frozen=True):
    """One read, at most a buffer long."""

    file: int
    offset: int
    nbytes: int
    copies: tuple[Copy, ...]


class Loading:
    """A load under way; its threads run from the constructor on.

    ``progress`` is called with the file bytes read so far out of :attr:`total`: see
    :class:`~hotstart.loading.tally.Tally`.
    ``choices``: how each file of the checkpoint is read; None: as
    :func:`~hotstart.loading.choice.choose_for_gpu` finds now.
    ``first``: readers at first, where more are to be tried while the load goes on; None: all ``threads``.
    ``buffer_bytes``: of each buffer, whole pages.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        arena: Arena,
        *,
        choices: Sequence[Choice] | None = None,
        threads: int = THREADS,
        first: int | None = None,
        buffers: int = BUFFERS,
        buffer_bytes: int = BUFFER_BYTES,
        patience: float = 60.0,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        if buffer_bytes % _PAGE:
            raise ValueError(f"buffers of {buffer_bytes} bytes; whole pages of {_PAGE} are needed")
        targets = [(part.ref, arena.address(part)) for part in arena.layout.parts]
        self._chunks = plan_chunks(targets, buffer_bytes)
        self._device = arena.device
        self._buffers, self._buffer_bytes = buffers, buffer_bytes
        distant = any(not os.path.isabs(file.path) for file in checkpoint.files)
        self._pace = Pace(buffer_bytes, distant=distant)
        self._flow = Flow(first or threads, threads) if distant else Flow.of_files()
        self._checkpoint = checkpoint
        self.choices = list(choose_for_gpu(checkpoint.files) if choices is None else choices)
        """For each file, how it was to be read; see :meth:`describe` for how it was."""
        self.total = sum(chunk.nbytes for chunk in self._chunks)
        self._files = self._open()
        self._waiting = deque(_Work(chunk) for chunk in self._chunks)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._slots: list[_Slot] = []
        self._hanging: set[threading.Thread] = set()
        """Readers that never came back from a read; another one does the work of each."""
        # A read of an object store has a patience of its own.
        patience = float("inf") if distant else patience
        self._watch: Watch[_Work] = Watch(patience, self._take_over, self._give_up)
        self._given_up = False
        self._streams: list[int] = []
        self._tally = Tally(self.total, progress)
        self._threads = [
            threading.Thread(target=self._run, name=f"reader-{n}", daemon=True)
            for n in range(min(threads, len(self._chunks)))
        ]
        self._trial = begin_trial(list(self._files.values()), len(self._threads))
        self._watch.start()
        for thread in self._threads:
            thread.start()

    def wait(self) -> LoadReport:
        """Block until all bytes are in device memory.

        Raises the first reader's error: StorageError for a file, also for one that was written to
        meanwhile, DeviceError for the device, EngineError after :meth:`cancel`.
        """
        self._join()
        self._run_copies()
        self._close_files()
        if self._errors:
            raise self._errors[0]
        if self._tally.done < self.total:
            raise EngineError(
                f"loading was cancelled after {format_size(self._tally.done)} of {format_size(self.total)}"
            )
        return self._tally.report()

    def stats(self) -> LoadStats:
        """What was read, for the metrics."""
        return stats_of(self._checkpoint, self.choices, self._tally, taken_over=self._watch.taken_over)

    def describe(self) -> str:
        """Strategies and reasons, for the log."""
        return f"{describe(self.choices)}, through a ring of pinned memory"

    def cancel(self) -> None:
        """Let the readers end after the chunk they are at."""
        self._stop.set()

    def close(self) -> None:
        """Cancel what still runs and give the buffers back.

        Freeing pinned memory waits for the device: after a start, call it when the device is idle.
        After a read that hung twice nothing is given back: the kernel may still write there.
        """
        self.cancel()
        self._join()
        self._run_copies()
        self._close_files()
        if self._given_up:
            return
        while self._slots:
            slot = self._slots.pop()
            self._device.destroy_event(slot.event)
            self._device.unpin(slot.buffer)
        while self._streams:
            self._device.destroy_stream(self._streams.pop())

    def _run(self) -> None:
        device = self._device
        try:
            device.attach()
            stream = device.stream()
            with self._lock:
                self._streams.append(stream)
            self._read_chunks(stream)
        except ReadCancelled:
            pass
        except BaseException as error:
            self._fail(error)

    def _run_copies(self) -> None:
        """Wait for what the readers left to the device, those that never came back too.

        Also after a failure: copies may still be reading from our buffers. The readers leave it to
        whoever waits for them, for one that comes back late may find its stream gone.
        """
        with self._lock:
            streams = list(self._streams)
        try:
            if self._slots or streams:
                self._device.attach()
            for stream in streams:
                self._device.synchronize(stream)
        except HotstartError as error:
            self._fail(error)

    def _read_chunks(self, stream: int) -> None:
        device = self._device
        slots: list[_Slot] = []
        for turn in range(len(self._chunks)):
            if self._stop.is_set():
                return
            try:
                work = self._waiting.popleft()
            except IndexError:
                return
            chunk = work.chunk
            if turn < self._buffers:
                slots.append(self._slot())
            slot = slots[turn % self._buffers]
            if not device.done(slot.event):
                device.wait(slot.event)
            with self._flow.reading(chunk.nbytes):
                lead = self._bring(work, slot)
            if lead is None:
                # Whoever waits for the load must find either this thread or the one that goes on.
                while not (work.taken_over.wait(0.1) or self._stop.is_set()):
                    pass
                return
            for copy in chunk.copies:
                device.copy(copy.dst, slot.buffer.address + lead + copy.at, copy.nbytes, stream)
            device.record(slot.event, stream)

    def _slot(self) -> _Slot:
        slot = _Slot(self._device.pinned(self._buffer_bytes), self._device.event())
        with self._lock:
            self._slots.append(slot)
        return slot

    def _bring(self, work: _Work, slot: _Slot) -> int | None:
        """Read a chunk into a buffer; at which byte of it the chunk begins.

        None: another reader has taken it over meanwhile.
        """
        chunk, trial = work.chunk, self._trial
        file = self._files[chunk.file]
        way, turn = file.way(chunk.offset, chunk.nbytes), None
        if trial is not None and file.tried:
            way, turn = trial.next()
        work.thread, work.slot = threading.current_thread(), slot
        try:
            read = self._fill(work, slot, file.source(way), way)
        except StorageError:
            # Memory that a driver has pinned, and disks of large blocks, may not suit. If it is the
            # file that is at fault, the error is that of the other way.
            if way != "direct" or not file.refuse():
                raise
            read, turn = self._fill(work, slot, file.source("buffered"), "buffered"), None
        if read is None:
            return None
        lead, seconds = read
        if turn is not None and trial is not None and trial.took(turn, chunk.nbytes, seconds):
            for each in self._files.values():
                each.heed(trial)
        return lead

    def _fill(self, work: _Work, slot: _Slot, source: Source, way: str) -> tuple[int, float] | None:
        """Read the blocks of a chunk: at which byte of them it begins, and the seconds spent reading."""
        chunk, align = work.chunk, source.align
        lead = chunk.offset % align
        begin, length = chunk.offset - lead, -(-(lead + chunk.nbytes) // align) * align
        reading = self._watch.begin(work, source.name, begin, attempt=work.attempt)
        done, seconds = 0, 0.0
        try:
            while done < length:
                began = time.monotonic()
                step = max(align, self._pace.length // align * align)
                part = slot.buffer.view[done : min(done + step, length)]
                source.read_into(part, begin + done, self._stop)
                done += len(part)
                took = time.monotonic() - began
                seconds += took
                self._pace.took(took)
                if not self._watch.moved(reading, begin + done):
                    return None
                come = min(max(done - lead, 0), chunk.nbytes)
                self._tally.add(max(0, come - work.counted), took, chunk.file, way)
                work.counted = max(work.counted, come)
        except (OSError, HotstartError):
            if self._watch.moved(reading, begin + done):
                raise
            return None  # another reader has the chunk: how this read ended says nothing of it
        finally:
            self._watch.finish(reading)
        return lead, seconds

    def _take_over(self, work: _Work, offset: int, attempt: int) -> None:
        """Read a chunk again whose reader hangs: on another thread, descriptor and buffer."""
        thread = threading.Thread(
            target=self._read_again, args=(work, attempt), name="reader-again", daemon=True
        )
        with self._lock:
            if work.slot in self._slots:
                self._slots.remove(work.slot)  # the kernel may still write there: it is never given back
            # It runs before the other counts as hanging: the load has not ended in between.
            thread.start()
            self._threads.append(thread)
            if work.thread is not None:
                self._hanging.add(work.thread)
        work.taken_over.set()

    def _read_again(self, work: _Work, attempt: int) -> None:
        # Where storage gives nothing, opening a file may take for ever too.
        number = work.chunk.file
        opening = self._watch.begin(work, self._files[number].name, work.chunk.offset, attempt=attempt)
        try:
            self._files[number] = self._files[number].again()
        except BaseException as error:
            self._fail(error)
            return
        finally:
            self._watch.finish(opening)
        self._waiting.appendleft(_Work(work.chunk, attempt=attempt, counted=work.counted))
        self._run()

    def _join(self) -> None:
        """Wait for the readers that can come back."""
        for thread in self._threads:  # it may grow meanwhile
            while thread.is_alive() and thread not in self._hanging and not self._given_up:
                thread.join(0.1)
        self._watch.end()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._errors.append(error)
        self._stop.set()

    def _give_up(self, error: BaseException) -> None:
        self._given_up = True
        self._fail(error)

    def _open(self) -> dict[int, Opened]:
        folder = self._checkpoint.folder
        assert folder is not None
        files: dict[int, Opened] = {}
        tight = host.memory().available < self.total
        try:
            for index in sorted({chunk.file for chunk in self._chunks}):
                files[index] = file = Opened(folder, self._checkpoint.files[index], self.choices[index])
                if tight:
                    file.drop_behind()
        except BaseException:
            for file in files.values():
                file.close()
            raise
        return files

    def _close_files(self) -> None:
        """Compare each file with what was opened, once, when no thread reads any more; close it."""
        with self._lock:
            while self._files:
                number, file = self._files.popitem()
                self.choices[number] = file.choice
                try:
                    file.verify()
                except StorageError as error:
                    self._errors.append(error)
                file.close()


class _Slot(Struct, frozen=True):
    buffer: HostBuffer
    event: int


@dataclass
class _Work:
    """A chunk on its way to a reader."""

    chunk: Chunk
    attempt: int = 1
    counted: int = 0
    """Bytes of it that the tally has."""
    thread: threading.Thread | None = None
    slot: _Slot | None = None
    taken_over: threading.Event = field(default_factory=threading.Event)


def plan_chunks(
    targets: Iterable[tuple[TensorRef, int]], chunk_bytes: int = BUFFER_BYTES, gap: int = GAP
) -> list[Chunk]:
    """Cut the tensors' ranges into reads, in file order.

    ``targets`` pairs a stored tensor with the address of its first byte. Neighbours, and tensors
    less than ``gap`` bytes apart, share reads; reads end at page boundaries; no byte is read twice.
    """
    chunks: list[Chunk] = []
    run: list[tuple[TensorRef, int]] = []
    end = 0
    for ref, dst in sorted(targets, key=lambda target: (target[0].file, target[0].offset)):
        if ref.nbytes == 0:
            continue
        if run and (ref.file != run[0][0].file or ref.offset - end > gap):
            _cut(run, end, chunk_bytes, chunks)
            run = []
        end = max(end, ref.offset + ref.nbytes) if run else ref.offset + ref.nbytes
        run.append((ref, dst))
    if run:
        _cut(run, end, chunk_bytes, chunks)
    return chunks


def _cut(run: list[tuple[TensorRef, int]], end: int, chunk_bytes: int, chunks: list[Chunk]) -> None:
    position, first = run[0][0].offset, 0
    while position < end:
        stop = min(end, (position + chunk_bytes) // _PAGE * _PAGE)
        while run[first][0].offset + run[first][0].nbytes <= position:
            first += 1
        copies: list[Copy] = []
        for index in range(first, len(run)):
            ref, dst = run[index]
            if ref.offset >= stop:
                break
            begin, limit = max(ref.offset, position), min(ref.offset + ref.nbytes, stop)
            if begin < limit:
                _append(copies, Copy(begin - position, dst + begin - ref.offset, limit - begin))
        chunks.append(Chunk(run[0][0].file, position, stop - position, tuple(copies)))
        position = stop


def _append(copies: list[Copy], copy: Copy) -> None:
    """Add a copy, joined to the previous one where both sides continue it."""
    if copies:
        last = copies[-1]
        if last.at + last.nbytes == copy.at and last.dst + last.nbytes == copy.dst:
            copies[-1] = Copy(last.at, last.dst, last.nbytes + copy.nbytes)
            return
    copies.append(copy)
