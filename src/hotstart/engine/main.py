"""The engine process: one socket, one loop.

The parent sends the settings as the first frame, later :class:`~hotstart.messages.Go` once its
checks have passed; until then no weight byte is read, while torch is being imported. Requests may
arrive at any time: the first step is the oldest one's, or a one-token probe when none waits.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from hotstart.config.settings import Config, decode
from hotstart.errors import EngineError, HotstartError, ProblemsFound
from hotstart.messages import (
    AbortRequests,
    AddRequests,
    Control,
    ControlDone,
    Failed,
    Frames,
    FromEngine,
    Go,
    NewRequest,
    PhaseEvent,
    Ready,
    SamplingParams,
    ToEngine,
    decode_to_engine,
    frame,
    pack_ids,
)
from hotstart.timeline import Phase, Timeline, process_start

if TYPE_CHECKING:
    from hotstart.engine.assemble import Built, Prepared
    from hotstart.engine.core import Engine
    from hotstart.loading.image import Image

_PR_SET_PDEATHSIG = 1
_PROBE_ID = -1
_PROGRESS_EVERY = 0.1
"""Seconds between two progress events of the same phase."""


def main(fd: int, parent: int) -> None:
    """Entry point of the child: ``fd`` is its end of the socket pair, ``parent`` the parent's pid."""
    _die_with_parent(parent)
    # Whoever ends the server signals the frontend, which lets requests finish; a signal to the whole
    # group or control group must not cut them off.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    link = Link(socket.socket(fileno=fd))
    code = 0
    try:
        _run(link)
    except PeerGone:
        code = 0
    except BaseException as error:
        code = _report(link, error)
    # Not a return: reader threads may sit in a system call, and there is nothing to tidy up.
    sys.stderr.flush()
    os._exit(code)


class PeerGone(Exception):  # noqa: N818 - the other side ended, which is no error here
    """The frontend closed its end."""


