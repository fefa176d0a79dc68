"""What the engine process does: plan, read when told to, build, step.

The parent sends the settings as the first frame, what it found in the headers of the weight files, and
:class:`~hotstart.messages.Go` once its checks have passed; no weight byte is read before. Requests may
arrive at any time: the first step is the oldest one's, or a one-token probe when none waits.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from hotstart.config.cache_root import compiler_caches
from hotstart.config.settings import decode
from hotstart.engine.spare_time import SpareTime
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
    LogEvent,
    NewRequest,
    PhaseEvent,
    Ready,
    SamplingParams,
    ToEngine,
    WeightFiles,
    decode_to_engine,
    frame,
    pack_ids,
)
from hotstart.timeline import Phase, Timeline, process_start

if TYPE_CHECKING:
    from hotstart.device.choose import DeviceChoice
    from hotstart.engine.assemble import Built, Prepared
    from hotstart.engine.core import Engine
    from hotstart.engine.main import TorchImport
    from hotstart.loading.afterwards import Afterwards

_PROBE_ID = -1
_PROGRESS_EVERY = 0.1
"""Seconds between two progress events of the same phase."""


def run(connection: socket.socket, torch: TorchImport) -> int:
    """Start and serve until the frontend closes its end; returns the exit code."""
    link = Link(connection)
    try:
        _start(link, torch)
    except PeerGone:
        return 0
    except BaseException as error:
        return _report(link, error)


def _start(link: Link, torch: TorchImport) -> NoReturn:
    timeline = Timeline("engine")
    timeline.listen(_Forward(link))
    timeline.end(timeline.begin("python start", start=process_start()), at=torch.began)
    importing = timeline.begin("import torch", start=torch.began)
    config = decode(link.settings())
    os.environ.update(compiler_caches(config.cache_root, os.environ))
    from hotstart.engine.assemble import build, follow_up, prepare

    try:
        with timeline.phase("read headers"):
            prepared = prepare(config, link.weight_files)
            weights = prepared.placement.weights(prepared, lambda done: timeline.progress(reading, done))
            afterwards = follow_up(prepared, link.say)
    except HotstartError:
        # The frontend's checks meet the same problem, and report it together with all others.
        link.wait_for_go()
        raise
    link.wait_for_go()
    reading = timeline.begin("read weights", total=weights.total)
    if afterwards is not None:
        afterwards.start(weights.follow(afterwards))
    weights.start(lambda report: timeline.end(reading, detail=f"{weights.describe()}; {report}"))
    _log_device(link, prepared.placement.choice)
    _log_dtype(link, prepared)
    torch.wait()
    timeline.end(importing, at=torch.ended, detail=torch.how)
    with timeline.phase("build model"):
        built = build(prepared, weights)
    weights.wait()
    if afterwards is not None and afterwards.compares:
        with timeline.phase("compare digests"):
            afterwards.confirm()
    _serve(link, prepared, built, timeline, afterwards)


def _serve(
    link: Link, prepared: Prepared, built: Built, timeline: Timeline, afterwards: Afterwards | None
) -> NoReturn:
    engine = built.engine
    _take(link, engine, block=False)
    phase = timeline.begin("first step")
    probe = not engine.has_work
    if probe:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.add(NewRequest(_PROBE_ID, pack_ids([0]), params))
    output = engine.step()
    first = "probe" if probe else "held request"
    timeline.end(phase, detail=first)
    if output is not None and not probe:
        link.send(output)
    if probe:
        engine.blocks.reset()
    link.send(built.weights.stats())
    link.send(
        Ready(
            max_model_len=built.kv.max_model_len,
            max_num_seqs=prepared.max_num_seqs,
            max_num_batched_tokens=prepared.max_num_batched_tokens,
            dtype=prepared.matched.dtype,
            device=built.device,
            kv_cache_bytes=built.kv.bytes,
            kv_cache_tokens=built.kv.tokens,
            kv_cache_reason=built.kv.reason,
            block_size=built.block_size,
            weights_bytes=prepared.matched.nbytes,
            first_step=first,
        )
    )
    if afterwards is not None:
        afterwards.copied = lambda copied: _tell_copied(link, built, copied)
        afterwards.go_on()
    spare = SpareTime(built.tune(), (_freeze, built.weights.close), link.wait)
    while True:
        spare.use(busy=engine.has_work)
        _take(link, engine, block=not engine.has_work)
        output = engine.step()
        if output is not None:
            link.send(output)


def _log_device(link: Link, choice: DeviceChoice) -> None:
    import logging

    link.send(LogEvent(logging.INFO, f"device: {choice.reason}"))
    if choice.warning:
        link.send(LogEvent(logging.WARNING, f"--device auto runs on the CPU: {choice.warning}"))


def _log_dtype(link: Link, prepared: Prepared) -> None:
    import logging

    from hotstart.loading.match import FLOATS
    from hotstart.units import format_size

    matched = prepared.matched
    stored = ", ".join(
        f"{format_size(size)} {FLOATS.get(name, name)}" for name, size in matched.stored.items()
    )
    by = "as stored" if prepared.config.model.dtype == "auto" else "by --dtype"
    text = f"dtype: {matched.dtype}, {by} (weights: {stored})"
    link.send(LogEvent(logging.INFO, text))


def _tell_copied(link: Link, built: Built, copied: int) -> None:
    from msgspec.structs import replace

    with contextlib.suppress(PeerGone):
        link.send(replace(built.weights.stats(), copied=copied))


def _freeze() -> None:
    """What lives now lives until the end: no later collection need walk it."""
    gc.collect()
    gc.freeze()


def _take(link: Link, engine: Engine, *, block: bool) -> None:
    """Hand arrived messages to the engine."""
    for message in link.messages(block=block):
        if isinstance(message, AddRequests):
            for request in message.requests:
                engine.add(request)
        elif isinstance(message, AbortRequests):
            for request_id in message.ids:
                engine.abort(request_id)
            if not engine.has_work:
                link.send(engine.status())
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
        # The first bytes are told at once: where the storage then stands still, nothing else is.
        self._sent[phase.name] = now if phase.bytes else 0.0
        with contextlib.suppress(PeerGone):
            self._link.send(PhaseEvent(phase))


def _report(link: Link, error: BaseException) -> int:
    """Tell the frontend why; returns the exit code."""
    if isinstance(error, ProblemsFound):
        problems = list(error.problems)
    elif isinstance(error, HotstartError):
        problems = [error]
    else:
        import logging
        import traceback

        with contextlib.suppress(PeerGone):
            text = "".join(traceback.format_exception(error)).rstrip()
            link.send(LogEvent(logging.ERROR, text))
        problems = [
            EngineError(
                f"the engine failed: {type(error).__name__}: {error}",
                advice="This is a defect of hotstart; please report it with the traceback above",
            )
        ]
    with contextlib.suppress(PeerGone):
        link.send(Failed([(p.exit_code, p.found, p.expected, p.advice) for p in problems]))
    return min(p.exit_code for p in problems)


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

    def weight_files(self) -> bytes | None:
        """Block until the parent has read the headers; None when it goes on without a word about them."""
        while True:
            for number, body in enumerate(self._backlog):
                message = decode_to_engine(body)
                if isinstance(message, WeightFiles):
                    del self._backlog[number]
                    return message.checkpoint
                if isinstance(message, Go):
                    return None
            self._receive(block=True)

    def wait_for_go(self) -> None:
        """Block until the checks have passed; requests that come earlier are kept."""
        while True:
            for number, body in enumerate(self._backlog):
                if isinstance(decode_to_engine(body), Go):
                    del self._backlog[number]
                    return
            self._receive(block=True)

    def messages(self, *, block: bool) -> list[ToEngine]:
        """What has arrived; with ``block``, at least one message."""
        while self._receive(block=block and not self._backlog):
            pass
        bodies, self._backlog = self._backlog, []
        return [decode_to_engine(body) for body in bodies]

    def wait(self, seconds: float) -> bool:
        """Whether something arrives within that time."""
        return bool(self._backlog or select.select([self._socket], [], [], seconds)[0])

    def send(self, message: FromEngine) -> None:
        """Send one message; raises PeerGone."""
        data = frame(message)
        with self._send_lock:
            try:
                self._socket.sendall(data)
            except OSError:
                raise PeerGone from None

    def say(self, level: int, text: str) -> None:
        """A line of the log; nothing where nobody listens any more."""
        with contextlib.suppress(PeerGone):
            self.send(LogEvent(level, text))

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
