"""Memory that is not there until it is touched shows by what the first access takes."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from hotstart.loading import first_touch
from hotstart.loading.first_touch import FirstTouch, touch

PAGE = mmap.PAGESIZE


def test_touching_reads_a_byte_of_each_page() -> None:
    memory = mmap.mmap(-1, 8 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert touch(address, 8) > 0


def test_pages_that_are_not_there_are_no_crash() -> None:
    assert touch(PAGE, 8) == 0  # where nothing is mapped


@pytest.mark.parametrize(("seconds", "slow"), [(3e-6, True), (2e-7, False), (0.0, False)])
def test_pages_that_take_microseconds_each_are_not_there(
    seconds: float, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_touch, "touch", lambda address, pages: pages * seconds)
    memory = FirstTouch()
    memory.sample(0, 64 * PAGE)
    assert not memory.slow  # once may have been a busy processor
    memory.sample(0, 64 * PAGE)
    assert memory.slow is slow
