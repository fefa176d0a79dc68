"""How much of a file the page cache holds, and how to evict it.

Warm and cold reads differ by an order of magnitude, so the read path is chosen by residency and
every start reports it. ``cachestat(2)`` (Linux 6.5) answers in microseconds; ``mincore(2)`` on a
mapping is the fallback. Both may be denied, or answer falsely, for files that this user cannot
write: then the answer is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

_CACHESTAT = 451
"""The same number on every architecture: it is newer than their unification."""


def resident_fraction(file: str | int, offset: int = 0, length: int = 0) -> float | None:
    """Share of a file's pages in the page cache, 0 to 1; 1 for an empty file; None: cannot be known.

    Of ``length`` bytes from ``offset`` on, which is a multiple of the page size; length 0: to the end.
    """
    if isinstance(file, int):
        return _resident(file, offset, length)
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _resident(fd, offset, length)
    finally:
        os.close(fd)


def evict(path: str) -> None:
    """Drop a file's clean pages from the page cache; writes dirty ones out first. Raises OSError.

    Pages that some process has mapped stay.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a read-only file system has nothing to write out
            os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _resident(fd: int, offset: int, length: int) -> float | None:
    rest = max(0, os.fstat(fd).st_size - offset)
    size = min(length, rest) if length else rest
    pages = -(-size // mmap.PAGESIZE)
    if not pages:
        return 1.0
    cached = _by_cachestat(fd, offset, size)
    if cached is None:
        cached = _by_mincore(fd, offset, size, pages)
    return None if cached is None else min(1.0, cached / pages)


_EVEN = bytes(range(0, 256, 2))
"""What mincore writes for a page that is not resident: only the lowest bit means something."""


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted")
    )


def _by_cachestat(fd: int, offset: int, size: int) -> int | None:
    """Pages in the cache; None where the kernel has no such call or denies it."""
    wanted, result = _Range(offset, size), _Cachestat()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(_CACHESTAT), fd, ctypes.byref(wanted), ctypes.byref(result), 0):
        return None
    return int(result.cache)


def _by_mincore(fd: int, offset: int, size: int, pages: int) -> int | None:
    """Pages in the cache; None where mincore would claim that all are, as for files of other users."""
    status = os.fstat(fd)
    if os.geteuid() not in (0, status.st_uid):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address in (None, ctypes.c_void_p(-1).value):
        return None
    try:
        vector = ctypes.create_string_buffer(pages)
        if libc.mincore(address, size, vector):
            return None
        return len(vector.raw.translate(None, delete=_EVEN))
    finally:
        libc.munmap(address, size)
