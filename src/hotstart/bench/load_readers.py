"""Plain parallel reads: threads that take ranges of files in order and fill fresh memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

MIB = 1 << 20
_MADV_POPULATE_READ = 22

Read = Callable[[int, int, memoryview], None]
"""File, offset, and the memory to fill."""


def read_parallel(
    sizes: list[int], threads: int, chunk: int, read: Read, *, whole_pages: bool = False
) -> list[memoryview]:
    """An image of each file in memory of its own. Raises the first error of a reader.

    ``whole_pages``: the last range of a file is asked for up to the end of its page.
    """
    images = [memoryview(mmap.mmap(-1, max(1, size))) for size in sizes]
    if whole_pages:
        rounded = [-(-max(1, size) // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]
        images = [memoryview(mmap.mmap(-1, size)) for size in rounded]
    ranges = deque(
        (file, offset, min(offset + chunk, len(images[file])))
        for file, size in enumerate(sizes)
        for offset in range(0, size, chunk)
    )
    run_parallel(ranges, threads, lambda file, begin, end: read(file, begin, images[file][begin:end]))
    return [image[:size] for image, size in zip(images, sizes, strict=True)]


def map_files(paths: list[str], threads: int, chunk: int) -> list[memoryview]:
    """A private mapping of each file, its pages entered by several threads; by none: as they are touched."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    mapped = []
    for path in paths:
        with open(path, "rb") as file:
            mapped.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    if not threads:
        return [memoryview(memory) for memory in mapped]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in mapped]
    ranges = deque(
        (file, offset, min(offset + chunk, len(memory)))
        for file, memory in enumerate(mapped)
        for offset in range(0, len(memory), chunk)
    )
    run_parallel(
        ranges,
        threads,
        lambda file, begin, end: libc.madvise(addresses[file] + begin, end - begin, _MADV_POPULATE_READ),
    )
    return [memoryview(memory) for memory in mapped]


def run_parallel(
    ranges: deque[tuple[int, int, int]], threads: int, work: Callable[[int, int, int], object]
) -> None:
    """Each thread takes the next range until none is left. Raises the first error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not errors:
                try:
                    file, begin, end = ranges.popleft()
                except IndexError:
                    return
                work(file, begin, end)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run, name=f"plain-{i}") for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]


def fill(fd: int, offset: int, view: memoryview) -> None:
    """Read into a view that may reach past the file's end, up to the end of its page. Raises OSError."""
    size = os.fstat(fd).st_size
    while len(view) and offset < size:
        got = os.preadv(fd, [view], offset)
        if not got:
            raise OSError("a weight file ended early")
        view, offset = view[got:], offset + got


def first_hole(path: str) -> int:
    """The offset of the first hole of a file; its size where there is none, or none can be known."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a read-only file system has nothing to write out
            os.fdatasync(fd)  # what is only reserved so far looks like a hole on some file systems
        try:
            return os.lseek(fd, 0, os.SEEK_HOLE)
        except OSError:
            return os.fstat(fd).st_size
    finally:
        os.close(fd)
