"""The torch-free view of a device: memory, streams, copies and events.

Addresses, streams and events are plain integers, as the CUDA driver has them. Weights flow through
this seam while torch is still being imported; torch later finds the bytes where they lie.

    CpuDevice     the host's own memory; copies happen at once
    FakeDevice    host memory, with CUDA's deferred copies, scripted free memory and failures
    CudaDevice    one GPU, through the driver API
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from hotstart.errors import DeviceError


class NoDriverError(DeviceError):
    """The driver's library is not installed."""


class DeviceInfo(Struct, frozen=True):
    """What a device is."""

    kind: str
    """``cpu``, ``cuda`` or ``fake``."""
    index: int
    """Its number among the visible ones: torch's ``cuda:N``."""
    name: str
    uuid: str = ""
    """``GPU-…`` or ``MIG-…``; empty on CPU."""
    mig: bool = False
    """A slice of a GPU."""
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability."""
    total: int = 0
    """Bytes of memory."""

    def __str__(self) -> str:
        if self.kind == "cpu":
            return self.name
        slice_of = " (MIG slice)" if self.mig else ""
        return f"cuda:{self.index} {self.name}{slice_of}, {self.uuid}"


class DeviceMemory(Struct, frozen=True):
    """Bytes, at this moment; ``free`` is what a new allocation may use."""

    free: int
    total: int


class Holder(Struct, frozen=True):
    """A process that holds device memory. ``bytes`` is 0 where the driver does not tell."""

    pid: int
    name: str
    bytes: int


class HostBuffer(Struct, frozen=True):
    """Host memory that the device can copy from without staging."""

    address: int
    view: memoryview
    """Writable, one byte per item."""


class Device(Protocol):
    """One device. Every method may raise DeviceError; all are safe to call from any thread.

    A thread calls :meth:`attach` once before it allocates, copies or uses events.
    """

    host_memory: bool
    """True: allocations are addresses of this process that the CPU can read."""
    info: DeviceInfo

    def attach(self) -> None:
        """Bind the calling thread to the device; the first call creates the context."""
        ...

    def memory(self) -> DeviceMemory:
        """Free and total bytes now."""
        ...

    def holders(self) -> list[Holder]:
        """Who holds memory on it, this process included; empty where that cannot be seen."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Address of ``nbytes`` of uninitialised memory, aligned to 256. Free it with :meth:`free`."""
        ...

    def free(self, address: int) -> None:
        """Give back what :meth:`allocate` returned."""
        ...

    def pinned(self, nbytes: int) -> HostBuffer:
        """Page-locked host memory. At most 64 MiB a call while imports run: pinning stops them."""
        ...

    def unpin(self, buffer: HostBuffer) -> None:
        """Give back a pinned buffer; its view must no longer be used."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory that exists already, such as a shared mapping."""
        ...

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`."""
        ...

    def stream(self) -> int:
        """A new queue of copies, independent of all others."""
        ...

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream once its work is done."""
        ...

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queue a copy from host to device. ``src`` must stay unchanged until an event says so."""
        ...

    def copy_2d(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """Queue a copy of ``rows`` rows of ``width`` bytes whose starts lie a pitch apart."""
        ...

    def synchronize(self, stream: int) -> None:
        """Block until the stream is empty."""
        ...

    def event(self) -> int:
        """A new event; it counts as done until it is recorded."""
        ...

    def destroy_event(self, event: int) -> None:
        """Destroy an event."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Mark the present end of the stream."""
        ...

    def done(self, event: int) -> bool:
        """Whether everything before the mark has run; never blocks."""
        ...

    def wait(self, event: int) -> None:
        """Block until everything before the mark has run; other threads keep running."""
        ...

    def close(self) -> None:
        """Free what is still allocated and leave the device."""
        ...
