"""Weights on CPU: each file's bytes at their own offsets, mapped or read into memory. Torch-free.

Safetensors bytes are final, so a tensor is a view of its file's image. A file of a local disk is
mapped. Where its pages are resident nothing is read: threads enter them into the page table while
imports run. Where they are not, nothing is copied either, no memory is cleared only to be overwritten,
and the next start finds the pages. On a device that the kernel reads far ahead of, each thread goes
through a large region in order, with a descriptor of its own: the page cache then takes large pages,
for a tenth of the processor time, unless :mod:`hotstart.loading.first_touch` finds that these come at
a price. On others the threads ask for pages some steps ahead, so that the
device is never idle; if the first steps of a large load come clearly faster past the page cache
(:mod:`hotstart.loading.trial`), the rest is read that way, into memory laid over the mapping. Files
of other file systems are read into memory congruent to them.

While ``import torch`` runs, no call may hold the memory-map lock for long, or dlopen waits: every
step covers at most :data:`STEP` bytes (measured: one call over the whole range makes the import
two to seven times as long).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable

from msgspec import Struct

from hotstart.checkpoint.base import Checkpoint, ShardFile
from hotstart.checkpoint.folder import Folder
from hotstart.device import host
from hotstart.errors import EngineError, HotstartError, StorageError
from hotstart.loading.choice import ROOMY, Choice, choose_all, describe, in_flight
from hotstart.loading.first_touch import FirstTouch
from hotstart.loading.flow import Flow
from hotstart.loading.follower import Follower, Nobody
from hotstart.loading.opened import Opened, begin_trial
from hotstart.loading.pace import Pace
from hotstart.loading.stats import stats_of
from hotstart.loading.tally import LoadReport, Tally
from hotstart.loading.watch import Watch
from hotstart.messages import LoadStats
from hotstart.storage.source import ReadCancelled
from hotstart.units import format_size

STEP = 8 << 20
_AHEAD = 8
"""Steps between the one that is entered into the page table and the one that is asked for."""
_REGION = 128 << 20
"""Bytes that one reader goes through in order where the kernel reads ahead of it by itself."""
_MAPPINGS = 4096
"""At most, of such regions: a process may have some 65 000."""
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MAP_FIXED = 22, 23, 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p


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
        self._files: list[_File] = []
        first_touch = FirstTouch()
        try:
            for number, choice in enumerate(choose_all(checkpoint.files, strategy)):
                file = _File(number, folder, checkpoint.files[number], choice, first_touch)
                self._files.append(file)
        except BaseException:
            for each in self._files:
                each.opened.close()
            raise
        if host.memory().available < ROOMY * self.total:
            for each in self._files:
                each.opened.drop_behind()
        first, most = in_flight(self.choices, readers)
        self._steps = self._plan(most)
        self._taken = self._asked = 0
        """Steps that readers have taken, and steps that the kernel was asked to read ahead."""
        distant = any(file.opened.choice.strategy == "ranges" for file in self._files)
        self._pace = Pace(STEP, distant=distant)
        self._flow = Flow(first, min(most, len(self._steps))) if distant else Flow.of_files()
        self._readers = min(most, len(self._steps))
        """At most; as many as the flow admits are begun."""
        self._begun = self._active = 0
        self._ended = threading.Event()
        """All is there, or a reader failed, or none is left."""
        self._watch: Watch[_Step] = Watch(patience, self._take_over, self._fail)
        self._trial = begin_trial([file.opened for file in self._files], self._readers)
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
        self._begin_readers()

    @property
    def choices(self) -> list[Choice]:
        """For each file, how it is brought in and why."""
        return [file.opened.choice for file in self._files]

    def wait(self) -> LoadReport:
        """Block until every byte is there; raises the first error of a reader, or ReadCancelled."""
        if self._readers:
            self._ended.wait()
        if self._errors:
            raise self._errors[0]
        if self._tally.done < self.total:
            raise ReadCancelled(self.checkpoint.path)
        for file in self._files:
            if not self._closed:
                file.opened.verify()
        return self._tally.report()

    def stats(self) -> LoadStats:
        """What was read, for the metrics."""
        return stats_of(self.checkpoint, self.choices, self._tally, taken_over=self._watch.taken_over)

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
                file.opened.close()

    def is_mapped(self, file: int) -> bool:
        """Whether the file's pages, once released, come back when they are touched."""
        return self._files[file].is_mapped

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

    def _plan(self, readers: int) -> list[_Step]:
        """Steps in file order; files that are read come before files that are mapped."""
        # Whom the kernel reads ahead of goes through a large region in order.
        whole = self.total // STEP
        region = max(1, min(_REGION // STEP, -(-whole // readers)), whole // _MAPPINGS) * STEP
        steps = [
            _Step(file, offset, min(offset + length, file.size))
            for file in self._files
            for length in (region if file.opened.choice.streams else STEP,)
            for offset in range(0, file.size, length)
        ]
        return sorted(steps, key=lambda step: step.file.opened.choice.strategy == "map")

    def _begin_readers(self) -> None:
        """As many as may read: threads that only wait for their turn would still be woken for each read."""
        while True:
            with self._lock:
                if self._begun >= min(self._flow.limit, self._readers):
                    return
                self._begun += 1
                self._active += 1
            thread = threading.Thread(target=self._run, name=f"weights-{self._begun}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the container allows no more threads
                with self._lock:
                    self._active -= 1
                    if self._active == 0:
                        raise
                    self._begun = self._readers = self._begun - 1
                return

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
                if self._taken == len(self._steps):
                    return False
                step, ahead = self._steps[self._taken], self._ahead()
                self._taken += 1
                # In the order of the steps: what is not read ahead is a sample of the other way.
                tried = self._trial.next() if self._trial is not None and step.file.opened.tried else None
            for later in ahead:
                later.file.expect(later.offset, later.end - later.offset)
            self._bring(step, tried)
        self._begin_readers()
        return True

    def _ahead(self) -> list[_Step]:
        """Steps that the kernel is to read ahead now: none of those that a trial reads another way."""
        begin, trial, tried = max(self._asked, self._taken), self._trial, 0
        for number in range(self._taken, min(self._taken + _AHEAD + 1, len(self._steps))):
            if trial is not None and self._steps[number].file.opened.tried:
                if trial.coming(tried) != trial.ways[0]:
                    break
                tried += 1
            self._asked = max(begin, number + 1)
        return self._steps[begin : self._asked]

    def _bring(self, step: _Step, tried: tuple[str, int | None] | None) -> None:
        """Bring a step into memory, in reads that the storage answers in a fraction of a second.

        ``tried``: how the trial would have it, and the turn of which it is a sample.
        """
        opened, trial = step.file.opened, self._trial
        way, turn = tried or (opened.way(step.offset, step.end - step.offset), None)
        try:
            seconds = self._fill(step, step.offset, way)
        except StorageError:
            # Disks of large blocks refuse. If it is the file that is at fault, so does the other way.
            if way != "direct" or not opened.refuse():
                raise
            seconds, turn = self._fill(step, step.offset, "buffered"), None
        if trial is not None and turn is not None and trial.took(turn, step.end - step.offset, seconds):
            for each in self._files:
                each.opened.heed(trial)

    def _fill(self, step: _Step, offset: int, way: str, *, attempt: int = 1) -> float:
        """Returns the seconds spent reading."""
        file, seconds = step.file, 0.0
        # What is read by ranges of an object has a patience of its own.
        reading = None
        if way != "ranges":
            reading = self._watch.begin(step, file.opened.name, offset, attempt=attempt)
        try:
            file.begin(offset, step.end, way)
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
                self._count(part, took, file.number, way)
        except (OSError, HotstartError):
            if reading is None or self._watch.moved(reading, offset):
                raise
            raise _TakenOverError from None  # how this read ended says nothing of the other reader's
        finally:
            if reading is not None:
                self._watch.finish(reading)
            file.end(step.offset, step.end, way)
        return seconds

    def _count(self, nbytes: int, took: float, file: int, way: str) -> None:
        if self._tally.add(nbytes, took, file, way):
            self._when_done(self._tally.report())
        if self._tally.done == self.total:
            self._finish()

    def _take_over(self, step: _Step, offset: int, attempt: int) -> None:
        """Read what is left of a step whose reader hangs, on another thread and descriptor."""

        def run() -> None:
            try:
                # Where storage gives nothing, opening a file may take for ever too.
                opening = self._watch.begin(step, step.file.opened.name, offset, attempt=attempt)
                step.file.reopen()
                self._watch.finish(opening)
                self._fill(step, offset, "buffered", attempt=attempt)
            except BaseException as error:
                self._fail(error)
                self._leave()
            else:
                self._run()  # where it may hang too, and be taken over

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
    """One file's image, and the file."""

    def __init__(
        self, number: int, folder: Folder, file: ShardFile, choice: Choice, first_touch: FirstTouch
    ) -> None:
        self.number = number
        self._first_touch = first_touch
        self._begun: set[int] = set()
        """Offsets of regions of which nothing has been read yet."""
        self.size = file.size
        self.opened = Opened(folder, file, choice)
        self.is_mapped = False
        """Whether pages that are released come back with the file's bytes."""
        try:
            self.memory = self._map() if choice.strategy == "map" else self._allocate()
        except BaseException:
            self.opened.close()
            raise
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        whole = -(-self.size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._view = memoryview((ctypes.c_ubyte * whole).from_address(self._address)).cast("B")
        self._over_mapping = self.is_mapped

    def begin(self, offset: int, end: int, way: str) -> None:
        """A reader will go through a range in order."""
        if way != "map" or not self.opened.choice.streams or self._first_touch.slow:
            return
        try:
            fd = self.opened.stream(offset)
        except OSError:
            return  # the kernel sees no order then; what else is wrong shows when the range is read
        try:
            self._replace(offset, end - offset, mmap.MAP_PRIVATE, fd)
        finally:
            os.close(fd)
        _libc.madvise(self._address + offset, end - offset, mmap.MADV_SEQUENTIAL)
        self._begun.add(offset)

    def end(self, offset: int, end: int, way: str) -> None:
        """It has: from now on the range is read in any order, and to be kept as any other memory."""
        if way == "map" and self.opened.choice.streams:
            _libc.madvise(self._address + offset, end - offset, mmap.MADV_NORMAL)

    def fill(self, offset: int, length: int, way: str, cancel: threading.Event) -> None:
        """Bring ``length`` bytes at ``offset`` (a multiple of the page size) into memory.

        ``way`` is a strategy: the file's own, or another one that it also can.
        """
        if way == "map":
            if self.opened.choice.streams and self._first_touch.slow:
                # Asked for page by page, a little ahead of each reader: then the pages are single ones.
                self.opened.read_ahead(offset, min(length + 2 * STEP, self.size - offset))
            self._populate(offset, length)
            if offset in self._begun:
                self._begun.remove(offset)
                self._first_touch.sample(self._address + offset, length)
            return
        source = self.opened.source(way)
        pages = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._over_mapping:
            self._lay_over(offset, pages)
        # The kernel takes memory by the page when it copies there; all of a part at once is much faster.
        _libc.madvise(self._address + offset, pages, _MADV_POPULATE_WRITE)
        end = offset + (length if source.align == 1 else pages)
        source.read_into(self._view[offset:end], offset, cancel)

    def expect(self, offset: int, length: int) -> None:
        """Let the kernel begin to read a range that will be entered into the page table."""
        # Also where a part of the mapping has been replaced, for the rest of it is read through it still.
        choice = self.opened.choice
        if choice.reads_ahead and not choice.streams and self._over_mapping:
            self.opened.read_ahead(offset, length)

    def reopen(self) -> None:
        """Read on through new descriptors. The old ones stay: a read that hangs is still using them."""
        self.opened = self.opened.again()

    def _populate(self, offset: int, length: int) -> None:
        """Enter pages into the page table; one that cannot be had is an error here and a SIGBUS later."""
        if _libc.madvise(self._address + offset, length, _MADV_POPULATE_READ) == 0:
            return
        code = ctypes.get_errno()
        self.opened.verify()
        if code != errno.EINVAL:
            raise StorageError(
                f"{self.opened.name} cannot be read at byte {offset}: {os.strerror(code)}",
                advice="Look for the device's errors in the kernel log (dmesg)",
            )
        # Older than Linux 5.14: touch one byte of each page instead.
        bytes(self._view[offset : offset + length : mmap.PAGESIZE])

    def _lay_over(self, offset: int, length: int) -> None:
        """Put empty memory in the place of a part of the mapping; writing there would read it first."""
        self.is_mapped = False
        self._replace(offset, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _replace(self, offset: int, length: int, flags: int, fd: int = -1) -> None:
        """Map something else in the place of a part of the image."""
        at, protection = self._address + offset, mmap.PROT_READ | mmap.PROT_WRITE
        begin = 0 if fd < 0 else offset
        if _libc.mmap(at, length, protection, flags | _MAP_FIXED, fd, begin) != at:
            why = os.strerror(ctypes.get_errno())
            raise EngineError(
                f"No memory for {format_size(length)} of {self.opened.name}: {why}",
                advice="Lower what else runs on this machine, or raise vm.max_map_count (sysctl)",
            )

    def _map(self) -> mmap.mmap:
        try:
            memory = self.opened.map()
        except OSError as error:
            self.opened.refuse_map(error)
            return self._allocate()
        self.is_mapped = True
        return memory

    def _allocate(self) -> mmap.mmap:
        # Whole pages: a direct read of the file's last bytes takes all of the last one.
        size = -(-self.size // mmap.PAGESIZE) * mmap.PAGESIZE
        return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
