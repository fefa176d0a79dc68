"""A device in host memory that behaves like CUDA where it matters to a caller.

Copies are queued and run only when someone waits for them, so a caller that reuses a buffer too
early loads wrong bytes here as it would there. Free memory can be scripted; any call can fail.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable

from hotstart.device.base import DeviceInfo, DeviceMemory, Holder, HostBuffer
from hotstart.device.cpu import CpuDevice, view_of
from hotstart.errors import DeviceError


class FakeDevice(CpuDevice):
    """``free`` scripts successive answers of :meth:`memory`; the last one stays.

    ``fail`` maps a method's name to the number of its call (from 1) that raises DeviceError.
    ``calls`` records ``(method, arguments…)`` of copies and events. ``holders`` are other processes;
    ``context`` is what ours takes in bytes from the first :meth:`attach` on.
    """

    def __init__(
        self,
        *,
        total: int = 8 << 30,
        free: Iterable[int] = (),
        fail: dict[str, int] | None = None,
        holders: Iterable[Holder] = (),
        context: int = 0,
        capability: tuple[int, int] = (9, 0),
    ) -> None:
        super().__init__()
        self.info = DeviceInfo("fake", 0, "fake device", "GPU-fake", False, capability, total)
        self.calls: list[tuple[object, ...]] = []
        self._free = deque(free)
        self._fail = dict(fail or {})
        self._counts: dict[str, int] = {}
        self._others = list(holders)
        self._context = context
        self._attached = False
        self._sizes: dict[int, int] = {}
        self._queues: dict[int, deque[tuple[int, ...]]] = {}
        self._marks: dict[int, int] = {}
        self._guard = threading.RLock()

    @property
    def allocated(self) -> int:
        """Bytes that were allocated and not freed."""
        return sum(self._sizes.values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned buffers that were not given back."""
        return sum(len(region) for address, region in self._regions.items() if address not in self._sizes)

    def attach(self) -> None:
        """The first one makes the context."""
        self._attached = True

    def memory(self) -> DeviceMemory:
        """The next scripted figure, or what is left of the total."""
        self._count("memory")
        self.attach()
        if self._free:
            free = self._free.popleft() if len(self._free) > 1 else self._free[0]
            return DeviceMemory(free, self.info.total)
        held = sum(holder.bytes for holder in self.holders())
        return DeviceMemory(self.info.total - held, self.info.total)

    def holders(self) -> list[Holder]:
        """The others, and this process once it has a context."""
        ours = [Holder(os.getpid(), "ours", self._context + self.allocated)] if self._attached else []
        return [*self._others, *ours]

    def allocate(self, nbytes: int) -> int:
        """Fails as a GPU does when the total is exceeded."""
        self._count("allocate")
        if nbytes > self.info.total - self.allocated:
            raise DeviceError(f"out of memory allocating {nbytes} bytes on the fake device")
        address = super().allocate(nbytes)
        with self._guard:
            self._sizes[address] = nbytes
        return address

    def free(self, address: int) -> None:
        """Free an allocation or a pinned buffer."""
        with self._guard:
            self._sizes.pop(address, None)
        super().free(address)

    def pinned(self, nbytes: int) -> HostBuffer:
        """Does not count against device memory."""
        self._count("pinned")
        address = CpuDevice.allocate(self, nbytes)
        return HostBuffer(address, view_of(address, nbytes))

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queue."""
        self._count("copy", dst, src, nbytes, stream)
        self._push(stream, (dst, nbytes, src, nbytes, nbytes, 1))

    def copy_2d(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """Queue."""
        self._count("copy_2d", dst, dst_pitch, src, src_pitch, width, rows, stream)
        self._push(stream, (dst, dst_pitch, src, src_pitch, width, rows))

    def synchronize(self, stream: int) -> None:
        """Run the stream's queue to its end."""
        self._count("synchronize", stream)
        self._run(stream)

    def record(self, event: int, stream: int) -> None:
        """Queue a mark."""
        self._count("record", event, stream)
        with self._guard:
            self._marks[event] = stream
            self._push(stream, (event,))

    def done(self, event: int) -> bool:
        """True once its mark has run; asking runs nothing."""
        with self._guard:
            return event not in self._marks

    def wait(self, event: int) -> None:
        """Run the stream's queue up to the mark."""
        self._count("wait", event)
        with self._guard:
            stream = self._marks.get(event)
            if stream is not None:
                self._run(stream, until=event)

    def _push(self, stream: int, item: tuple[int, ...]) -> None:
        with self._guard:
            self._queues.setdefault(stream, deque()).append(item)

    def _run(self, stream: int, until: int | None = None) -> None:
        with self._guard:
            queue = self._queues.get(stream, deque())
            while queue:
                item = queue.popleft()
                if len(item) == 1:
                    self._marks.pop(item[0], None)
                    if item[0] == until:
                        return
                else:
                    dst, dst_pitch, src, src_pitch, width, rows = item
                    super().copy_2d(dst, dst_pitch, src, src_pitch, width, rows, stream)

    def _count(self, method: str, *arguments: object) -> None:
        with self._guard:
            self.calls.append((method, *arguments))
            self._counts[method] = self._counts.get(method, 0) + 1
            if self._fail.get(method) == self._counts[method]:
                raise DeviceError(f"the fake device fails at call {self._counts[method]} of {method}")
