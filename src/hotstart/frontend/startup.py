"""The life of a server, as one object that the checks, the engine and the HTTP side share.

LOADING → READY → DRAINING → STOPPED
   │        │        │
   └────────┴────────┴──→ FAILED      (and LOADING → STOPPED on an early SIGTERM)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from hotstart.checkpoint.base import ModelFiles
from hotstart.errors import HotstartError
from hotstart.frontend.start import Text
from hotstart.messages import Ready


class State(Enum):
    """Where a server stands."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


_NEXT = {
    State.LOADING: {State.READY, State.STOPPED, State.FAILED},
    State.READY: {State.DRAINING, State.FAILED},
    State.DRAINING: {State.STOPPED, State.FAILED},
    State.STOPPED: set[State](),
    State.FAILED: set[State](),
}
_ENDED = (State.STOPPED, State.FAILED)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the checks found, once all passed."""

    files: ModelFiles
    text: Text
    served_names: tuple[str, ...]
    max_model_len: int | None
    """None: the engine decides, and says so when it is ready."""


class Startup:
    """Thread-safe. Listeners are called after every change, on the thread that made it.

    Any thread may :meth:`fail` it at any moment, so every other move says whether it came first.
    """

    def __init__(self) -> None:
        self.state = State.LOADING
        self.checked: Checked | None = None
        self.ready: Ready | None = None
        self.ready_at: float | None = None
        """When it became ready, by ``time.monotonic()``."""
        self.failed: tuple[HotstartError, ...] = ()
        self.engine_exit: str | None = None
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after every change from now on."""
        self._listeners.append(listener)

    def pass_checks(self, checked: Checked) -> None:
        """All checks passed, and the engine knows: held requests may be encoded and sent."""
        self.checked = checked
        self._tell()

    def fail(self, problems: Sequence[HotstartError]) -> None:
        """The start, or the running server, failed. The first call counts; later ones are ignored."""
        with self._lock:
            if self.state in _ENDED:
                return
            self.failed = tuple(problems)
            self._enter(State.FAILED)
        self._tell()

    def engine_exited(self, message: str) -> None:
        """The engine process is gone; ``message`` names the signal or exit code and the last error."""
        self.engine_exit = message
        self._tell()

    def become_ready(self, ready: Ready) -> bool:
        """One step went through the ordinary path. False when it is over already: stopped, or failed."""
        with self._lock:
            if self.state in _ENDED:
                return False
            self._enter(State.READY)
            self.ready, self.ready_at = ready, time.monotonic()
        self._tell()
        return True

    def drain(self) -> bool:
        """Admit nothing more; finish what runs. False when a failure came first."""
        return self._move(State.DRAINING)

    def stop(self) -> bool:
        """The end, without failure. False when a failure came first."""
        return self._move(State.STOPPED)

    @property
    def max_model_len(self) -> int | None:
        """The context in tokens, once known."""
        if self.ready is not None:
            return self.ready.max_model_len
        return self.checked.max_model_len if self.checked else None

    @property
    def exit_code(self) -> int:
        """The lowest code of what failed; 0 when nothing did."""
        return min((problem.exit_code for problem in self.failed), default=0)

    def _move(self, state: State) -> bool:
        with self._lock:
            if self.state is State.FAILED:
                return False
            self._enter(state)
        self._tell()
        return True

    def _enter(self, state: State) -> None:
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"a server that is {self.state.value} cannot become {state.value}")
        self.state = state

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
