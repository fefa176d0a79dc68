"""What this process may use of the machine: memory and cores, cgroup limits included.

Containers bound memory by cgroup, not by ``MemTotal``; sizing by the latter ends in the kernel's
out-of-memory killer. All readers take a ``root`` under which ``proc`` and ``sys`` are found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from msgspec import Struct

# A v1 limit that was never set is a huge page-rounded number, not a word.
_UNLIMITED = 1 << 60


class HostMemory(Struct, frozen=True):
    """Bytes."""

    limit: int
    """The least of the machine's memory and every cgroup limit above this process."""
    limited_by: str
    """``machine``, or the cgroup file that sets the limit."""
    available: int
    """What can be used now, clean file cache counted as free."""


class HostCores(Struct, frozen=True):
    """Cores this process may use."""

    count: int
    limited_by: str
    """``machine``, ``affinity``, or the cgroup file that sets the quota."""
    numa_nodes: tuple[int, ...]
    """Nodes that the allowed cores belong to; more than one means remote memory for some."""


def memory(root: str = "/") -> HostMemory:
    """Memory limit and what is left of it."""
    meminfo = _table(os.path.join(root, "proc/meminfo"), unit=1024)
    limit, limited_by = meminfo["MemTotal"], "machine"
    available = meminfo.get("MemAvailable", limit)
    for folder, version in _cgroup_folders(root, "memory"):
        names = ("memory.max", "memory.current", "") if version == 2 else _V1_MEMORY
        bound = _number(os.path.join(folder, names[0]))
        if bound is None or bound >= _UNLIMITED:
            continue
        if bound < limit:
            limit, limited_by = bound, _shown(os.path.join(folder, names[0]), root)
        used = _number(os.path.join(folder, names[1])) or 0
        stat = _table(os.path.join(folder, "memory.stat"))
        cache = stat.get(f"{names[2]}active_file", 0) + stat.get(f"{names[2]}inactive_file", 0)
        available = min(available, max(0, bound - used + cache))
    return HostMemory(limit, limited_by, min(available, limit))


def is_child(pid: int, root: str = "/") -> bool:
    """Whether a process is one that this process started."""
    # The name, in brackets, may contain anything; the state and the parent follow it.
    after = _text(os.path.join(root, f"proc/{pid}/stat")).rpartition(")")[2].split()
    return len(after) > 1 and after[1] == str(os.getpid())


_V1_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def cores(root: str = "/", *, affinity: frozenset[int] | None = None) -> HostCores:
    """Cores by affinity and cgroup quota; a quota of 1.5 cores counts as one."""
    allowed = frozenset(os.sched_getaffinity(0)) if affinity is None else affinity
    machine = len(_cpu_list(_text(os.path.join(root, "sys/devices/system/cpu/online"))))
    count, limited_by = len(allowed), "affinity" if len(allowed) < machine else "machine"
    for folder, version in _cgroup_folders(root, "cpu"):
        if version == 2:
            path = os.path.join(folder, "cpu.max")
            quota, _, period = _text(path).partition(" ")
        else:
            path = os.path.join(folder, "cpu.cfs_quota_us")
            quota, period = _text(path), _text(os.path.join(folder, "cpu.cfs_period_us"))
        if not quota.isdigit() or not period.isdigit():
            continue
        share = max(1, int(quota) // int(period))
        if share < count:
            count, limited_by = share, _shown(path, root)
    return HostCores(count, limited_by, _numa_nodes(root, allowed))


def _cgroup_folders(root: str, controller: str) -> Iterator[tuple[str, int]]:
    """(folder, cgroup version) from the process's own group up to the mount, for each hierarchy."""
    mounts = _cgroup_mounts(root)
    for line in _text(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            kind, version = "cgroup2", 2
        elif controller in controllers.split(","):
            kind, version = controller, 1
        else:
            continue
        if kind not in mounts:
            continue
        mount_root, mount_point = mounts[kind]
        # Without a cgroup namespace a container's path is the host's, while only its own part is mounted.
        inside = os.path.relpath(path, mount_root)
        if inside.startswith(".."):
            inside = "."
        top = os.path.join(root, mount_point.lstrip("/"))
        folder = os.path.normpath(os.path.join(top, inside))
        if not os.path.isdir(folder):
            folder = top
        while True:
            yield folder, version
            if folder == top:
                break
            folder = os.path.dirname(folder)


def _cgroup_mounts(root: str) -> dict[str, tuple[str, str]]:
    """``cgroup2``, or the v1 controller's name → (root inside the hierarchy, mount point)."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in _text(os.path.join(root, "proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 5 or len(right) < 3:
            continue
        if right[0] == "cgroup2":
            mounts.setdefault("cgroup2", (left[3], left[4]))
        elif right[0] == "cgroup":
            for name in right[2].split(","):
                mounts.setdefault(name, (left[3], left[4]))
    return mounts


def _numa_nodes(root: str, allowed: frozenset[int]) -> tuple[int, ...]:
    base = os.path.join(root, "sys/devices/system/node")
    try:
        names = os.listdir(base)
    except OSError:
        return ()
    nodes = [int(name[4:]) for name in names if name.startswith("node") and name[4:].isdigit()]
    return tuple(n for n in sorted(nodes) if allowed & _cpu_list(_text(f"{base}/node{n}/cpulist")))


def _cpu_list(text: str) -> frozenset[int]:
    """``0-3,8`` → {0, 1, 2, 3, 8}: the kernel's list format."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _table(path: str, unit: int = 1) -> dict[str, int]:
    """``Name: 12 kB`` and ``name 12`` lines, times ``unit``."""
    rows = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) * unit for row in rows if len(row) >= 2 and row[1].isdigit()}


def _number(path: str) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _text(path: str) -> str:
    """Contents, stripped; empty when the file is absent or not ours to read."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _shown(path: str, root: str) -> str:
    return "/" + os.path.relpath(path, root)
