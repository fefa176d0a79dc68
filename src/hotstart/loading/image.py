"""Weights on CPU: each file's bytes at their own offsets, mapped or read into memory. Torch-free.

Safetensors bytes are final, so a tensor is a view of its file's image. A file whose pages are
resident is mapped: nothing is read, and a thread enters the pages into the page table while
imports run. A file that must come from a device is read into memory congruent to it, in parallel
and past the page cache where the file system allows it, unless the first steps of a large load
come faster through it (:mod:`hotstart.loading.trial`). Steps that lie in the page cache already
are copied from there.

While ``import torch`` runs, no call may hold the memory-map lock for long, or dlopen waits: every
step covers at most :data:`STEP` bytes (measured: one call over the whole range makes the import
two to seven times as long).
"""

from __future__ import annotations

import copy
import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable

from msgspec import Struct, structs

from hotstart.checkpoint.base import Checkpoint, ShardFile
from hotstart.checkpoint.folder import Folder
from hotstart.device import host
from hotstart.errors import StorageError
from hotstart.loading.choice import COLD, RESIDENT, ROOMY, Choice, choose_all, describe, in_flight
from hotstart.loading.flow import Flow
from hotstart.loading.follower import Follower, Nobody
from hotstart.loading.pace import Pace
from hotstart.loading.tally import LoadReport, Tally
from hotstart.loading.trial import TRIAL_FROM, Trial
from hotstart.loading.watch import Watch
from hotstart.storage.residency import resident_fraction
from hotstart.storage.source import FileSource, ReadCancelled, Source

