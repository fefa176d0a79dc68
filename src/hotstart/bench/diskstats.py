"""Bytes that the disks of this machine have read, as the kernel counts them for each.

Whoever asked: what another process reads meanwhile is in, and so is what is read ahead of a file
and never asked for. Network file systems have no disk here.
"""

from __future__ import annotations

import os

_SECTOR = 512
"""Bytes of a sector in /proc/diskstats, whatever the device's own are."""
_MEMORY = ("loop", "ram", "zram")


def read_bytes() -> dict[str, int]:
    """By the name of each disk, since boot; empty where /proc does not say."""
    try:
        with open("/proc/diskstats", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return {}
    return {fields[2]: int(fields[5]) * _SECTOR for fields in lines if _is_disk(fields[2])}


def since(before: dict[str, int]) -> dict[str, int]:
    """What each disk has read since then; those that have read nothing are left out."""
    found = {name: total - before.get(name, total) for name, total in read_bytes().items()}
    return {name: grown for name, grown in found.items() if grown > 0}


def _is_disk(name: str) -> bool:
    """No partition, nothing in memory, and no volume that lies on disks which count already."""
    place = f"/sys/block/{name.replace('/', '!')}"
    if name.startswith(_MEMORY) or not os.path.exists(place):
        return False
    try:
        return not os.listdir(f"{place}/slaves")
    except OSError:
        return True
