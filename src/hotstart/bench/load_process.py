"""One loader, once, as a program: run in a fresh process, never imported.

    python load_process.py

It reads a task as a line of JSON (:class:`~hotstart.bench.load_loader.Task`). The loader's imports come
first and do not count; it says ``ready`` then, and waits for the word ``go``. Then it brings the tensors
where they are to lie and, in memory, one byte of every page of every tensor is read. That is the time.
Prints one JSON line (:class:`~hotstart.bench.load_loader.Measurement`).
"""

from __future__ import annotations

import gc
import os
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from hotstart.bench import pagecache
from hotstart.bench.load_device import MemoryWatch, device_of, read_back, synchronize
from hotstart.bench.load_loader import Load, Measurement, Task, digest
from hotstart.bench.load_loaders import LOADERS

if TYPE_CHECKING:
    from hotstart.device.base import Device

PAGE = 4096


def measure(task: Task, load: Load, device: Device | None) -> Measurement:
    """``device``: None for memory of this process. Raises whatever the loader raises."""
    if task.evict:
        pagecache.evict_all(task.paths)
    resident = pagecache.resident_share(task.paths) if task.paths else None
    gc.collect()
    _reset_peak()
    before = _memory("VmRSS")
    watch = MemoryWatch(device) if device is not None else None
    begin = time.monotonic()
    loaded = load()
    sums: dict[str, int] = {}
    if device is None:
        sums = {name: _touch(view) for name, view in loaded.tensors.items()}
    else:
        synchronize(device)
    seconds = time.monotonic() - begin
    peak, anonymous = _memory("VmHWM"), _memory("RssAnon") + _memory("RssShmem")
    device_peak = watch.stop() if watch is not None else 0
    if device is not None:
        spans = loaded.spans
        sums = {
            name: zlib.crc32(last, zlib.crc32(touched)) for name, touched, last in read_back(device, spans)
        }
    return Measurement(
        seconds=seconds,
        digest=digest(sums, task.names),
        bytes=sum(len(view) for view in loaded.tensors.values())
        + sum(span.nbytes for span in loaded.spans.values()),
        peak=peak,
        before=before,
        anonymous=anonymous,
        device_peak=device_peak,
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


def main(answer: Callable[[bytes], object]) -> None:
    """Prepare, wait for the word, measure."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    device = device_of(task.device) if task.kind != "cpu" else None
    load = LOADERS[task.loader].prepare(task)
    answer(b"ready\n")
    if sys.stdin.buffer.readline() == b"go\n":
        answer(msgspec.json.encode(measure(task, load, device)) + b"\n")


if __name__ == "__main__":
    # Libraries that print must not come between the lines that count and their reader.
    out = os.dup(1)
    os.dup2(2, 1)
    main(lambda line: os.write(out, line))
    # Nothing here has anything to tidy up, and some libraries take seconds to.
    os._exit(0)