STEP = 8 << 20
_MADV_POPULATE_READ = 22
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Image:
    """The images of all files of a checkpoint, filled by threads that :meth:`start` begins.

    ``progress``: see :class:`~hotstart.loading.tally.Tally`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        strategy: str = "auto",
        readers: int | None = None,
        patience: float = 60.0,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """``patience``: seconds without a byte after which a read is taken over, then given up."""
        self.checkpoint = checkpoint
        self.total = sum(file.size for file in checkpoint.files)
        self._tally = Tally(self.total, progress)
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._cancel = threading.Event()
        assert checkpoint.folder is not None
        folder = checkpoint.folder
        self._files = [
            _File(number, folder, file, choice)
            for number, (file, choice) in enumerate(
                zip(checkpoint.files, choose_all(checkpoint.files, strategy), strict=True)
            )
        ]
        if host.memory().available < ROOMY * self.total:
            for each in self._files:
                each.drop_behind()
        self._steps = self._plan()
        distant = any(file.choice.strategy == "ranges" for file in self._files)
        self._pace = Pace(STEP, distant=distant)
        first, most = in_flight(self.choices, readers)
        self._flow = Flow(first, min(most, len(self._steps))) if distant else Flow.of_files()
        self._threads = [
            threading.Thread(target=self._run, name=f"weights-{i}", daemon=True)
            for i in range(min(most, len(self._steps)))
        ]
        self._active = len(self._threads)
        self._ended = threading.Event()
        """All is there, or a reader failed, or none is left."""
        self._watch: Watch[_Step] = Watch(patience, self._take_over, self._fail)
        cold = sum(file.size for file in self._files if file.is_cold)
        self._trial = Trial(warm_up=len(self._threads)) if cold >= TRIAL_FROM else None
        self._when_done: Callable[[LoadReport], None] = lambda report: None
        self._closed = False
        self._follower: Follower = Nobody()

    def follow(self, follower: Follower) -> None:
        """Tell it of every part that arrives; before :meth:`start`."""
        self._follower = follower

    def start(self, done: Callable[[LoadReport], None] = lambda report: None) -> None:
        """Begin to read, once the checks have passed. ``done`` is called once all is there."""
        self._tally.start()
        self._when_done = done
        self._watch.start()
        for thread in self._threads:
            thread.start()

    @property
    def choices(self) -> list[Choice]:
        """For each file, how it is brought in and why."""
        return [file.choice for file in self._files]

    def wait(self) -> LoadReport:
        """Block until every byte is there; raises the first error of a reader, or ReadCancelled."""
        if self._threads:
            self._ended.wait()
        if self._errors:
            raise self._errors[0]
        if self._tally.done < self.total:
            raise ReadCancelled(self.checkpoint.path)
        for file in self._files:
            if not self._closed:
                file.source.verify()
        return self._tally.report()

    def describe(self) -> str:
        """Strategies and reasons, for the log: ``map (100% resident in the page cache)``."""
        return describe(self.choices)

    def cancel(self) -> None:
        """Stop the readers at their next step."""
        self._cancel.set()

    def close(self) -> None:
        """Close the files, once all is read; their images, mapped ones too, stay."""
        if not self._closed:
            self._closed = True
            for file in self._files:
                file.close()

    def is_mapped(self, file: int) -> bool:
        """Whether the file's pages, once released, come back when they are touched."""
        return self._files[file].choice.strategy == "map"

    def release(self, file: int, offset: int, nbytes: int) -> None:
        """Give back the whole pages inside a range that nobody reads any more."""
        begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end <= begin:
            return

        def give_back() -> None:
            self._files[file].memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)

        if not self._follower.keeps(file, begin, end, give_back):
            give_back()

    def memory(self, file: int) -> mmap.mmap:
        """The image of a file; writable, private to this process."""
        return self._files[file].memory

    def _plan(self) -> list[_Step]:
        """Steps in file order; files that are read come before files that are mapped."""
        steps = [
            _Step(file, offset, min(offset + STEP, file.size))
            for file in self._files
            for offset in range(0, file.size, STEP)
        ]
        steps.sort(key=lambda step: step.file.choice.strategy == "map")
        steps.reverse()
        return steps

    def _run(self) -> None:
        try:
            while not self._cancel.is_set() and self._one():
                pass
        except _TakenOverError:
            return  # another reader counts as this one since
        except BaseException as error:
            self._fail(error)
        self._leave()

    def _one(self) -> bool:
        """Take the next step; False when there is none."""
        with self._flow.reading(STEP):
            with self._lock:
                if not self._steps:
                    return False
                step = self._steps.pop()
            self._bring(step)
        return True

    def _bring(self, step: _Step) -> None:
        """Bring a step into memory, in reads that the storage answers in a fraction of a second."""
        file, way, sample = step.file, step.file.choice.strategy, False
        if self._trial is not None and file.is_cold:
            way, sample = self._trial.next()
        elif file.in_page_cache(step.offset, step.end - step.offset):
            way = "buffered"
        seconds = self._fill(step, step.offset, way)
        if sample and self._trial is not None and self._trial.took(way, step.end - step.offset, seconds):
            for each in self._files:
                each.heed(self._trial)

    def _fill(self, step: _Step, offset: int, way: str, *, attempt: int = 1) -> float:
        """Returns the seconds spent reading."""
        file, seconds = step.file, 0.0
        # What is read by ranges of an object has a patience of its own.
        reading = None
        if way != "ranges":
            reading = self._watch.begin(step, file.source.name, offset, attempt=attempt)
        try:
            while offset < step.end and not self._cancel.is_set():
                part = min(self._pace.length, step.end - offset)
                began = time.monotonic()
                file.fill(offset, part, way, self._cancel)
                took = time.monotonic() - began
                seconds += took
                self._pace.took(took)
                offset += part
                if reading is not None and not self._watch.moved(reading, offset):
                    raise _TakenOverError
                self._follower.arrived(file.number, offset - part, offset)
                self._count(part, took)
        finally:
            if reading is not None:
                self._watch.finish(reading)
        return seconds

    def _count(self, nbytes: int, took: float) -> None:
        if self._tally.add(nbytes, took):
            self._when_done(self._tally.report())
        if self._tally.done == self.total:
            self._finish()

    def _take_over(self, step: _Step, offset: int, attempt: int) -> None:
        """Read what is left of a step whose reader hangs, on another thread and descriptor."""

        def run() -> None:
            try:
                # Where storage gives nothing, opening a file may take for ever too.
                opening = self._watch.begin(step, step.file.source.name, offset, attempt=attempt)
                file = step.file.again()
                self._watch.finish(opening)
                self._fill(_Step(file, offset, step.end), offset, "buffered", attempt=attempt)
                while not self._cancel.is_set() and self._one():
                    pass
            except BaseException as error:
                self._fail(error)
            self._leave()

        threading.Thread(target=run, name="weights-again", daemon=True).start()

    def _fail(self, error: BaseException) -> None:
        self._errors.append(error)
        self._cancel.set()
        self._finish()

    def _leave(self) -> None:
        with self._lock:
            self._active -= 1
        if self._active == 0:
            self._finish()

    def _finish(self) -> None:
        self._watch.end()
        self._ended.set()


class _TakenOverError(Exception):
    """This reader came back from a read when its range was another's already."""


