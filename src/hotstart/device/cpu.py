"""The host's own memory as a device, so that everything above it runs without a GPU."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading

from hotstart.device import host
from hotstart.device.base import DeviceInfo, DeviceMemory, Holder, HostBuffer
from hotstart.errors import DeviceError
from hotstart.units import format_size


class CpuDevice:
    """Allocations are anonymous mappings, committed by the kernel as they are touched."""

    host_memory = True

    def __init__(self) -> None:
        self.info = DeviceInfo(kind="cpu", index=0, name="CPU", total=host.memory().limit)
        self._regions: dict[int, mmap.mmap] = {}
        self._handles = itertools.count(1)
        self._lock = threading.Lock()

    def attach(self) -> None:
        """Nothing to bind."""

    def memory(self) -> DeviceMemory:
        """What the cgroup and the machine leave: see :func:`hotstart.device.host.memory`."""
        now = host.memory()
        return DeviceMemory(free=now.available, total=now.limit)

    def holders(self) -> list[Holder]:
        """Host memory has no owners of interest."""
        return []

    def allocate(self, nbytes: int) -> int:
        """A private anonymous mapping."""
        try:
            region = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise DeviceError(
                f"cannot reserve {format_size(nbytes)} of memory: {error}",
                advice="Raise the address-space limit (ulimit -v) or use a smaller model",
            ) from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        with self._lock:
            self._regions[address] = region
        return address

    def free(self, address: int) -> None:
        """The mapping goes when nobody exports its buffer any more."""
        with self._lock:
            del self._regions[address]

    def pinned(self, nbytes: int) -> HostBuffer:
        """Ordinary memory: nothing copies from it behind the CPU's back."""
        address = self.allocate(nbytes)
        return HostBuffer(address, view_of(address, nbytes))

    def unpin(self, buffer: HostBuffer) -> None:
        """Free a buffer from :meth:`pinned`."""
        self.free(buffer.address)

    def register(self, address: int, nbytes: int) -> None:
        """Nothing to lock."""

    def unregister(self, address: int) -> None:
        """Nothing to unlock."""

    def stream(self) -> int:
        """A number; copies do not queue."""
        return next(self._handles)

    def destroy_stream(self, stream: int) -> None:
        """Nothing to destroy."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy now."""
        ctypes.memmove(dst, src, nbytes)

    def copy_2d(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """Copy row by row, now."""
        for row in range(rows):
            ctypes.memmove(dst + row * dst_pitch, src + row * src_pitch, width)

    def synchronize(self, stream: int) -> None:
        """Copies are already done."""

    def event(self) -> int:
        """A number; it is always done."""
        return next(self._handles)

    def destroy_event(self, event: int) -> None:
        """Nothing to destroy."""

    def record(self, event: int, stream: int) -> None:
        """Copies before it are already done."""

    def done(self, event: int) -> bool:
        """Always."""
        return True

    def wait(self, event: int) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Drop all allocations."""
        with self._lock:
            self._regions.clear()


def view_of(address: int, nbytes: int) -> memoryview:
    """Writable bytes at an address of this process; the caller keeps the memory alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
