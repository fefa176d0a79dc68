"""A process tree as /proc shows it: who is in it, its memory, its reads, its CPU time."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import NamedTuple


class Process(NamedTuple):
    """A process that cannot be confused with a later one of the same number."""

    pid: int
    started: int
    """Clock ticks since boot."""


class _Stat(NamedTuple):
    parent: int
    group: int
    started: int
    state: str


def tree(root: int) -> list[Process]:
    """``root``, its descendants, and whoever is in its process group (orphans of it included)."""
    stats = {pid: stat for pid in _pids() if (stat := _stat(pid)) is not None}
    members = {pid for pid, stat in stats.items() if pid == root or stat.group == root}
    grown = True
    while grown:
        more = {pid for pid, stat in stats.items() if stat.parent in members} - members
        members |= more
        grown = bool(more)
    return sorted(Process(pid, stats[pid].started) for pid in members if stats[pid].state != "Z")


def alive(processes: list[Process]) -> list[Process]:
    """Those that still run; zombies do not."""
    current = ((process, _stat(process.pid)) for process in processes)
    return [p for p, stat in current if stat is not None and stat.started == p.started and stat.state != "Z"]


def end(processes: list[Process]) -> None:
    """SIGKILL each that still runs."""
    for process in alive(processes):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def wait_until_gone(processes: list[Process], seconds: float) -> list[Process]:
    """Those that are left after at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while (left := alive(processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def pss(processes: list[Process]) -> int:
    """Bytes of memory: each page divided by the number of processes that map it, so shared ones count once.

    Source: ``Pss`` of /proc/PID/smaps_rollup. A process that has gone counts 0.
    """
    total = 0
    for process in processes:
        try:
            with open(f"/proc/{process.pid}/smaps_rollup", "rb") as file:
                fields = dict(line.split(b":", 1) for line in file.read().splitlines()[1:])
        except (OSError, ValueError):
            continue
        total += int(fields.get(b"Pss", b"0 kB").split()[0]) * 1024
    return total


def peak_rss(processes: list[Process]) -> int:
    """Bytes: the greatest resident memory of each that still runs, added up; what is shared counts in each.

    Source: ``VmHWM`` of /proc/PID/status, which the kernel keeps at no cost to the process.
    """
    return sum(_field(process.pid, "status", b"VmHWM") for process in processes) * 1024


def read_bytes(processes: list[Process]) -> int | None:
    """Bytes that these, and the children they have waited for, made the storage read; None: not told.

    Source: ``read_bytes`` of /proc/PID/io. What the page cache held is not in it; pages that are read
    by touching a mapping are.
    """
    found = [_field(process.pid, "io", b"read_bytes", missing=-1) for process in processes]
    told = [value for value in found if value >= 0]
    return sum(told) if told else None


def _field(pid: int, file: str, name: bytes, *, missing: int = 0) -> int:
    """A number of /proc/PID/FILE."""
    with suppress(OSError), open(f"/proc/{pid}/{file}", "rb") as lines:
        for line in lines:
            key, _, value = line.partition(b":")
            if key == name:
                return int(value.split()[0])
    return missing


def cpu_seconds(processes: list[Process]) -> float:
    """CPU time of all threads so far, from /proc/PID/task/TID/schedstat (nanoseconds)."""
    return sum(_nanoseconds(process.pid) for process in processes) / 1e9


def _nanoseconds(pid: int) -> int:
    total = 0
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
                total += int(file.read().split()[0])
    return total


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return _Stat(int(fields[1]), int(fields[2]), int(fields[19]), fields[0].decode())