class _Step(Struct, frozen=True):
    """A part of a file, as one reader takes it."""

    file: _File
    offset: int
    end: int


class _File:
    """One file's image and the source that fills it."""

    def __init__(self, number: int, folder: Folder, file: ShardFile, choice: Choice) -> None:
        self.number = number
        self.size = file.size
        self._folder = folder
        self._file = file
        self.choice = choice
        self.source = self._open()
        self.is_cold = self.choice.is_cold
        self._cached = self.source
        if self.choice.strategy == "direct" and not choice.ordered:
            self._cached = folder.source(file)
        self._spread()
        self.memory = self._map() if choice.strategy == "map" else self._allocate()
        self._view = memoryview(self.memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def fill(self, offset: int, length: int, way: str, cancel: threading.Event) -> None:
        """Bring ``length`` bytes at ``offset`` (a multiple of the page size) into memory.

        ``way`` is a strategy: the file's own, or ``buffered`` for one that is read directly.
        """
        if way == "map":
            self._populate(offset, length)
            return
        source = self.source if way == "direct" else self._cached
        end = min(offset + -(-length // source.align) * source.align, len(self._view))
        source.read_into(self._view[offset:end], offset, cancel)

    def drop_behind(self) -> None:
        """Keep no second copy of what is read in the page cache, unless it was there before."""
        if self.choice.resident < COLD:
            for source in {self.source, self._cached}:
                if isinstance(source, FileSource):
                    source.drops_behind = True

    def again(self) -> _File:
        """The same memory, filled through a descriptor of its own."""
        other = copy.copy(self)
        other.source = other._cached = self._folder.source(self._file)
        other._spread()
        return other

    def _spread(self) -> None:
        """Give each reader a descriptor of its own where that may bring more."""
        for source in {self.source, self._cached}:
            if isinstance(source, FileSource):
                source.descriptor_for_each_reader = self.choice.network

    def in_page_cache(self, offset: int, length: int) -> bool:
        """Whether a range of a file that is read directly need not come from the device."""
        if self._cached is self.source or self.choice.resident < COLD:
            return False
        assert isinstance(self.source, FileSource)
        return (resident_fraction(self.source.fileno(), offset, length) or 0.0) >= RESIDENT

    def heed(self, trial: Trial) -> None:
        """Take the verdict as this file's choice, if it is one of those that were tried."""
        if self.is_cold:
            reason = f"{self.choice.resident:.0%} resident in the page cache; {trial}"
            self.choice = structs.replace(self.choice, strategy=trial.verdict, reason=reason)

    def close(self) -> None:
        """Close the descriptors."""
        self.source.close()
        if self._cached is not self.source:
            self._cached.close()

    def _populate(self, offset: int, length: int) -> None:
        """Enter pages into the page table; one that cannot be had is an error here and a SIGBUS later."""
        if _libc.madvise(self._address + offset, length, _MADV_POPULATE_READ) == 0:
            return
        code = ctypes.get_errno()
        self.source.verify()
        if code != errno.EINVAL:
            raise StorageError(
                f"{self.source.name} cannot be read at byte {offset}: {os.strerror(code)}",
                advice="Look for the device's errors in the kernel log (dmesg)",
            )
        # Older than Linux 5.14: touch one byte of each page instead.
        bytes(self._view[offset : offset + length : mmap.PAGESIZE])

    def _open(self) -> Source:
        if self.choice.strategy == "direct":
            try:
                return self._folder.source(self._file, direct=True)
            except StorageError as error:
                self._fall_back(error, "has no direct reads (O_DIRECT)")
        return self._folder.source(self._file)

    def _map(self) -> mmap.mmap:
        try:
            assert isinstance(self.source, FileSource)
            # Private and writable: torch warns about memory that it must not write.
            return mmap.mmap(
                self.source.fileno(), self.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            )
        except OSError as error:
            self._fall_back(
                StorageError(
                    f"{self.source.name} cannot be mapped: {error.strerror}",
                    advice="Use --read-strategy buffered",
                ),
                f"cannot be mapped: {error.strerror}",
            )
            return self._allocate()

    def _fall_back(self, error: StorageError, why: str) -> None:
        """Read through the page cache instead, unless the user asked for the other."""
        if self.choice.ordered:
            raise error
        self.choice = self.choice.buffered(why)

    def _allocate(self) -> mmap.mmap:
        size = -(-self.size // self.source.align) * self.source.align
        return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
