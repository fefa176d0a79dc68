"""One GPU through the driver API, in the primary context, which torch will share."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_size_t, c_uint64, c_void_p

from hotstart.device import nvml
from hotstart.device.base import DeviceInfo, DeviceMemory, Holder, HostBuffer
from hotstart.device.cpu import view_of
from hotstart.device.driver import NOT_READY, Driver, Memcpy2D
from hotstart.errors import DeviceError
from hotstart.units import format_size

_HOST, _DEVICE = 1, 2
_PORTABLE = 1
_NON_BLOCKING = 1
# Threads that wait for a copy sleep instead of spinning: the cores belong to the import.
_BLOCKING_SYNC_NO_TIMING = 3


class CudaDevice:
    """A visible device of a :class:`Driver`. The first :meth:`attach` creates the context (0.35 s)."""

    host_memory = False

    def __init__(self, driver: Driver, info: DeviceInfo) -> None:
        self.info = info
        self._driver = driver
        self._call = driver.call
        self._context: c_void_p | None = None
        self._lock = threading.Lock()
        self._allocated: set[int] = set()

    def attach(self) -> None:
        """Retain the primary context once; make it the calling thread's."""
        with self._lock:
            if self._context is None:
                context = c_void_p()
                self._call("cuDevicePrimaryCtxRetain", byref(context), self._driver.handle(self.info.index))
                self._context = context
        self._call("cuCtxSetCurrent", self._context)

    def memory(self) -> DeviceMemory:
        """The driver's figures, other processes included."""
        self.attach()
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return DeviceMemory(free.value, total.value)

    def holders(self) -> list[Holder]:
        """As NVML tells; empty without it."""
        return nvml.holders(self.info.uuid)

    def allocate(self, nbytes: int) -> int:
        """cuMemAlloc; out of memory names what is free and who holds the rest."""
        address = c_uint64()
        try:
            self._call("cuMemAlloc_v2", byref(address), max(nbytes, 1))
        except DeviceError as error:
            memory = self.memory()
            held = ", ".join(f"{h.name or 'process'} {h.pid}: {format_size(h.bytes)}" for h in self.holders())
            raise DeviceError(
                f"cannot allocate {format_size(nbytes)} on {self.info}: {format_size(memory.free)} of"
                f" {format_size(memory.total)} are free" + (f" (held by {held})" if held else ""),
                advice=error.advice,
            ) from error
        with self._lock:
            self._allocated.add(address.value)
        return address.value

    def free(self, address: int) -> None:
        """cuMemFree; waits for the device."""
        with self._lock:
            self._allocated.remove(address)
        self._call("cuMemFree_v2", address)

    def pinned(self, nbytes: int) -> HostBuffer:
        """cuMemHostAlloc, 2 to 3 GB/s."""
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), nbytes, _PORTABLE)
        assert address.value is not None
        return HostBuffer(address.value, view_of(address.value, nbytes))

    def unpin(self, buffer: HostBuffer) -> None:
        """cuMemFreeHost; waits for the device."""
        self._call("cuMemFreeHost", buffer.address)

    def register(self, address: int, nbytes: int) -> None:
        """cuMemHostRegister: 0.33 s for 4 GiB of shared memory."""
        self._call("cuMemHostRegister_v2", address, nbytes, _PORTABLE)

    def unregister(self, address: int) -> None:
        """cuMemHostUnregister."""
        self._call("cuMemHostUnregister", address)

    def stream(self) -> int:
        """Not ordered with torch's default stream."""
        return self._create("cuStreamCreate", _NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        """cuStreamDestroy."""
        self._call("cuStreamDestroy_v2", stream)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """cuMemcpyHtoDAsync; asynchronous only from pinned memory."""
        self._call("cuMemcpyHtoDAsync_v2", dst, src, nbytes, stream)

    def copy_2d(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """cuMemcpy2DAsync: full bus speed from rows of 4 KiB on."""
        shape = Memcpy2D(
            srcMemoryType=_HOST,
            srcHost=src,
            srcPitch=src_pitch,
            dstMemoryType=_DEVICE,
            dstDevice=dst,
            dstPitch=dst_pitch,
            WidthInBytes=width,
            Height=rows,
        )
        self._call("cuMemcpy2DAsync_v2", ctypes.pointer(shape), stream)

    def synchronize(self, stream: int) -> None:
        """cuStreamSynchronize."""
        self._call("cuStreamSynchronize", stream)

    def event(self) -> int:
        """Without timing."""
        return self._create("cuEventCreate", _BLOCKING_SYNC_NO_TIMING)

    def destroy_event(self, event: int) -> None:
        """cuEventDestroy."""
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """cuEventRecord."""
        self._call("cuEventRecord", event, stream)

    def done(self, event: int) -> bool:
        """cuEventQuery."""
        status = self._driver.status("cuEventQuery", event)
        if status == NOT_READY:
            return False
        if status:
            self._call("cuEventSynchronize", event)
        return True

    def wait(self, event: int) -> None:
        """cuEventSynchronize, asleep."""
        self._call("cuEventSynchronize", event)

    def close(self) -> None:
        """Free what is left and release the context; it lives on while torch uses it."""
        if self._context is None:
            return
        self.attach()
        while self._allocated:
            self._call("cuMemFree_v2", self._allocated.pop())
        self._context = None
        self._call("cuDevicePrimaryCtxRelease_v2", self._driver.handle(self.info.index))

    def _create(self, name: str, flags: int) -> int:
        made = c_void_p()
        self._call(name, byref(made), flags)
        assert made.value is not None
        return made.value
