"""Start a server, watch it from outside, stop it.

The clock starts just before the process is made, so the interpreter, the imports and the HTTP
server all count. A completion request is sent as soon as the port accepts a connection, and again
until it is accepted: a server that holds early requests gets one, any other is asked every few
milliseconds, which is what a user with a retry loop does.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO

from hotstart.bench import diskstats, first_minute, processes
from hotstart.bench.client import Answer, RefusedError, Target, ask, connect, fresh_prompt, get, request_body
from hotstart.bench.log_phases import LogPhases
from hotstart.errors import EngineError

POLL = 0.005
"""Seconds between two looks at a server; no moment is known more finely."""
_HOPELESS = (400, 401, 403, 405, 413, 415, 422)
_SETTLE, _BUSY = 60.0, 0.01
"""Seconds to wait at most for an idle server, and the share of a core above which it is not idle yet."""
_GRACE = 35.0
"""Seconds a server gets to stop; vLLM's and our own limit is 30."""


@dataclass(frozen=True)
class Server:
    """How to start one, and where it will listen."""

    name: str
    argv: tuple[str, ...]
    target: Target
    early: bool = True
    """Send the first request as soon as the port accepts; otherwise when the server says ready."""
    timeout: float = 900.0


@dataclass(frozen=True)
class Start:
    """One observed start. Seconds since just before the process was made, unless said otherwise."""

    answers: float
    """The first HTTP answer of whatever status."""
    ready: float
    """The first 200 of /health, or of /v1/models where there is no /health; at the latest the first token."""
    first_token: float
    """The first streamed chunk with text."""
    held: bool
    """The first attempt at a request was accepted, before the server was ready."""
    first_ttft: float
    """Seconds from the accepted first request to its first text; for a held one this contains the start."""
    second_ttft: float
    """The same for a second request with another fresh prompt, sent when the first was finished."""
    phases: tuple[dict[str, object], ...] = ()
    """As the server's /startup.json gives them; without one what its log tells; else empty."""
    read_bytes: int | None = None
    """That its processes made the storage read until the first answer was complete; None: not told."""
    device_bytes: dict[str, int] = field(default_factory=dict)
    """That each disk of the machine has read in the same time, for whomever."""
    peak_rss: int = 0
    """Bytes: the greatest resident memory of each process so far, added up."""
    minute: first_minute.FirstMinute | None = None
    peak_pss: int = 0
    """Bytes; 0: not measured."""
    idle_cpu: float = 0.0
    """CPU seconds of all processes per 10 s without requests; 0: not measured."""


@dataclass
class _Moments:
    """What the watching threads find; each field has one writer."""

    answers: float = 0.0
    ready: float = 0.0
    listed: str = ""
    """The name that /v1/models lists."""
    attempts: int = 0
    first: Answer | None = None
    failure: str = ""
    gone: threading.Event = field(default_factory=threading.Event)


def observe(
    server: Server, *, memory: bool = False, idle_seconds: float = 0.0, load_seconds: float = 0.0
) -> Start:
    """Start, ask twice, stop.

    ``memory`` samples the tree's PSS, which slows the start: its times are not to be compared.
    ``load_seconds`` loads the server for so long after its first token.
    Raises ``EngineError`` with the server's last lines when it ends early, times out, refuses the
    request, or leaves processes behind; and when another server has its port.
    """
    _check_port(server)
    with tempfile.TemporaryFile() as output:
        disks = diskstats.read_bytes()
        spawned = time.monotonic()
        process = _spawn(server, output)
        moments = _Moments()
        log = LogPhases(spawned)
        sampler = _PssSampler(process.pid) if memory else None
        try:
            first, target = _wait(server, process, moments, output, log)
            members = processes.tree(process.pid)
            read, peak_rss = processes.read_bytes(members), processes.peak_rss(members)
            disks = diskstats.since(disks)
            minute = first_minute.watch(target, first, load_seconds) if load_seconds else None
            second = ask(target, request_body(target, fresh_prompt(), max_tokens=16))
            phases = _phases(target) or log.phases()
            idle = _idle_cpu(process.pid, idle_seconds) if idle_seconds else 0.0
        except (RefusedError, OSError, ValueError) as error:
            raise EngineError(f"{server.name}: {error}; its last lines:\n{_tail(output)}") from error
        finally:
            peak = sampler.stop() if sampler else 0
            moments.gone.set()
            not_clean = _stop(server, process, output)
        if not_clean:
            raise EngineError(not_clean)
        return Start(
            answers=moments.answers - spawned,
            ready=min(moments.ready, first.first) - spawned,
            first_token=first.first - spawned,
            held=moments.attempts == 1 and first.sent < moments.ready,
            first_ttft=first.ttft,
            second_ttft=second.ttft,
            phases=phases,
            read_bytes=read,
            device_bytes=disks,
            peak_rss=peak_rss,
            minute=minute,
            peak_pss=peak,
            idle_cpu=idle,
        )


def _check_port(server: Server) -> None:
    """Whoever listens already would be measured in the place of the server."""
    if _accepts(server.target):
        raise EngineError(
            f"{server.name} is to listen on port {server.target.port}, where something listens already",
            advice="stop it, or give the server another port",
        )


