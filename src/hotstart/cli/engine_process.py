"""The engine as a child process: spawned first, watched, and explained when it dies."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

_CODE = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "from hotstart.engine.main import main; main({fd}, {parent})"
)
_NAMES = {
    signal.SIGKILL: "probably the kernel's out-of-memory killer, or a container's memory limit; see dmesg",
    signal.SIGBUS: "a mapped weight file shrank, or its device failed to deliver a page; see dmesg",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGILL: "an instruction that this processor lacks; was torch built for another machine?",
    signal.SIGABRT: "native code gave up; its reason stands above",
}


class EngineProcess:
    """A child at the other end of :attr:`socket`."""

    def __init__(self) -> None:
        """Spawn. Imports nothing beyond what an interpreter has loaded anyway."""
        ours, theirs = socket.socketpair()
        theirs.set_inheritable(True)
        # -c instead of -m: runpy would import the package a second way and cost 5 ms.
        code = _CODE.format(fd=theirs.fileno(), parent=os.getpid())
        self.pid = os.posix_spawn(sys.executable, [sys.executable, *_flags(), "-c", code], os.environ)
        theirs.close()
        self.socket = ours
        self._status: int | None = None

    def reap(self, timeout: float = 0.0) -> int | None:
        """The exit code as subprocess has it (-N: signal N); None while it runs after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline:
                return None
            else:
                time.sleep(0.005)
        return self._status

    def kill(self) -> None:
        """End it now, and wait until it is gone. It holds nothing that must be saved."""
        if self.reap() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.reap(timeout=10.0)
        self.socket.close()

    def how_it_ended(self) -> str:
        """One clause about an exit that nobody asked for."""
        status = self.reap(timeout=2.0)
        if status is None:
            return "the engine closed its connection but still runs"
        if status < 0:
            number = signal.Signals(-status)
            why = _NAMES.get(number, "sent by somebody")
            return f"the engine was killed by {number.name} ({why})"
        return f"the engine exited with code {status}"


def _flags() -> list[str]:
    """Interpreter switches that a child must share to see the same modules."""
    flags = []
    if sys.flags.isolated:
        flags.append("-I")
    if sys.flags.no_user_site:
        flags.append("-s")
    if sys.flags.ignore_environment:
        flags.append("-E")
    return flags
