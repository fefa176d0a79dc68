"""The entry point of the engine process.

It imports next to nothing, so that the two things that take time begin at once, side by side:
``import torch`` on the main thread, and everything else of a start on another.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

OPENMP_SPINS = "3000"
_PR_SET_PDEATHSIG = 1


def main(fd: int, parent: int, *, numpy: bool = False) -> None:
    """Run as the child whose end of the socket pair is ``fd``; never returns.

    ``numpy``: torch must be able to work with it, for a loader of another library does.
    """
    _die_with_parent(parent)
    _stand_somewhere()
    # Whoever ends the server signals the frontend, which lets requests finish; a signal to the whole
    # process group or control group must not cut them off.
    ignored = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    _calm_openmp()
    torch = TorchImport(numpy)
    loader = threading.Thread(target=_start, args=(fd, torch), name="start", daemon=True)
    loader.start()
    torch.run()
    loader.join()


class TorchImport:
    """``import torch`` on the main thread; others wait for it where they first need a tensor."""

    def __init__(self, numpy: bool = False) -> None:
        self._numpy = numpy
        self.began = time.monotonic()
        self.ended = 0.0
        self.how = ""
        self._error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """Import; an error is kept for whoever waits."""
        try:
            from hotstart.engine.lean_torch import import_torch

            self.how = import_torch(numpy=self._numpy)
        except BaseException as error:
            self._error = error
        self.ended = time.monotonic()
        self._done.set()

    def wait(self) -> None:
        """Return when torch is there; raises what its import raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


def _stand_somewhere() -> None:
    """Leave a working directory that was deleted: libraries of torch find theirs from where they stand."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def _calm_openmp() -> None:
    """Let OpenMP's threads wait for each other without burning the core that the other one needs.

    By default they spin for milliseconds at each of some 150 barriers a token. Measured on two cores,
    demo model, ms a token: alone 21 with the default and with 3000, 25 with 1000; beside a process
    that takes one core 56 with 3000 and steady, while spins of 10 000 to 100 000 give 80 to 350, and
    the default now 45, now 1600. Read when the library is loaded, so before torch.
    """
    if not any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")):
        os.environ["GOMP_SPINCOUNT"] = OPENMP_SPINS


def _start(fd: int, torch: TorchImport) -> None:
    code = 1
    try:
        from hotstart.engine.process import run

        code = run(socket.socket(fileno=fd), torch)
    except BaseException:
        import traceback

        traceback.print_exc()
    # Not a return: reader threads may sit in system calls, and there is nothing to tidy up.
    sys.stderr.flush()
    os._exit(code)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the parent dies, however it dies."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it died before the call