def _spawn(server: Server, output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        server.argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


_prctl = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """In the child: a benchmark that is killed takes the server it started with it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(
    server: Server, process: subprocess.Popen[bytes], moments: _Moments, output: IO[bytes], log: LogPhases
) -> tuple[Answer, Target]:
    """Both moments: ready, and the first answer. Watches the process and the clock meanwhile."""
    watchers = [
        threading.Thread(target=_watch_ready, args=(server.target, moments), daemon=True),
        threading.Thread(target=_ask_first, args=(server, moments), daemon=True),
    ]
    for watcher in watchers:
        watcher.start()
    deadline = time.monotonic() + server.timeout
    printed = 0
    while not (moments.ready and moments.first):
        more = os.pread(output.fileno(), 1 << 20, printed)
        printed += len(more)
        log.feed(more, time.monotonic())
        if process.poll() is not None:
            cause = f"ended with {_exit_words(process.returncode)} before it answered"
        elif moments.failure:
            cause = moments.failure
        elif time.monotonic() > deadline:
            cause = f"has not answered within {server.timeout:.0f} s"
        else:
            time.sleep(POLL)
            continue
        raise EngineError(f"{server.name} {cause}; its last lines:\n{_tail(output)}")
    return moments.first, replace(server.target, model=server.target.model or moments.listed)


def _watch_ready(target: Target, moments: _Moments) -> None:
    """Ask /health until it is 200; a server without one is ready when it lists a model."""
    connection = connect(target)
    path = "/health"
    while not moments.gone.is_set():
        try:
            status, _ = get(target, path, connection)
        except OSError:
            connection.close()
            moments.gone.wait(POLL)
            continue
        now = time.monotonic()
        moments.answers = moments.answers or now
        if status == 200:
            if not target.model:
                moments.listed = _listed_model(target)
            moments.ready = now
            break
        if status == 404:
            path = "/v1/models"
        moments.gone.wait(POLL)
    connection.close()


def _ask_first(server: Server, moments: _Moments) -> None:
    """Send the first request, again and again until it is accepted."""
    target = server.target
    while not moments.gone.is_set():
        if not _may_ask(server, moments) or not _accepts(target):
            moments.gone.wait(POLL)
            continue
        moments.attempts += 1
        named = replace(target, model=target.model or moments.listed)
        try:
            moments.first = ask(named, request_body(named, fresh_prompt(), max_tokens=16))
        except RefusedError as refusal:
            hopeless = refusal.status in _HOPELESS or refusal.status == 200
            if hopeless or (moments.ready and time.monotonic() - moments.ready > 5):
                moments.failure = f"refuses a plain request: {refusal}"
                return
        except ValueError as error:
            moments.failure = f"gives no text: {error}"
            return
        except OSError:
            pass
        if moments.first:
            return
        moments.gone.wait(POLL)


def _may_ask(server: Server, moments: _Moments) -> bool:
    """A model whose name is not known yet is asked for when the server lists it."""
    return bool(moments.ready) or (server.early and bool(server.target.model))


def _accepts(target: Target) -> bool:
    try:
        socket.create_connection((target.host, target.port), timeout=1).close()
    except OSError:
        return False
    return True


def _listed_model(target: Target) -> str:
    status, body = get(target, "/v1/models")
    return str(json.loads(body)["data"][0]["id"]) if status == 200 else ""


def _phases(target: Target) -> tuple[dict[str, object], ...]:
    status, body = get(target, "/startup.json")
    if status != 200:
        return ()
    try:
        return tuple(json.loads(body)["phases"])
    except (ValueError, KeyError, TypeError):
        return ()


def _idle_cpu(pid: int, seconds: float) -> float:
    """CPU seconds per 10 s, once what a start puts off until later is done: at most a minute is waited."""
    members = processes.tree(pid)

    def spent(wait: float) -> float:
        before, begin = processes.cpu_seconds(members), time.monotonic()
        time.sleep(wait)
        return (processes.cpu_seconds(members) - before) / (time.monotonic() - begin)

    settle = time.monotonic() + _SETTLE
    time.sleep(min(2.0, seconds))
    while spent(min(1.0, seconds)) > _BUSY and time.monotonic() < settle:
        pass
    return spent(seconds) * 10


def _stop(server: Server, process: subprocess.Popen[bytes], output: IO[bytes]) -> str:
    """SIGTERM to the process, as a service manager does. What was wrong with its end, if anything."""
    members = processes.tree(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        processes.end(members)
        process.wait()
        return (
            f"{server.name} did not stop within {_GRACE:.0f} s of SIGTERM; its last lines:\n{_tail(output)}"
        )
    if left := processes.wait_until_gone(members, 2.0):
        processes.end(left)
        processes.wait_until_gone(left, 2.0)
        numbers = ", ".join(str(member.pid) for member in left)
        return f"{server.name} left processes behind when it stopped: {numbers}"
    return ""


class _PssSampler:
    """The greatest sum of PSS seen, looked at every 50 ms."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._done.wait(0.05):
            self._peak = max(self._peak, processes.pss(processes.tree(self._pid)))

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._peak


def _exit_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _tail(output: IO[bytes], lines: int = 12) -> str:
    """The end of what the server printed."""
    size = os.fstat(output.fileno()).st_size
    text = os.pread(output.fileno(), 1 << 16, max(0, size - (1 << 16))).decode(errors="replace")
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "    (it printed nothing)"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def running(server: Server) -> Iterator[Target]:
    """A started and ready server, stopped on the way out: for benchmarks of serving."""
    with tempfile.TemporaryFile() as output:
        process = _spawn(server, output)
        moments = _Moments()
        try:
            _, target = _wait(server, process, moments, output, LogPhases(time.monotonic()))
            yield target
        finally:
            moments.gone.set()
            not_clean = _stop(server, process, output)
        if not_clean:
            raise EngineError(not_clean)


def split_command(text: str) -> tuple[str, ...]:
    """A command line as a shell would split it; leading ``NAME=value`` words become environment."""
    words = shlex.split(text)
    return ("env", *words) if words and "=" in words[0] else tuple(words)
