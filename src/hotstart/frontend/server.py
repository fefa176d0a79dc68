"""The frontend process: HTTP on one side, the engine's socket on the other, until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn

from hotstart.checkpoint.wording import count
from hotstart.config.settings import Config
from hotstart.errors import ConfigError, EngineError
from hotstart.frontend.app import create_app
from hotstart.frontend.context import Frontend
from hotstart.frontend.engine_client import EngineClient
from hotstart.frontend.engine_writer import EngineWriter
from hotstart.frontend.errors import ApiError
from hotstart.frontend.gate import Gate
from hotstart.frontend.http_protocol import HttpProtocol, ServerState
from hotstart.frontend.liveness import Liveness
from hotstart.frontend.metrics import Metrics
from hotstart.frontend.rehearsal import rehearse
from hotstart.frontend.startup import Startup, State
from hotstart.frontend.stats_log import StatsLog
from hotstart.frontend.tls import HANDSHAKE_SECONDS, server_context
from hotstart.timeline import Timeline

log = logging.getLogger("hotstart.frontend")

_EXIT_GRACE = 1.0
"""Seconds that the parent gets to say why the engine died, after its socket closed."""
_STALL_WATCH = 0.5
"""Seconds between two looks at whether the start still moves."""
_STALL_ADVICE = (
    "/livez answers 503 until something moves; look at the storage (dmesg, the file server), "
    "or allow more with --stall-timeout"
)
_CLOSE_GRACE = 5
"""Seconds that last answers get to reach their clients."""


async def serve(
    config: Config,
    sockets: list[socket.socket],
    engine: EngineWriter,
    timeline: Timeline,
    startup: Startup,
    *,
    engine_cpu: Callable[[], float] = lambda: 0.0,
) -> int:
    """Answer on ``sockets`` (bound, listening or not) and speak to ``engine`` until stopped or failed.

    The caller has sent :class:`~hotstart.messages.Go` through ``engine`` before it passes the checks
    on. Returns the exit code: 0 after a signal that came when
    ready, 128 + signal before, else that of the lowest problem. The caller ends the engine process
    afterwards. ``engine_cpu`` gives the engine's CPU time so far, in seconds.
    """
    liveness = Liveness(startup, timeline, stall=config.http.stall_timeout, cpu_seconds=engine_cpu)
    served = config.model.served_model_name[0] if config.model.served_model_name else config.model.model
    metrics = Metrics(served, timeline)
    stats_log = None if config.log.disable_log_stats else StatsLog(metrics)
    client = EngineClient(startup, timeline, metrics, stats_log)
    frontend = Frontend(
        config=config,
        startup=startup,
        timeline=timeline,
        liveness=liveness,
        metrics=metrics,
        client=client,
        gate=Gate(startup, liveness, config.http),
        created=int(time.time()),
    )
    http = _HttpServer(frontend)
    serving = asyncio.ensure_future(http.serve(sockets))
    serving.add_done_callback(lambda _: lifecycle.wake())
    lifecycle = _Lifecycle(frontend, serving)
    watch = asyncio.ensure_future(_warn_of_stalls(frontend))
    try:
        await client.connect(engine)
        code = await lifecycle.run()
    finally:
        watch.cancel()
        http.stop(at_once=lifecycle.at_once)
        await asyncio.wait((serving,))
        client.close()
    serving.result()
    if lifecycle.signalled and not startup.failed:
        log.info("stopped, exit code %d", code)
    return code


async def _warn_of_stalls(frontend: Frontend) -> None:
    """A log line when a start stops moving, and one when it moves again."""
    stalled, status = False, "loading"
    while status in ("loading", "stalled"):
        report = frontend.liveness.report()
        status = report.status
        if not stalled and status == "stalled":
            log.warning("%s %s", report.message, _STALL_ADVICE)
        elif stalled and status in ("loading", "ready"):
            log.info("the start moves again: %s", report.phase)
        stalled = status == "stalled"
        await asyncio.sleep(_STALL_WATCH)


class _Lifecycle:
    """Follows the startup state, signals and the engine's socket; returns when the server must end."""

    def __init__(self, frontend: Frontend, serving: asyncio.Future[None]) -> None:
        self._frontend = frontend
        self._serving = serving
        self._changed = asyncio.Event()
        self._signals: list[signal.Signals] = []
        self.at_once = False
        self._loop = asyncio.get_running_loop()
        frontend.startup.listen(self._wake_from_any_thread)
        frontend.client.on_lost = self.wake
        # For good: a signal during the last answers must not kill the process.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._signalled, number)

    @property
    def signalled(self) -> bool:
        """Whether the end was asked for."""
        return bool(self._signals)

    def wake(self) -> None:
        """Something changed."""
        self._changed.set()

    def _wake_from_any_thread(self) -> None:
        # The parent may learn of the engine's end when this loop is already closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.wake)

    async def run(self) -> int:
        """Until the end; the exit code."""
        frontend, startup = self._frontend, self._frontend.startup
        rehearsed = False
        while not self._serving.done():
            frontend.gate.update()
            if not rehearsed and startup.checked is not None:
                rehearsed = True
                # Held requests, which the gate has just let in, go first.
                self._loop.call_soon(rehearse, startup.checked.text.tokenizer)
            if startup.state is State.FAILED:
                return self._failed()
            if self._engine_gone():
                await self._name_the_cause()
            elif self._signals and startup.state is State.LOADING:
                return self._stopped_early()
            elif self._signals:
                return await self._drain()
            else:
                await self._change()
        return 1

    async def _change(self, timeout: float | None = None) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)
        self._changed.clear()

    def _stopped_early(self) -> int:
        if not self._frontend.startup.stop():
            return self._failed()
        log.info("stopping on %s: the model was still loading", self._signals[0].name)
        self.at_once = True
        self._frontend.gate.update()
        self._frontend.client.fail_all(self._frontend.gate.closed())
        return 128 + self._signals[0]

    def _failed(self) -> int:
        frontend = self._frontend
        frontend.gate.update()
        text = "; ".join(str(problem).rstrip(".") for problem in frontend.startup.failed)
        status = 503 if frontend.startup.ready is None else 500
        frontend.client.fail_all(ApiError(status, f"The engine failed: {text}."))
        return frontend.startup.exit_code

    async def _name_the_cause(self) -> None:
        """The engine is gone without a word: wait a moment for the parent to say how."""
        startup = self._frontend.startup
        deadline = time.monotonic() + _EXIT_GRACE
        while startup.engine_exit is None and startup.state is not State.FAILED:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            await self._change(left)
        found = startup.engine_exit or "the engine process ended without a message"
        when = "while starting" if startup.ready is None else "while serving"
        startup.fail([EngineError(f"The engine is gone {when}: {found}")])

    async def _drain(self) -> int:
        """Finish what runs, within ``--shutdown-timeout`` or until the second signal."""
        frontend, startup = self._frontend, self._frontend.startup
        if not startup.drain():
            return self._failed()
        timeout = frontend.config.http.shutdown_timeout
        active = frontend.gate.active
        waits = "no request runs"
        if active:
            waits = (
                f"{count(active, 'request')} may finish within {timeout:g} s; a second signal cuts them off"
            )
        log.info("stopping on %s: %s", self._signals[0].name, waits)
        idle = asyncio.ensure_future(frontend.gate.idle())
        idle.add_done_callback(lambda _: self.wake())
        deadline = time.monotonic() + timeout
        while not idle.done() and len(self._signals) < 2 and startup.state is State.DRAINING:
            if (left := deadline - time.monotonic()) <= 0:
                break
            if self._engine_gone():
                await self._name_the_cause()
            else:
                await self._change(left)
        idle.cancel()
        self.at_once = len(self._signals) > 1
        if not startup.stop():
            return self._failed()
        if cut := frontend.gate.active:
            why = (
                f"a second signal, {self._signals[1].name}" if self.at_once else f"{timeout:g} s have passed"
            )
            log.warning("%s: %s cut off", why, count(cut, "request"))
        frontend.client.fail_all(frontend.gate.closed())
        return 0

    def _engine_gone(self) -> bool:
        return self._frontend.client.lost or self._frontend.startup.engine_exit is not None

    def _signalled(self, number: int) -> None:
        self._signals.append(signal.Signals(number))
        self.wake()


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, and idle when nothing happens.

    uvicorn's loop wakes ten times a second; here once, to renew the Date header.
    """

    def __init__(self, frontend: Frontend) -> None:
        config, log_config = frontend.config.http, frontend.config.log
        super().__init__(
            uvicorn.Config(
                create_app(frontend),
                loop="none",
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=not log_config.disable_uvicorn_access_log,
                server_header=False,
                proxy_headers=True,
                timeout_graceful_shutdown=_CLOSE_GRACE,
                timeout_keep_alive=75,
            )
        )
        try:
            self.config.load()
            self.server_state: ServerState = ServerState(asyncio.get_running_loop())
        except OSError as error:
            raise ConfigError(
                f"the HTTP server cannot be set up: {error.strerror or error}",
                advice="If files are short, raise the limit (ulimit -n)",
            ) from None
        try:
            self._tls = server_context(config, self.server_state.descriptors)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(
                f"--ssl-certfile {config.ssl_certfile} and --ssl-keyfile {config.ssl_keyfile} "
                f"cannot be used: {error.strerror or error}",
                expected="a PEM certificate chain and its key",
            ) from None
        self._stop = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept on ``sockets``; uvicorn's own way knows no time limit for the handshake."""
        await super().startup([])

        def protocol() -> HttpProtocol:
            return HttpProtocol(self.config, self.server_state, self.lifespan.state)

        for listener in sockets or ():
            server = await asyncio.get_running_loop().create_server(
                protocol,
                sock=listener,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if self._tls else None,
                backlog=self.config.backlog,
            )
            self.servers.append(server)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the connections; none is watched afterwards."""
        await super().shutdown(sockets)
        self.server_state.hangups.close()

    def stop(self, *, at_once: bool) -> None:
        """Close the listeners, then the connections; ``at_once``: without waiting for them."""
        self.force_exit = at_once
        self.should_exit = True
        self._stop.set()

    async def main_loop(self) -> None:
        """Until :meth:`stop`."""
        while not await self.on_tick(0):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the lifecycle."""
        yield
