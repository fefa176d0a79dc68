"""The engine as a child process: spawned first, watched, and explained when it dies."""

from __future__ import annotations

import _socket
import os
import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    import socket

_CODE = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "from hotstart.engine.main import main; main({fd}, {parent})"
)
_CAUSES = {
    "SIGKILL": "probably the kernel's out-of-memory killer, or a container's memory limit; see dmesg",
    "SIGBUS": "a mapped weight file shrank, or its device failed to deliver a page; see dmesg",
    "SIGSEGV": "a crash in native code",
    "SIGILL": "an instruction that this processor lacks; was torch built for another machine?",
    "SIGABRT": "native code gave up; its reason stands above",
}


class EngineProcess:
    """A child at the other end of :attr:`socket`."""

    def __init__(self) -> None:
        """Spawn, with what every interpreter has loaded: each import here would delay the engine's own."""
        ours, theirs = _socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        # -c instead of -m: runpy would import the package a second way and cost 5 ms.
        code = _CODE.format(fd=theirs.fileno(), parent=os.getpid())
        self.pid = os.posix_spawn(sys.executable, [sys.executable, *_flags(), "-c", code], os.environ)
        theirs.close()
        self._fd = ours.detach()
        self._socket: socket.socket | None = None
        self._status: int | None = None

    @property
    def socket(self) -> socket.socket:
        """Our end of the pair."""
        if self._socket is None:
            import socket

            self._socket = socket.socket(fileno=self._fd)
        return self._socket

    def reap(self, timeout: float = 0.0) -> int | None:
        """The exit code as subprocess has it (-N: signal N); None while it runs after ``timeout`` seconds."""
        import time

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
            os.kill(self.pid, 9)
            self.reap(timeout=10.0)

    def until_it_ends(self) -> str:
        """Block until the process has ended; returns one clause about how."""
        import contextlib

        with contextlib.suppress(ChildProcessError):  # somebody else waits for it as well
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        status = self.reap(timeout=10.0)
        assert status is not None
        if status < 0:
            import signal

            name = signal.Signals(-status).name
            return f"the engine was killed by {name} ({_CAUSES.get(name, 'sent by somebody')})"
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
