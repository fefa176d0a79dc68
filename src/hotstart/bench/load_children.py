"""The processes of ``bench load``: each runs one loader once, when it is told to."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import msgspec

from hotstart.bench.load_loader import Measurement, Task

_PROGRAM = str(Path(__file__).with_name("load_process.py"))


class Child:
    """One process; it imports what it needs at once, and loads when :meth:`run` is called."""

    def __init__(self, task: Task) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._process = subprocess.Popen(
            [sys.executable, _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said
        )
        self._buffer = b""
        self._ready = False
        self._error = ""
        self._tell(msgspec.json.encode(task) + b"\n")

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._said):
            if file is not None:
                with suppress(OSError):
                    file.close()

    def ready(self, timeout: float) -> None:
        """Wait until its imports are done, or have failed."""
        if not self._ready and not self._error:
            self._ready = self._line(timeout) == b"ready"

    def run(self, timeout: float) -> Measurement:
        """Load now; what it fails with is in the result."""
        self.ready(timeout)
        if self._ready:
            self._tell(b"go\n")
            line = self._line(timeout)
            if line:
                with suppress(subprocess.TimeoutExpired):  # so that its memory is given back
                    self._process.wait(timeout)
                return msgspec.json.decode(line, type=Measurement)
        return Measurement(error=self._error)

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _line(self, timeout: float) -> bytes:
        """The next line of its answers; empty: there is an error."""
        assert self._process.stdout is not None
        fd, deadline = self._process.stdout.fileno(), time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self._error = f"not done after {timeout:g} s"
                self._process.kill()
                return b""
            if not (more := os.read(fd, 1 << 16)):
                self._process.wait()
                self._error = self._last_words()
                return b""
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        code = self._process.returncode
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        self._said.seek(0)
        text = self._said.read().decode(errors="replace")
        said = [line for line in text.splitlines() if line.strip()]
        return said[-1].strip()[:300] if said else f"exit code {code}"


def run_once(task: Task, timeout: float = 900.0) -> Measurement:
    """One loader in one process; what it fails with is in the result."""
    with Child(task) as child:
        return child.run(timeout)


def run_together(
    tasks: Sequence[Task], timeout: float, before: Callable[[Task], None]
) -> Iterator[Measurement]:
    """Imports at once, loads one after the other; ``before`` is called before each load."""
    with ExitStack() as stack:
        children = [stack.enter_context(Child(task)) for task in tasks]
        for child in children:
            child.ready(timeout)
        for task, child in zip(tasks, children, strict=True):
            before(task)
            yield child.run(timeout)
