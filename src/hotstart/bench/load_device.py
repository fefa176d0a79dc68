"""Measurements that end in a device's memory: what is read back from it, what was held, and readers of ours.

Whoever loaded, the bytes are compared in one way: when the clock has stopped they are copied to the host,
and the same ones are taken for the checksum as of tensors in memory.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from hotstart.bench.load_formats import open_task
from hotstart.bench.load_loader import Load, Loaded, Loader, Span, Task, memory
from hotstart.bench.load_readers import MIB, fill, run_parallel
from hotstart.device.base import Device, HostBuffer
from hotstart.device.choose import choose, open_device
from hotstart.device.driver import LIBRARY
from hotstart.device.fake import FakeDevice
from hotstart.errors import DeviceError

PAGE = 4096
_BACK = 32 * MIB
"""Of the buffer through which bytes come back."""
_EVERY = 0.01
"""Seconds between two looks at the device's free memory."""


@cache
def device_of(name: str) -> Device:
    """The device of a task, with its context; the calling thread is attached. Raises DeviceError."""
    device: Device = FakeDevice() if name == "fake" else open_device(choose(name))
    device.attach()
    return device


def synchronize(device: Device) -> None:
    """Wait for everything that this process has given the device to do, whichever library gave it."""
    if not device.host_memory:
        _check("cuCtxSynchronize", _driver().cuCtxSynchronize())


def read_back(device: Device, spans: Mapping[str, Span]) -> Iterator[tuple[str, bytes, bytes]]:
    """Of each tensor its name, the first byte of each page's worth, and its last byte."""
    buffer = None if device.host_memory else device.pinned(_BACK)
    for name, span in spans.items():
        touched, last = bytearray(), b""
        for offset in range(0, span.nbytes, _BACK):
            piece = Span(span.address + offset, min(_BACK, span.nbytes - offset))
            view = memory(piece) if buffer is None else _copied(piece, buffer)
            touched += bytes(view[::PAGE])
            last = bytes(view[-1:])
        yield name, bytes(touched), last


def _copied(span: Span, buffer: HostBuffer) -> memoryview:
    address, source = ctypes.c_void_p(buffer.address), ctypes.c_uint64(span.address)
    _check("cuMemcpyDtoH_v2", _driver().cuMemcpyDtoH_v2(address, source, ctypes.c_size_t(span.nbytes)))
    return buffer.view[: span.nbytes]


@cache
def _driver() -> Any:
    return ctypes.CDLL(LIBRARY)


def _check(name: str, status: int) -> None:
    if status:
        raise DeviceError(f"{name} failed with {status}")


class MemoryWatch:
    """The least memory that was free on a device, looked at by a thread; :meth:`stop` says how much went."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._before = self._least = device.memory().free
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Bytes at most. What torch's allocator holds is known exactly, however briefly it did."""
        self._done.set()
        self._thread.join()
        self._least = min(self._least, self._device.memory().free)
        held = self._before - self._least
        torch = sys.modules.get("torch")
        if not self._device.host_memory and torch is not None and torch.cuda.is_initialized():
            held = max(held, torch.cuda.max_memory_reserved(self._device.info.index))
        return max(0, held)

    def _look(self) -> None:
        while not self._done.wait(_EVERY):
            self._least = min(self._least, self._device.memory().free)


def ours_on_device(strategy: str, task: Task) -> Load:
    """Ours: ring, arena and choice of the way, as a start has them; torch is not needed."""
    from hotstart.loading.arena import Arena, Layout
    from hotstart.loading.choice import choose_for_gpu
    from hotstart.loading.options import LoaderOptions
    from hotstart.loading.ring import Loading
    from hotstart.loading.staging import staging_for
    from hotstart.models.spec import WeightSpec

    device = device_of(task.device)

    def load() -> Loaded:
        checkpoint = open_task(task)
        layout = Layout.of(
            (WeightSpec(slot=name, stored=(name,), shape=ref.shape), ref)
            for name, ref in checkpoint.tensors.items()
        )
        arena = Arena(layout, device)
        staging = staging_for(checkpoint, LoaderOptions.parse({}))
        loading = Loading(
            checkpoint,
            arena,
            choices=choose_for_gpu(checkpoint.files, strategy),
            threads=staging.ring.threads,
            first=staging.first,
            buffers=staging.ring.buffers,
            buffer_bytes=staging.ring.buffer_bytes,
        )
        loading.wait()
        arena.finish()
        spans = {part.ref.name: Span(arena.address(part), part.ref.nbytes) for part in layout.parts}
        note = f"direct: no, because it reads with the CPU: {loading.describe()}"
        return Loaded({}, (arena, loading), note, spans)

    return load


def _ring(way: str, threads: int, buffers: int, chunk: int) -> Callable[[Task], Load]:
    """Plain reads into pinned buffers that are used in turn, and a copy of each file on the device."""

    def prepare(task: Task) -> Load:
        device = device_of(task.device)
        checkpoint = open_task(task)

        def load() -> Loaded:
            flags = os.O_RDONLY | (os.O_DIRECT if way == "direct" else 0)
            fds = [os.open(path, flags) for path, _ in task.files]
            bases = [device.allocate(size) for _, size in task.files]
            ring = _Ring(device, buffers, chunk)

            def copy(file: int, begin: int, end: int) -> None:
                buffer = ring.next()
                length = -(-(end - begin) // PAGE) * PAGE if way == "direct" else end - begin
                fill(fds[file], begin, buffer.view[:length])
                ring.copy(bases[file] + begin, end - begin)

            ranges = deque(
                (file, begin, min(begin + chunk, size))
                for file, (_, size) in enumerate(task.files)
                for begin in range(0, size, chunk)
            )
            run_parallel(ranges, threads, copy)
            for stream in ring.streams:
                device.synchronize(stream)
            spans = {
                name: Span(bases[ref.file] + ref.offset, ref.nbytes)
                for name, ref in checkpoint.tensors.items()
            }
            return Loaded({}, ring, spans=spans)

        return load

    return prepare


class _Ring:
    """A stream and a few pinned buffers for each thread that asks."""

    def __init__(self, device: Device, buffers: int, nbytes: int) -> None:
        self.streams: list[int] = []
        self._device, self._buffers, self._nbytes = device, buffers, nbytes
        self._mine = threading.local()

    def next(self) -> HostBuffer:
        """A buffer of the calling thread that no copy is reading from."""
        mine, device = self._mine, self._device
        if not hasattr(mine, "stream"):
            device.attach()
            mine.stream, mine.turn = device.stream(), -1
            mine.slots = [(device.pinned(self._nbytes), device.event()) for _ in range(self._buffers)]
            self.streams.append(mine.stream)
        mine.turn = (mine.turn + 1) % self._buffers
        buffer, event = mine.slots[mine.turn]
        device.wait(event)
        found: HostBuffer = buffer
        return found

    def copy(self, address: int, nbytes: int) -> None:
        """From the buffer that :meth:`next` gave last."""
        buffer, event = self._mine.slots[self._mine.turn]
        self._device.copy(address, buffer.address, nbytes, self._mine.stream)
        self._device.record(event, self._mine.stream)


RINGS = {
    f"plain ring {way}, 8 x 2 x 8 MiB": Loader(
        _ring(way, 8, 2, 8 * MIB),
        devices=("cuda",),
        formats=("safetensors", "sharded_state", "tensorizer"),
    )
    for way in ("buffered", "direct")
}
"""Readers with nothing around them: the ceiling of a device."""
