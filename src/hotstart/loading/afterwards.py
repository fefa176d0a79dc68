"""What a load is compared with, and what it leaves for the next one: digests and copies on the disk.

While the model loads, this follows what arrives. Before the model answers, :meth:`Afterwards.confirm`
has compared the digests, if that was asked for. From :meth:`Afterwards.go_on` on, one thread that runs
when nobody else wants the processor completes the copies, records digests and compares the copies that
were used. A server that ends meanwhile loses nothing but that work.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from hotstart.checkpoint.base import Checkpoint, ShardFile
from hotstart.checkpoint.wording import count
from hotstart.config.load_formats import is_stream
from hotstart.device import host
from hotstart.errors import HotstartError
from hotstart.loading.copying import CopyJob, compare
from hotstart.loading.digesting import Digesting, agreement
from hotstart.loading.late_digests import LateDigests
from hotstart.storage.digests import MAX_SUMS, Expected, Records, local_identity, published
from hotstart.storage.disk_copy import DiskCopies, Entry, about_copy
from hotstart.storage.idle import SpareProcessors, run_idle
from hotstart.storage.source import Source
from hotstart.units import format_rate, format_seconds, format_size

if TYPE_CHECKING:
    from hotstart.checkpoint.remote import ObjectFolder
    from hotstart.config.settings import LoadConfig
    from hotstart.storage.object_store import ObjectStore

_QUIET = 5.0
"""Seconds of a load in which nothing is written: most loads are over by then, and no copy slows them."""
_NAP, _TURN = 0.5, 0.5
"""Seconds between two looks at the processors, and of writing while they have nothing to do."""
_LOOK_EVERY = 256 << 20
"""Bytes kept for a copy after which free memory is looked at."""
_LEAST_FREE = 1 << 30
"""Bytes of memory below which nothing is kept for a copy."""
_UNASKED = 4
"""Times as much memory must be free where nobody asked for what needs it."""

Say = Callable[[int, str], None]
"""Level of :mod:`logging`, and a line of the log."""


class _Kept(Struct):
    """Memory that the model wants to give back."""

    file: int
    begin: int
    end: int
    give_back: Callable[[], None]


class _Turn:
    """Ends after its time, or when somebody wakes the thread."""

    def __init__(self, wake: threading.Event) -> None:
        self._wake = wake
        self._until = time.monotonic() + _TURN

    def is_set(self) -> bool:
        """See :class:`hotstart.storage.source.Cancel`."""
        return self._wake.is_set() or time.monotonic() > self._until


class Afterwards:
    """See the module. A :class:`hotstart.loading.follower.Follower` of the load."""

    def __init__(self, checkpoint: Checkpoint, load: LoadConfig, cache_root: str, say: Say) -> None:
        """Look for digests and copies; with ``--verify digest`` the store is asked for small files.

        Raises StorageError when it cannot be reached.
        """
        self._files = checkpoint.files
        self._checkpoint = checkpoint
        self._load = load
        self._say = say
        self._records = Records(cache_root)
        self._copies: DiskCopies | None = getattr(checkpoint.folder, "copies", None)
        self._memories: Sequence[memoryview] = ()
        self._jobs: dict[int, CopyJob] = {}
        self._used: dict[int, Entry] = {}
        """Complete copies that this load reads."""
        self._expected = self._find_digests() if load.verify == "digest" else {}
        self._digesting: Digesting | None = None
        self._late: LateDigests | None = None
        self._kept: list[_Kept] = []
        self._kept_bytes = self._looked_at = 0
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._wake = threading.Event()
        self._pressed = False
        self.copied: Callable[[int], None] = lambda nbytes: None
        """Called with the bytes written to the disk copy so far, after each file."""
        self._cancel = threading.Event()
        self._spare = SpareProcessors(host.cores())
        self._thread = threading.Thread(target=self._run, name="afterwards", daemon=True)

    def start(self, memories: Sequence[memoryview]) -> None:
        """The load begins. ``memories``: the images that this follows; none: the bytes do not stay."""
        self._memories = memories
        self._plan_copies()
        self._late = self._plan_digests()
        if self._expected:
            assert self._checkpoint.folder is not None
            source = self._checkpoint.folder.source
            self._digesting = Digesting(self._files, self._expected, memories, source)
            self._digesting.start()
        if self._jobs or self._used or self._late is not None or self._digesting is not None:
            self._thread.start()

    @property
    def compares(self) -> bool:
        """Whether there is anything for :meth:`confirm` to wait for."""
        return bool(self._expected)

    def arrived(self, file: int, begin: int, end: int) -> None:
        """See :class:`hotstart.loading.follower.Follower`."""
        if self._digesting is not None:
            self._digesting.arrived(file, begin, end)
        if self._late is not None:
            self._late.arrived(file, begin, end)
        if file in self._jobs:
            self._jobs[file].arrived(begin, end)

    def keeps(self, file: int, begin: int, end: int, give_back: Callable[[], None]) -> bool:
        """See :class:`hotstart.loading.follower.Follower`."""
        kept = _Kept(file, begin, end, give_back)
        with self._lock:
            if not self._needs(kept):
                return False
            self._kept.append(kept)
            self._kept_bytes += end - begin
            if self._kept_bytes - self._looked_at > _LOOK_EVERY:
                self._looked_at = self._kept_bytes
                if self._memory_is_short():
                    self._pressed = True
                    self._wake.set()
        return True

    def confirm(self) -> None:
        """Block until the digests are compared. Raises ModelError for those that differ."""
        if self._digesting is None:
            return
        try:
            self._digesting.confirm()
        except HotstartError:
            self._discard_copies(self._digesting.wrong())
            raise
        self._say(logging.INFO, f"digests: {agreement(self._expected.values())}")

    def go_on(self) -> None:
        """The model answers: what is left may be done now."""
        self._ready.set()
        self._wake.set()

    def close(self) -> None:
        """Stop, after the piece at work."""
        self._cancel.set()
        self.go_on()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self) -> None:
        """Block until all is done; after :meth:`go_on`."""
        if self._thread.ident is not None:
            self._thread.join()

    def _plan_copies(self) -> None:
        copies = self._copies
        if copies is None:
            if self._load.disk_cache is not None:
                self._say(logging.INFO, "disk copy: none, for the model lies in a directory")
            return
        folder: ObjectFolder = self._checkpoint.folder  # type: ignore[assignment]
        nameless = 0
        for number, file in enumerate(self._files):
            about = about_copy(file.path) if os.path.isabs(file.path) else None
            if about is not None:
                entry = copies.entry(about.name, about.identity, about.size)
                if entry is not None:
                    self._used[number] = entry
            elif not file.identity:
                nameless += 1
            else:
                memory = self._memories[number] if self._memories else None
                name, stored = folder.copy_name(file), _stored(folder, file)
                job = CopyJob(copies, name, file.identity, file.size, stored, memory)
                job.synced = self._breathe
                self._jobs[number] = job
        self._tell_use(copies, nameless)

    def _tell_use(self, copies: DiskCopies, nameless: int) -> None:
        where = copies.limit.directory
        used = sum(self._files[number].size for number in self._used)
        parts = [entry for job in self._jobs.values() if (entry := job.found())]
        partly = sum(entry.table().nbytes for entry in parts)
        line = f"disk copy: {count(len(self._used), 'file')} of {len(self._files)} read from {where}"
        line += f" ({format_size(used)})"
        if partly:
            line += (
                f", and {format_size(partly)} of {count(len(parts), 'file')} whose copies are not complete"
            )
        self._say(logging.INFO, line)
        if nameless:
            files = count(nameless, "file")
            self._say(
                logging.WARNING,
                f"disk copy: none of {files}, for the server gives neither ETag nor Last-Modified",
            )

    def _plan_digests(self) -> LateDigests | None:
        """What is compared or recorded without anybody waiting for it."""
        ordered = self._load.verify == "digest"
        numbers = set(range(len(self._files))) - set(self._expected)
        if not ordered:
            numbers -= set(self._used)  # copies are compared with checksums of their own
        if self._load.verify == "off" or not numbers:
            return None
        if not (ordered or self._memories):
            self._tell_not_compared()
            return None
        assert self._checkpoint.folder is not None
        return LateDigests(
            self._files,
            numbers,
            self._memories,
            find=dict if ordered else self._find_digests,  # they were looked for, and are not known
            record=self._record,
            open_source=self._checkpoint.folder.source,
            say=self._say,
        )

    def _tell_not_compared(self) -> None:
        """Of a library that reads: Tensorizer compares the hashes in its file, and says so itself."""
        load_format = self._load.load_format
        if is_stream(load_format) and load_format != "tensorizer":
            self._say(
                logging.INFO,
                f"digests: not compared, for --load-format {load_format} shows no bytes; "
                "--verify digest reads the files a second time",
            )

    def _record(self, number: int, found: str) -> None:
        self._records.keep(*self._name(number), found)

    def _discard_copies(self, wrong: Sequence[int]) -> None:
        for file in wrong:
            if file in self._jobs:
                self._jobs[file].discard()
            if file in self._used:
                self._used[file].discard()

    def _find_digests(self) -> dict[int, Expected]:
        names = [self._name(number) for number in range(len(self._files))]
        plain = [self._plain(number) for number in range(len(self._files))]
        given = published(plain, self._read)
        others = [number for number, name in enumerate(plain) if name not in given]
        store: ObjectStore | None = getattr(self._checkpoint.folder, "store", None)
        kept: dict[int, Expected] = {}
        if store is not None and others:
            from hotstart.loading.store_digests import ask

            objects = [(plain[number], self._files[number].size, names[number][1]) for number in others]
            answers = ask(store, objects, self._say)
            kept = {others[index]: expected for index, expected in answers.items()}
        found: dict[int, Expected] = {}
        for number, (name, identity) in enumerate(names):
            expected = given.get(plain[number]) or kept.get(number) or self._records.find(name, identity)
            if expected is not None:
                found[number] = expected
        return found

    def _name(self, number: int) -> tuple[str, str]:
        """Name and identity of a file, wherever its bytes are read; of a copy, those of its object."""
        file = self._files[number]
        if not os.path.isabs(file.path):
            folder: ObjectFolder = self._checkpoint.folder  # type: ignore[assignment]
            return folder.copy_name(file), file.identity
        about = about_copy(file.path) if self._copies is not None else None
        if about is not None:
            return about.name, about.identity
        try:
            return os.path.realpath(file.path), local_identity(file.path)
        except OSError:
            return file.path, ""

    def _plain(self, number: int) -> str:
        """What a file is called in the model's folder, wherever its bytes are read."""
        path = self._files[number].path
        about = about_copy(path) if self._copies is not None and os.path.isabs(path) else None
        if about is not None:
            folder: ObjectFolder = self._checkpoint.folder  # type: ignore[assignment]
            path = about.name.removesuffix(f" at {folder.store.settings.endpoint}")
        return path.rpartition("/")[2]

    def _read(self, names: Sequence[str]) -> list[str | None]:
        """Small files beside the weights; None: there is none of this name."""
        from concurrent.futures import ThreadPoolExecutor

        folder = self._checkpoint.folder
        store = getattr(folder, "store", None)

        def read(name: str) -> str | None:
            if store is not None:
                fetched = store.fetch(name, MAX_SUMS, optional=True)
                return None if fetched is None else bytes(fetched.data).decode(errors="replace")
            try:
                path = os.path.join(getattr(folder, "path", ""), name)
                with open(path, errors="replace", opener=_without_waiting) as file:
                    return file.read(MAX_SUMS) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
            except OSError:
                return None

        with ThreadPoolExecutor(min(32, len(names))) as pool:
            return list(pool.map(read, names))

    def _needs(self, kept: _Kept) -> bool:
        file, begin, end = kept.file, kept.begin, kept.end
        if file in self._jobs and self._jobs[file].needs(begin, end):
            return True
        if self._late is not None and self._late.needs(file, end):
            return True
        return self._digesting is not None and self._digesting.needs(file, begin, end)

    def _run(self) -> None:
        run_idle()
        try:
            until = time.monotonic() + _QUIET
            while not self._ready.is_set():
                self._wake.wait(_NAP)
                if self._pressed:
                    self._breathe()
                if time.monotonic() > until and self._spare.now():
                    turn = _Turn(self._wake)
                    for job in self._jobs.values():
                        job.write_arrived(turn)
                    if self._late is not None:
                        self._late.run(turn)
                self._spare.restart()
            if not self._cancel.is_set():
                self._finish()
        except Exception as error:
            # Where a program of the Python API ends no thread can be begun: that is no news.
            if "interpreter shutdown" not in str(error):
                found = f"{type(error).__name__}: {error}"
                self._say(logging.WARNING, f"nothing more is copied or compared: {found}")
        finally:
            for job in self._jobs.values():
                job.close()
            self._give_back(everything=True)

    def _finish(self) -> None:
        """What is done once the model answers, memory that is wanted back first."""
        self._give_back()  # what only the digests needed
        self._complete_copies()
        if self._late is not None:
            self._late.run(self._cancel, self._breathe)
            self._discard_copies(self._late.wrong)
        self._give_back(everything=True)
        if self._load.verify != "off":
            self._compare_copies()

    def _complete_copies(self) -> None:
        began, done, written = time.monotonic(), 0, 0
        problems: list[str] = []
        for job in self._jobs.values():
            job.complete(self._cancel)
            self._breathe()
            written += job.written
            self.copied(written)
            done += job.published
            if job.problem:
                problems.append(job.problem)
        if not self._jobs or self._copies is None:
            return
        where, seconds = self._copies.limit.directory, time.monotonic() - began
        if problems:
            self._say(
                logging.WARNING,
                f"disk copy: {count(len(problems), 'file')} of {len(self._jobs)} not written to {where}: "
                f"{problems[0]}; the next start asks the store for what is not there",
            )
        elif written or done:
            self._say(
                logging.INFO,
                f"disk copy: {format_size(written)} written to {where} in {format_seconds(seconds)} "
                f"({format_rate(written, seconds)}), {count(done, 'file')} complete",
            )
        else:
            self._say(logging.INFO, f"disk copy: another server writes to {where} what this one has read")

    def _compare_copies(self) -> None:
        for entry in self._used.values():
            wrong = compare(entry, self._cancel, self._pause)
            if wrong:
                self._say(
                    logging.ERROR,
                    f"disk copy: {entry.data} of {entry.about.name} was damaged ({wrong}) and is removed; "
                    "this server answers from damaged weights: restart it, it will read them from the store",
                )

    def _breathe(self) -> None:
        """More is written: memory can be given back, and all of it must be where it is short."""
        self._give_back(everything=self._pressed or (self._kept_bytes > 0 and self._memory_is_short()))
        if self._ready.is_set():
            self._pause()

    def _memory_is_short(self) -> bool:
        kept = self._kept_bytes if self._load.verify == "digest" else _UNASKED * self._kept_bytes
        return host.memory().available < max(kept, _LEAST_FREE)

    def _pause(self) -> None:
        """Once the model answers: between two pieces of work, longer while the processors are busy."""
        if not self._spare.now():
            self._cancel.wait(_NAP)
        self._spare.restart()

    def _give_back(self, *, everything: bool = False) -> None:
        """Release what nobody needs any more; ``everything``: what was not written is lost to the copy."""
        with self._lock:
            kept, self._kept = self._kept, []
            for each in kept:
                if everything and each.file in self._jobs:
                    self._jobs[each.file].lose(each.begin, each.end)
                if everything and self._late is not None:
                    self._late.lose(each.file)
                if self._digesting is not None and self._digesting.needs(each.file, each.begin, each.end):
                    self._kept.append(each)
                elif everything or not self._needs(each):
                    each.give_back()
                else:
                    self._kept.append(each)
            self._kept_bytes = self._looked_at = sum(each.end - each.begin for each in self._kept)
            self._pressed = False
            if not self._ready.is_set():
                self._wake.clear()


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO must not hang the start


def _stored(folder: ObjectFolder, file: ShardFile) -> Callable[[], Source]:
    return lambda: folder.stored(file)
