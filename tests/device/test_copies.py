"""Devices in host memory: allocations, copies, and the order that streams and events promise."""

from __future__ import annotations

import pytest

from hotstart.device.cpu import CpuDevice, view_of
from hotstart.device.fake import FakeDevice
from hotstart.errors import DeviceError


@pytest.fixture(params=[CpuDevice, FakeDevice])
def device(request: pytest.FixtureRequest) -> CpuDevice:
    made: CpuDevice = request.param()
    return made


def test_a_copy_is_there_once_its_event_is_done(device: CpuDevice) -> None:
    buffer, target, stream, event = device.pinned(8), device.allocate(8), device.stream(), device.event()
    buffer.view[:] = b"12345678"
    device.copy(target + 2, buffer.address, 4, stream)
    device.record(event, stream)
    device.wait(event)
    assert device.done(event)
    assert bytes(view_of(target, 8)) == b"\0\x001234\0\0"


def test_rows_are_copied_between_pitches(device: CpuDevice) -> None:
    buffer, target, stream = device.pinned(12), device.allocate(8), device.stream()
    buffer.view[:] = b"ab..cd..ef.."
    device.copy_2d(target, 3, buffer.address, 4, 2, 3, stream)
    device.synchronize(stream)
    assert bytes(view_of(target, 8)) == b"ab\0cd\0ef"


def test_memory_counts_what_is_allocated_on_the_fake() -> None:
    device = FakeDevice(total=1000)
    first = device.allocate(600)
    assert device.memory().free == 400
    with pytest.raises(DeviceError, match="out of memory"):
        device.allocate(401)
    device.free(first)
    assert device.memory().free == 1000


def test_free_memory_can_be_scripted() -> None:
    device = FakeDevice(free=[100, 50])
    assert [device.memory().free for _ in range(3)] == [100, 50, 50]


def test_the_fake_defers_copies_until_someone_waits() -> None:
    device = FakeDevice()
    buffer, target, stream, event = device.pinned(1), device.allocate(1), device.stream(), device.event()
    buffer.view[:] = b"x"
    device.copy(target, buffer.address, 1, stream)
    device.record(event, stream)
    assert not device.done(event)
    buffer.view[:] = b"y"
    device.wait(event)
    assert bytes(view_of(target, 1)) == b"y"


def test_waiting_for_an_event_leaves_later_copies_queued() -> None:
    device = FakeDevice()
    buffer, target, stream = device.pinned(2), device.allocate(2), device.stream()
    first, second = device.event(), device.event()
    buffer.view[:] = b"xy"
    device.copy(target, buffer.address, 1, stream)
    device.record(first, stream)
    device.copy(target + 1, buffer.address + 1, 1, stream)
    device.record(second, stream)
    device.wait(first)
    assert (device.done(first), device.done(second)) == (True, False)
    assert bytes(view_of(target, 2)) == b"x\0"
