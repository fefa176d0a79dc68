"""A directory once more, through a real FUSE file system that can be slow, stubborn or broken.

``with mounted(directory, point, delay=0.005) as mount:`` serves it from a child process, which is this
file run as a program. It writes down each read that reaches it, so that tests can count and size them.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SUBTYPE = "slowfs"
"""``fuse.slowfs`` is what mountinfo calls it."""
_DEADLINE = 20.0


class Read(NamedTuple):
    """One read as it reached the file system."""

    name: str
    offset: int
    size: int
    handle: int
    """One for each time the file was opened."""


class Mount:
    """See :func:`mounted`."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.path = path
        self._process = process

    def reads(self) -> list[Read]:
        """Those so far, in the order in which they came."""
        return [Read(*each) for each in self._ask("reads")]

    def stuck(self) -> int:
        """Reads that wait now and are not answered."""
        return int(self._ask("stuck"))

    def answer(self) -> None:
        """Answer what is stuck, and everything from now on."""
        self._ask("answer")

    def kill(self) -> None:
        """The file system's own process is gone: every read fails from now on."""
        self._process.kill()
        self._process.wait(_DEADLINE)

    def unmount(self) -> None:
        """Take the mount away from under its readers, as ``umount -f`` does."""
        if os.geteuid() != 0:
            pytest.skip("only root unmounts by force")
        subprocess.run(["umount", "-f", "-l", self.path], check=True)

    def _ask(self, question: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(question.encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextlib.contextmanager
def mounted(
    directory: Path,
    point: Path,
    *,
    delay: float = 0.0,
    handle_rate: float = 0.0,
    direct: bool = True,
    mapped: bool = True,
    keeps_pages: bool = False,
    fails: tuple[str, int, int] | None = None,
    stuck_from: tuple[str, int, int] | None = None,
    stuck_after: int = 0,
) -> Iterator[Mount]:
    """Mount ``directory`` at ``point``; skips the test where this machine does not let it.

    ``delay``: seconds that each read takes, of any size. ``handle_rate``: bytes per second of one
    open file, however many files are open. ``direct``: False refuses O_DIRECT. ``mapped``: False
    refuses shared mappings (ENODEV). ``keeps_pages``: True leaves a file's pages
    in the page cache when it is opened again. ``fails``: name,
    offset and errno of reads that reach past the offset. ``stuck_from``: name, offset and the
    number of handles whose reads from there on are not answered. ``stuck_after``: once so many
    bytes were read, nothing is answered any more.
    """
    if importlib.util.find_spec("mfusepy") is None or ctypes.util.find_library("fuse3") is None:
        pytest.skip("mfusepy or libfuse3 is not installed")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be used here")
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        pytest.skip("fusermount3 (package fuse3) is not installed")
    options = {"delay": delay, "handle_rate": handle_rate, "direct": direct, "mapped": mapped, "fails": fails}
    options |= {"keeps_pages": keeps_pages}
    options |= {"stuck_from": stuck_from, "stuck_after": stuck_after}
    point.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, __file__, str(directory), str(point), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        _until_mounted(point, process)
        yield Mount(point, process)
    finally:
        process.kill()
        process.communicate(timeout=_DEADLINE)
        unmount = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
        subprocess.run([*unmount, str(point)], stderr=subprocess.DEVNULL, check=False)


def _until_mounted(point: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _DEADLINE
    while not os.path.ismount(point):
        if process.poll() is not None:
            assert process.stderr is not None
            said = process.stderr.read().decode(errors="replace").strip()
            pytest.skip(
                f"FUSE cannot be mounted here: {said.splitlines()[-1] if said else 'no reason given'}"
            )
        assert time.monotonic() < deadline, "the FUSE file system did not come up"
        time.sleep(0.005)


class _PassThrough:
    """The operations, called by several threads of libfuse."""

    use_ns = True

    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        self._directory = directory
        self._options = options
        self._lock = threading.Lock()
        self._reads: list[Read] = []
        self._total = 0
        self._free_at: dict[int, float] = {}
        self._stuck_handles: set[int] = set()
        self._stuck = 0
        self._answers = threading.Event()

    def converse(self) -> None:
        """Answer the parent's questions; its end is ours."""
        for line in sys.stdin:
            with self._lock:
                answers = {"reads": self._reads, "stuck": self._stuck, "answer": None}
            if line.strip() == "answer":
                self._answers.set()
            print(json.dumps(answers[line.strip()]), flush=True)
        os._exit(0)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        status = os.lstat(self._directory + path)
        names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_mtime_ns")
        found = {name: getattr(status, name) for name in names}
        found["st_mtime"] = found.pop("st_mtime_ns")
        return found

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._directory + path)]

    def readlink(self, path: str) -> str:
        return os.readlink(self._directory + path)

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_DIRECT and not self._options["direct"]:
            raise OSError(errno.EINVAL, "no direct reads")
        with self._lock:
            over = 0 < self._options["stuck_after"] < self._total
        if over:
            self._answers.wait()
        return os.open(self._directory + path, os.O_RDONLY)

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        with self._lock:
            self._free_at.pop(fh, None)
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        name = path[1:]
        with self._lock:
            self._reads.append(Read(name, offset, size, fh))
            self._total += size
            wait = self._options["delay"]
            if rate := self._options["handle_rate"]:
                now = time.monotonic()
                self._free_at[fh] = max(self._free_at.get(fh, 0.0), now) + size / rate
                wait += self._free_at[fh] - now
        self._perhaps_stick(name, size, offset, fh)
        if (fails := self._options["fails"]) and fails[0] == name and offset + size > fails[1]:
            raise OSError(fails[2], os.strerror(fails[2]))
        if wait:
            time.sleep(wait)
        return os.pread(fh, size, offset)

    def _perhaps_stick(self, name: str, size: int, offset: int, fh: int) -> None:
        with self._lock:
            after = self._options["stuck_after"]
            sticks = bool(after) and self._total > after
            where = self._options["stuck_from"]
            if where and where[0] == name and offset + size > where[1]:
                if len(self._stuck_handles) < where[2]:
                    self._stuck_handles.add(fh)
                sticks = sticks or fh in self._stuck_handles
            self._stuck += sticks
        if sticks:
            self._answers.wait()
            with self._lock:
                self._stuck -= 1


def _serve(directory: str, point: str, options: dict[str, Any]) -> None:
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")  # its reads are up to 1 MiB, the older one's 128 KiB
    import mfusepy

    operations = _PassThrough(directory, options)
    threading.Thread(target=operations.converse, daemon=True).start()
    mfusepy.FUSE(
        operations,
        point,
        foreground=True,
        ro=True,
        fsname="slow",
        subtype=SUBTYPE,
        direct_io=not options["mapped"],
        kernel_cache=options["keeps_pages"],
    )


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
