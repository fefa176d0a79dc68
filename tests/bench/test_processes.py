"""A process tree as /proc shows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotstart.bench import processes
from hotstart.storage.residency import evict, resident_fraction

# A parent, its child and its grandchild in a session of its own; the last one says when it is there.
FAMILY = """
import subprocess, sys
last = "print('here', flush=True); import signal; signal.pause()"
child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {last!r}], start_new_session=True)"
subprocess.run([sys.executable, "-c", child])
"""


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "here\n"
        yield parent
        processes.end(processes.tree(parent.pid))


def test_tree_holds_descendants_of_other_sessions_too(family: subprocess.Popen[str]) -> None:
    assert len(processes.tree(family.pid)) == 3


def test_orphans_of_the_group_still_belong_to_the_tree(family: subprocess.Popen[str]) -> None:
    members = processes.tree(family.pid)
    family.kill()
    family.wait()
    child, grandchild = (member for member in members if member.pid != family.pid)
    assert processes.tree(family.pid) == sorted([child, grandchild])


def test_ended_processes_are_gone(family: subprocess.Popen[str]) -> None:
    members = processes.tree(family.pid)
    processes.end(members)
    family.wait()
    assert processes.wait_until_gone(members, 10) == []


def test_memory_shared_by_a_tree_is_counted_once(family: subprocess.Popen[str]) -> None:
    members = processes.tree(family.pid)
    each = [processes.pss([member]) for member in members]
    assert all(size > 0 for size in each)
    assert processes.pss(members) == pytest.approx(sum(each), rel=0.2)


def test_peak_memory_is_added_up_over_the_tree(family: subprocess.Popen[str]) -> None:
    members = processes.tree(family.pid)
    each = [processes.peak_rss([member]) for member in members]
    assert all(peak > 1 << 20 for peak in each)
    assert processes.peak_rss(members) >= sum(each)


def test_reads_of_children_that_have_ended_still_count(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(1 << 22))
    evict(str(path))
    if resident_fraction(str(path)) != 0.0:
        pytest.skip("this file system keeps its files in memory, or does not say")
    program = (
        f"import signal, subprocess; subprocess.run(['cat', {str(path)!r}], stdout=subprocess.DEVNULL); "
    )
    program += "print('read', flush=True); signal.pause()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "read\n"
        read = processes.read_bytes(processes.tree(parent.pid))
        processes.end(processes.tree(parent.pid))
    assert read is not None
    assert read >= 1 << 22


def test_reads_of_processes_that_have_gone_are_not_told(family: subprocess.Popen[str]) -> None:
    [parent] = [member for member in processes.tree(family.pid) if member.pid == family.pid]
    processes.end(processes.tree(family.pid))
    family.wait()
    assert processes.read_bytes([parent]) is None


def test_cpu_time_grows_with_work(family: subprocess.Popen[str]) -> None:
    members = processes.tree(family.pid)
    assert processes.cpu_seconds(members) > 0
