"""All GPUs of the machine, hidden ones included, and who uses them.

NVML does not look at CUDA_VISIBLE_DEVICES, so it can say what an entry might have meant. It is a
convenience: where the library is absent, everything here is empty.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_uint, c_ulonglong, c_void_p
from typing import Any

from msgspec import Struct

from hotstart.device.base import Holder

LIBRARY = "libnvidia-ml.so.1"
_UNKNOWN_BYTES = (1 << 64) - 1


class MigSlice(Struct, frozen=True):
    """A MIG device."""

    uuid: str
    gpu_instance: int
    compute_instance: int


class PhysicalGpu(Struct, frozen=True):
    """A GPU as nvidia-smi lists it."""

    index: int
    uuid: str
    name: str
    slices: tuple[MigSlice, ...] = ()


def gpus() -> list[PhysicalGpu]:
    """Every GPU; empty where NVML is absent or fails."""
    with _library() as nvml:
        if nvml is None:
            return []
        count = c_uint()
        if nvml.nvmlDeviceGetCount_v2(byref(count)):
            return []
        found = []
        for index in range(count.value):
            handle = c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, byref(handle)) == 0:
                uuid, name = _text(nvml.nvmlDeviceGetUUID, handle), _text(nvml.nvmlDeviceGetName, handle)
                found.append(PhysicalGpu(index, uuid, name, tuple(_slices(nvml, handle))))
        return found


def holders(uuid: str) -> list[Holder]:
    """Processes with a context on the GPU or slice of this UUID."""
    with _library() as nvml:
        if nvml is None:
            return []
        handle = c_void_p()
        if nvml.nvmlDeviceGetHandleByUUID(c_char_p(uuid.encode()), byref(handle)):
            return []
        count = c_uint(256)
        rows = (_ProcessInfo * count.value)()
        if nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, byref(count), rows):
            return []
        return [
            Holder(row.pid, _process_name(row.pid), 0 if row.used == _UNKNOWN_BYTES else row.used)
            for row in rows[: count.value]
        ]


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = [
        ("pid", c_uint),
        ("used", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    ]


@contextmanager
def _library() -> Iterator[Any]:
    try:
        nvml = ctypes.CDLL(LIBRARY)
        ready = nvml.nvmlInit_v2() == 0
    except (OSError, AttributeError):
        ready = False
    if not ready:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _slices(nvml: Any, handle: c_void_p) -> Iterator[MigSlice]:
    most = c_uint()
    if nvml.nvmlDeviceGetMaxMigDeviceCount(handle, byref(most)):
        return
    for index in range(most.value):
        part, gpu, compute = c_void_p(), c_uint(), c_uint()
        if nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index, byref(part)):
            continue
        nvml.nvmlDeviceGetGpuInstanceId(part, byref(gpu))
        nvml.nvmlDeviceGetComputeInstanceId(part, byref(compute))
        yield MigSlice(_text(nvml.nvmlDeviceGetUUID, part), gpu.value, compute.value)


def _text(function: Any, handle: c_void_p) -> str:
    buffer = ctypes.create_string_buffer(96)
    return "" if function(handle, buffer, c_uint(len(buffer))) else buffer.value.decode(errors="replace")


def _process_name(pid: int) -> str:
    """Empty for a process of another namespace."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
