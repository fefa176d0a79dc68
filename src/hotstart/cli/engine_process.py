"""The engine as a child process: spawned first, watched, and explained when it dies."""

from __future__ import annotations

import _socket
import _thread
import os
import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

_CODE = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "from hotstart.engine.main import main; main({fd}, {parent}, numpy={numpy})"
)
_HELD_BACK = (1, 2, 15)
"""SIGHUP, SIGINT, SIGTERM: blocked until the engine's interpreter is up and ignores them."""
_CAUSES = {
    "SIGKILL": "probably the kernel's out-of-memory killer, or a container's memory limit; see dmesg",
    "SIGBUS": "a mapped weight file shrank, or its device failed to deliver a page; see dmesg",
    "SIGSEGV": "a crash in native code",
    "SIGILL": "an instruction that this processor lacks; was torch built for another machine?",
    "SIGABRT": "native code gave up",
}


class EngineProcess:
    """A child at the other end of :attr:`socket`.

    Its stderr is a pipe, read by :meth:`relay`: what it and its libraries print goes through the
    log like everything else, and its last line explains a death that nothing else explains.
    """

    def __init__(self, *, numpy: bool = False) -> None:
        """Spawn, with what every interpreter has loaded: each import here would delay the engine's own.

        ``numpy``: torch must be able to work with it.
        """
        ours, theirs = _socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        self._stderr, stderr = os.pipe()
        # -c instead of -m: runpy would import the package a second way and cost 5 ms.
        code = _CODE.format(fd=theirs.fileno(), parent=os.getpid(), numpy=numpy)
        self.pid = os.posix_spawn(
            sys.executable,
            [sys.executable, *_flags(), "-c", code],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, stderr, 2)],
            setsigmask=_HELD_BACK,
        )
        theirs.close()
        os.close(stderr)
        import socket  # the engine runs: from here on an import delays nothing

        self.socket = socket.socket(fileno=ours.detach())
        """Our end of the pair."""
        self._status: int | None = None
        self._reaping = _thread.allocate_lock()
        self._relay: threading.Thread | None = None
        self._last_line = ""

    def relay(self, write: Callable[[str], object]) -> None:
        """Hand every line that the engine prints to ``write``, on a thread of its own."""
        import threading

        def read() -> None:
            with open(self._stderr, encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if line.strip():
                        self._last_line = line.strip()
                        write(line.rstrip())

        self._relay = threading.Thread(target=read, name="engine stderr", daemon=True)
        self._relay.start()

    def cpu_seconds(self) -> float:
        """CPU time it has used so far; 0 once it is gone."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def reap(self, timeout: float = 0.0) -> int | None:
        """The exit code as subprocess has it (-N: signal N); None while it runs after ``timeout`` seconds."""
        import time

        deadline = time.monotonic() + timeout
        while True:
            with self._reaping:  # a process can be waited for once, and two threads may ask
                if self._status is None:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    if pid:
                        self._status = os.waitstatus_to_exitcode(status)
            if self._status is not None or time.monotonic() >= deadline:
                return self._status
            time.sleep(0.005)

    def kill(self) -> None:
        """End it now, and wait until it is gone. It holds nothing that must be saved.

        One with a thread in a read that storage does not answer cannot go: that is not waited for.
        """
        if self.reap() is None:
            os.kill(self.pid, 9)
            if self.reap(timeout=1.0) is None and not self._sleeps_in_the_kernel():
                self.reap(timeout=9.0)

    def _sleeps_in_the_kernel(self) -> bool:
        """Whether a thread waits where no signal reaches it (state D)."""
        import contextlib

        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                with open(f"/proc/{self.pid}/task/{thread}/stat", "rb") as file:
                    if file.read().rpartition(b")")[2].split()[0] == b"D":
                        return True
        return False

    def until_it_ends(self) -> str:
        """Block until the process has ended; returns one clause about how."""
        import contextlib

        with contextlib.suppress(ChildProcessError):  # somebody else waits for it as well
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        status = self.reap(timeout=10.0)
        assert status is not None
        if self._relay is not None:
            self._relay.join(timeout=1.0)
        said = f"; the last it printed: {self._last_line}" if self._last_line else " and printed nothing"
        if status < 0:
            import signal

            name = signal.Signals(-status).name
            how = f"the engine was killed by {name} ({_CAUSES.get(name, 'sent by somebody')})"
            return how + (said if self._last_line else "")
        return f"the engine exited with code {status}{said}"


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
