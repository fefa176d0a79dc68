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
    """``machine``, or the cgroup file that sets the limit; that limits are unknown where /proc is absent."""
    available: int
    """What can be used now, clean file cache counted as free."""


def memory(root: str = "/") -> HostMemory:
    """Memory limit and what is left of it."""
    meminfo = _table(os.path.join(root, "proc/meminfo"), unit=1024)
    if "MemTotal" not in meminfo:
        return _without_proc()
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


def _without_proc() -> HostMemory:
    """By sysinfo(2), which knows no cgroups and counts no file cache as free."""
    page = os.sysconf("SC_PAGE_SIZE")
    limit, available = (os.sysconf(name) * page for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    return HostMemory(limit, "machine; no /proc tells the limit of a container", available)


def is_child(pid: int, root: str = "/") -> bool:
    """Whether a process is one that this process started."""
    # The name, in brackets, may contain anything; the state and the parent follow it.
    after = _text(os.path.join(root, f"proc/{pid}/stat")).rpartition(")")[2].split()
    return len(after) > 1 and after[1] == str(os.getpid())


_V1_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def cores(root: str = "/", *, affinity: frozenset[int] | None = None) -> int:
    """Cores this process may use, by affinity and cgroup quota; a quota of 1.5 cores counts as one."""
    count = len(os.sched_getaffinity(0) if affinity is None else affinity)
    for folder, version in _cgroup_folders(root, "cpu"):
        if version == 2:
            quota, _, period = _text(os.path.join(folder, "cpu.max")).partition(" ")
        else:
            quota = _text(os.path.join(folder, "cpu.cfs_quota_us"))
            period = _text(os.path.join(folder, "cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit():
            count = min(count, max(1, int(quota) // int(period)))
    return count


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
