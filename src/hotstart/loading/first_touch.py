"""How long the first access to memory takes, by which large pages prove good or bad. Torch-free.

A virtual machine's memory may be the host's until it is touched: each page then costs a fault of some
microseconds, which nobody sees but the one who touches it, and a load would only leave it to the first
forward pass. What the kernel hands out in large pieces is the memory that lay idle longest, so large
pages suffer most (measured where free memory is reported to the host: 2.6 GB in 0.9 s, and 2 to 3 s
more at the first touch; in single pages, used a moment ago, 1.5 s and nothing). On other machines they
are the fastest way by far. So the first pages of each region are touched and timed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time

_AT_ONCE = 256
"""Pages of a sample; the call takes 1024 ranges at most."""
_SLOW = 2e-6
"""Seconds for a page: memory that is there takes a tenth of it."""
_SAMPLES = 2
"""As many must be slow: one may have met a busy processor."""
_libc = ctypes.CDLL(None, use_errno=True)


class FirstTouch:
    """Shared by the readers of one load."""

    def __init__(self) -> None:
        self.slow = False
        """Memory is not there until it is touched."""
        self._samples = 0

    def sample(self, address: int, nbytes: int) -> None:
        """Touch and time pages that have just come in."""
        pages = min(nbytes // mmap.PAGESIZE, _AT_ONCE)
        if pages and touch(address, pages) > pages * _SLOW:
            self._samples += 1
            self.slow = self._samples >= _SAMPLES


def touch(address: int, pages: int) -> float:
    """Seconds that reading a byte of each page takes; 0 where a process may not read itself this way."""
    # In one call, which gives up the interpreter lock; a page that is not there is an error, no signal.
    into = ctypes.create_string_buffer(pages)
    local = (ctypes.c_size_t * 2)(ctypes.addressof(into), pages)
    ranges = [value for page in range(pages) for value in (address + page * mmap.PAGESIZE, 1)]
    remote = (ctypes.c_size_t * len(ranges))(*ranges)
    began = time.perf_counter()
    read = _libc.process_vm_readv(os.getpid(), local, 1, remote, pages, 0)
    return time.perf_counter() - began if read == pages else 0.0