class Link:
    """Framed messages over the socket. Sending is thread-safe; one thread at a time receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._send_lock = threading.Lock()
        self._frames = Frames()
        self._backlog: list[bytes] = []

    def settings(self) -> bytes:
        """Block for the first frame."""
        while not self._backlog:
            self._receive(block=True)
        return self._backlog.pop(0)

    def wait_for_go(self) -> None:
        """Block until the checks have passed; requests that come earlier are kept."""
        kept: list[bytes] = []
        while True:
            while self._backlog:
                body = self._backlog.pop(0)
                if isinstance(decode_to_engine(body), Go):
                    self._backlog[:0] = kept
                    return
                kept.append(body)
            self._receive(block=True)

    def messages(self, *, block: bool) -> list[ToEngine]:
        """What has arrived; with ``block``, at least one message."""
        while self._receive(block=block and not self._backlog):
            pass
        bodies, self._backlog = self._backlog, []
        return [decode_to_engine(body) for body in bodies]

    def send(self, message: FromEngine) -> None:
        """Send one message; raises PeerGone."""
        data = frame(message)
        with self._send_lock:
            try:
                self._socket.sendall(data)
            except OSError:
                raise PeerGone from None

    def _receive(self, *, block: bool) -> bool:
        """Read what is there; False when there was nothing."""
        if block:
            select.select([self._socket], [], [])
        try:
            data = self._socket.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            raise PeerGone from None
        if not data:
            raise PeerGone
        self._backlog += self._frames.feed(data)
        return True


def _run(link: Link) -> None:
    started = process_start()
    config = decode(link.settings())
    timeline = Timeline("engine")
    timeline.listen(_Forward(link))
    timeline.end(timeline.begin("python start", start=started))
    loading = _Loading(link, config, timeline)
    loading.start()
    with timeline.phase("import torch") as phase:
        from hotstart.engine.lean_torch import import_torch

        phase.detail = import_torch()
    prepared, image = loading.wait_for_plan()
    from hotstart.engine.assemble import build

    with timeline.phase("build model"):
        built = build(prepared, image)
    loading.wait_for_bytes()
    _serve(link, prepared, built, timeline)


class _Loading:
    """Plan at once, read when told to: a thread beside the import of torch."""

    def __init__(self, link: Link, config: Config, timeline: Timeline) -> None:
        self._link = link
        self._config = config
        self._timeline = timeline
        self._planned = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loading", daemon=True)
        self._error: BaseException | None = None
        self._prepared: Prepared | None = None
        self._image: Image | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wait_for_plan(self) -> tuple[Prepared, Image]:
        """Headers and plan; raises what went wrong."""
        self._planned.wait()
        self._raise()
        assert self._prepared is not None
        assert self._image is not None
        return self._prepared, self._image

    def wait_for_bytes(self) -> None:
        """Every weight byte is in memory."""
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._load()
        except BaseException as error:
            self._error = error
        finally:
            self._planned.set()

    def _load(self) -> None:
        from hotstart.engine.assemble import open_weights, prepare

        with self._timeline.phase("read headers"):
            prepared = prepare(self._config)
            image = open_weights(prepared, lambda done: self._timeline.progress(phase, done))
        self._prepared, self._image = prepared, image
        self._planned.set()
        self._link.wait_for_go()
        phase = self._timeline.begin("read weights", total=image.total)
        image.start()
        report = image.wait()
        phase.bytes = report.bytes
        self._timeline.end(phase, detail=f"{image.describe()}; {report}")


def _serve(link: Link, prepared: Prepared, built: Built, timeline: Timeline) -> None:
    engine = built.engine
    _take(link, engine, block=False)
    phase = timeline.begin("first step")
    probe = not engine.has_work
    if probe:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.add(NewRequest(_PROBE_ID, pack_ids([0]), params, time.monotonic()))
    output = engine.step()
    first = "probe" if probe else "held request"
    timeline.end(phase, detail=first)
    if output is not None and not probe:
        link.send(output)
    if probe:
        engine.blocks.reset()
    link.send(
        Ready(
            max_model_len=built.kv.max_model_len,
            max_num_seqs=prepared.max_num_seqs,
            max_num_batched_tokens=prepared.max_num_batched_tokens,
            dtype=built.dtype,
            device=built.device,
            kv_cache_bytes=built.kv.bytes,
            kv_cache_tokens=built.kv.tokens,
            block_size=16,
            weights_bytes=prepared.matched.nbytes,
            first_step=first,
        )
    )
    while True:
        _take(link, engine, block=not engine.has_work)
        output = engine.step()
        if output is not None:
            link.send(output)


def _take(link: Link, engine: Engine, *, block: bool) -> None:
    """Hand arrived messages to the engine."""
    for message in link.messages(block=block):
        if isinstance(message, AddRequests):
            for request in message.requests:
                engine.add(request)
        elif isinstance(message, AbortRequests):
            for request_id in message.ids:
                engine.abort(request_id)
        elif isinstance(message, Control):
            ok = message.op == "reset_prefix_cache" and engine.blocks.reset()
            link.send(ControlDone(message.op, ok))


class _Forward:
    """Timeline listener: phases go to the frontend, progress not more often than is useful."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sent: dict[str, float] = {}

    def __call__(self, phase: Phase) -> None:
        now = time.monotonic()
        known = phase.name in self._sent
        if known and phase.end is None and now - self._sent[phase.name] < _PROGRESS_EVERY:
            return
        self._sent[phase.name] = now
        with contextlib.suppress(PeerGone):
            self._link.send(PhaseEvent(phase))


def _report(link: Link, error: BaseException) -> int:
    """Tell the frontend why; returns the exit code."""
    if isinstance(error, ProblemsFound):
        problems = list(error.problems)
    elif isinstance(error, HotstartError):
        problems = [error]
    else:
        import traceback

        traceback.print_exception(error)
        problems = [
            EngineError(
                f"the engine failed: {type(error).__name__}: {error}",
                advice="This is a defect of hotstart; please report it with the traceback above",
            )
        ]
    with contextlib.suppress(PeerGone):
        link.send(Failed([(p.exit_code, p.found, p.expected, p.advice) for p in problems]))
    return min(p.exit_code for p in problems)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the parent dies, however it dies."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it died before the call
