"""CUDA_VISIBLE_DEVICES, checked entry by entry.

The driver stops reading at the first entry it does not know and says nothing; a server would then
start on fewer GPUs, or on none. Here such an entry is an error that names it and what exists.
"""

from __future__ import annotations

from hotstart.device.nvml import PhysicalGpu
from hotstart.errors import DeviceError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def entries(value: str) -> list[str]:
    """The entries that count, blanks removed: those before a ``-1``, which hides the rest.

    Raises DeviceError for an empty entry between others.
    """
    if not value.strip():
        return []
    found: list[str] = []
    for entry in value.split(","):
        entry = entry.strip()
        if entry == "-1":
            break
        if not entry:
            raise _wrong(value, "has an empty entry", [])
        found.append(entry)
    return found


def check(value: str, existing: list[PhysicalGpu]) -> list[str]:
    """The UUIDs that the value names, in its order.

    Entries may be an index, a UUID, the beginning of a UUID, or a MIG id in either form
    (``MIG-<uuid>``, ``MIG-<GPU uuid>/<GPU instance>/<compute instance>``).
    Raises DeviceError for an entry that names nothing, several devices, or one named before.
    """
    chosen: list[str] = []
    for entry in entries(value):
        matches = _matches(entry, existing)
        if not matches:
            raise unknown(value, entry, existing)
        if len(matches) > 1:
            raise _wrong(value, f"has the entry {entry!r}, which fits {' and '.join(matches)}", existing)
        if matches[0] in chosen:
            raise _wrong(value, f"names {matches[0]} twice (the second time as {entry!r})", existing)
        chosen += matches
    return chosen


def unknown(value: str, entry: str, existing: list[PhysicalGpu]) -> DeviceError:
    """The error for an entry that names nothing; ``existing`` may be empty when NVML is absent."""
    return _wrong(value, f"has the entry {entry!r}, which names no device", existing)


def _matches(entry: str, existing: list[PhysicalGpu]) -> list[str]:
    if entry.isascii() and entry.isdigit():
        return [gpu.uuid for gpu in existing if gpu.index == int(entry)]
    wanted = entry.lower()
    if wanted.startswith("gpu-") and len(wanted) > 4:
        return [gpu.uuid for gpu in existing if gpu.uuid.lower().startswith(wanted)]
    if wanted.startswith("mig-gpu-"):
        return [
            part.uuid
            for gpu in existing
            for part in gpu.slices
            if f"mig-{gpu.uuid}/{part.gpu_instance}/{part.compute_instance}".lower() == wanted
        ]
    if wanted.startswith("mig-") and len(wanted) > 4:
        return [p.uuid for gpu in existing for p in gpu.slices if p.uuid.lower().startswith(wanted)]
    return []


def _wrong(value: str, what: str, existing: list[PhysicalGpu]) -> DeviceError:
    names = [f"{gpu.index} {gpu.uuid} {gpu.name}" for gpu in existing]
    names += [part.uuid for gpu in existing for part in gpu.slices]
    return DeviceError(
        f"{VARIABLE}={value!r} {what}",
        expected="indexes, GPU UUIDs or MIG ids with commas between",
        advice=f"This machine has: {'; '.join(names)}" if names else "nvidia-smi -L lists what exists",
    )
