"""One loader, once, as a program: run in a fresh process, never imported.

    python load_process.py < TASK

The task is JSON (:class:`~hotstart.bench.load_loader.Task`). The loader's imports come first and do
not count; then it brings the tensors into memory and one byte of every page of every tensor is read.
That is the time. Prints one JSON line (:class:`~hotstart.bench.load_loader.Measurement`).
"""

from __future__ import annotations

import gc
import os
import sys
import time
import zlib
from contextlib import suppress

import msgspec

from hotstart.bench import pagecache
from hotstart.bench.load_loader import Measurement, Task, digest
from hotstart.bench.load_loaders import LOADERS

PAGE = 4096


def measure(task: Task) -> Measurement:
    """Raises whatever the loader raises."""
    load = LOADERS[task.loader].prepare(task)
    if task.evict:
        pagecache.evict_all(task.paths)
    resident = pagecache.resident_share(task.paths) if task.paths else None
    gc.collect()
    _reset_peak()
    before = _memory("VmRSS")
    begin = time.monotonic()
    loaded = load()
    sums = {name: _touch(view) for name, view in loaded.tensors.items()}
    seconds = time.monotonic() - begin
    return Measurement(
        seconds=seconds,
        digest=digest(sums, task.names),
        bytes=sum(len(view) for view in loaded.tensors.values()),
        peak=_memory("VmHWM"),
        before=before,
        anonymous=_memory("RssAnon") + _memory("RssShmem"),
        note=loaded.note,
        resident=resident,
    )


def _touch(view: memoryview) -> int:
    """A checksum of the first byte of each page's worth of a tensor, and of its last byte."""
    return zlib.crc32(view[-1:], zlib.crc32(bytes(view[::PAGE])))


def _reset_peak() -> None:
    """The peak of the imports is nobody's concern (proc_pid_clear_refs(5))."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _memory(field: str) -> int:
    """Bytes, of /proc/self/status."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":")), 0)


if __name__ == "__main__":
    # Libraries that print must not come between the one line that counts and its reader.
    out = os.dup(1)
    os.dup2(2, 1)
    result = measure(msgspec.json.decode(sys.stdin.buffer.read(), type=Task))
    os.write(out, msgspec.json.encode(result) + b"\n")
    # Nothing here has anything to tidy up, and some libraries take seconds to.
    os._exit(0)
