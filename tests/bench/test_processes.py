"""A process tree as /proc shows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from hotstart.bench import processes

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


def test_cpu_time_grows_with_work(family: subprocess.Popen[str]) -> None:
    members = processes.tree(family.pid)
    assert processes.cpu_seconds(members) > 0
