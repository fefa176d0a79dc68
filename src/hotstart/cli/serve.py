"""``hotstart serve``: spawn the engine, take the port, check, and hand over to the frontend.

The order is the point. The engine is spawned before anything else, since its ``import torch`` is the
longest stretch of a start; everything here happens beside it, on the other core. The checks run on
a thread of their own: when they pass the engine is told to read, when they fail both processes end.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # built in; signal itself costs what delays the engine
import os
import sys

from hotstart.cli.engine_process import EngineProcess

TYPE_CHECKING = False

if TYPE_CHECKING:
    import logging
    import socket
    import threading
    from types import FrameType
    from typing import NoReturn

    from hotstart.checkpoint.base import Checkpoint
    from hotstart.cli.bind import UnixPath
    from hotstart.cli.check import Report
    from hotstart.cli.explain import Expectation
    from hotstart.cli.progress import Progress
    from hotstart.config.parse import Parsed
    from hotstart.config.settings import Config
    from hotstart.errors import HotstartError
    from hotstart.frontend.startup import Startup
    from hotstart.messages import Ready
    from hotstart.storage.changes import FileState

# Local checks take less than this. Importing the HTTP side at the same time would slow both down,
# and a start that fails does not need it; a download takes longer, and its progress must be served.
_CHECKS_ALONE_SECONDS = 0.4
_REPORT_TOGETHER_SECONDS = 5.0
"""How long a problem that ends the start waits for others: nothing answers on the port meanwhile."""


def run(parsed: Parsed) -> int:
    """Serve until stopped; returns the exit code. Raises what ended the start."""
    held_back = (2, 15)  # SIGINT, SIGTERM: until there is somebody to end the engine
    _signal.pthread_sigmask(_signal.SIG_BLOCK, held_back)
    engine = _spawn(parsed)
    import signal

    server = _Server(parsed, engine)

    def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
        server.clear_away()
        if server.startup is not None:  # the log is there
            _log().info("stopped on %s, exit code %d", signal.Signals(number).name, 128 + number)
        os._exit(128 + number)

    # Until the event loop takes the signals over.
    signal.signal(signal.SIGTERM, end_at_once)
    signal.signal(signal.SIGINT, end_at_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, held_back)
    try:
        code = server.run()
    except Exception as error:
        if not server.checking:
            raise
        from hotstart.cli import logs, main

        code = main.explain(error, as_json=logs.is_json())
    finally:
        # The event loop has given the signals back: one more must not end this half-way.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        server.clear_away()
    if server.checking:
        # A download has threads that the interpreter would wait for, however long the rest takes.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _spawn(parsed: Parsed) -> EngineProcess:
    from hotstart.config.load_formats import is_stream  # the parser has it

    try:
        return EngineProcess(numpy=is_stream(parsed.values.get("load.load_format", "auto")))
    except OSError as error:
        reason = error.strerror or str(error)
    from hotstart.cli import limits
    from hotstart.errors import EngineError

    limits.raise_file_limit()
    raise EngineError(
        f"the engine process cannot be started: {reason}",
        advice="See the limits of this process (ulimit -a) and of its container",
    )


class _Server:
    """The frontend process before and after its event loop."""

    def __init__(self, parsed: Parsed, engine: EngineProcess) -> None:
        from hotstart.frontend.engine_writer import EngineWriter
        from hotstart.timeline import Timeline

        self.engine = engine
        self.writer = EngineWriter(engine.socket)
        self.notes = parsed.notes
        self.config = parsed.config
        self.timeline = Timeline("frontend")
        self.timeline.end(self.timeline.begin("parse flags, spawn", start=self.timeline.origin))
        self.startup: Startup | None = None
        self.progress: Progress | None = None
        self.weights: tuple[FileState, ...] = ()
        self.expected: Expectation | None = None
        self.cache_root = ""
        self._checks: threading.Thread | None = None
        self._passing: threading.Thread | None = None
        self._unix_path: UnixPath | None = None

    @property
    def checking(self) -> bool:
        """Whether the checks, or the download before them, are not through."""
        return self._checks is not None and self._checks.is_alive()

    def clear_away(self) -> None:
        """End the engine, and take away the unix socket's name and what lies in temporary directories."""
        self.engine.kill()
        if (temporary := sys.modules.get("hotstart.storage.temporary")) is not None:
            temporary.remove_temporary()
        if self._unix_path is not None:
            self._unix_path.remove()

    def run(self) -> int:
        from hotstart.cli import bind, limits, logs
        from hotstart.cli.progress import Progress, Screen
        from hotstart.errors import raise_all

        few_files = limits.raise_file_limit()
        config = self.config
        terminal = sys.stderr.isatty() and config.log.log_format == "text"
        screen = Screen(sys.stderr) if terminal else None
        logs.setup(config.log, screen)
        log = _log()
        logging_of_engine = log.getChild("engine")
        self.engine.relay(lambda line: logging_of_engine.warning("%s", line))
        listening = bind.bind(config.http)
        if config.http.uds is not None:
            self._unix_path = bind.UnixPath(config.http.uds)
        log.info("hotstart %s, listening on %s", _version(), bind.url(config.http, listening[0]))
        for note in self.notes:
            log.info("%s", note)
        _warn_loopback(config, listening[0])
        if few_files:
            log.warning("%s", few_files)
        self.progress = Progress(self.timeline, screen=screen, enabled=config.log.use_tqdm_on_load)
        self.progress.start()
        import threading

        from hotstart.frontend.startup import Startup

        self.startup = startup = Startup()
        startup.listen(self._announce)
        threading.Thread(target=self._watch, name="engine watch", daemon=True).start()
        self._checks = threading.Thread(target=self._check, name="checks", daemon=True)
        self._checks.start()
        self._checks.join(timeout=_CHECKS_ALONE_SECONDS)
        if self.checking and (unusable := self._tls_problem()) is not None:
            # They look at the same files, and report all problems together, unless storage hangs.
            self._checks.join(timeout=_REPORT_TOGETHER_SECONDS)
            if self.checking:
                startup.fail([unusable])
        code = 0
        if not startup.failed:
            with self.timeline.phase("import HTTP server"):
                import uvloop

                from hotstart.frontend.server import serve
            engine = self.engine
            code = uvloop.run(
                serve(
                    config,
                    listening,
                    self.writer,
                    self.timeline,
                    startup,
                    engine_cpu=engine.cpu_seconds,
                )
            )
        if self.progress is not None:
            self.progress.stop()
        raise_all(startup.failed)
        return code

    def _watch(self) -> None:
        """Say how the engine ended, in time for whoever reads its end of file."""
        import signal

        from hotstart.storage.changes import changed

        assert self.startup is not None
        how = self.engine.until_it_ends()
        # Touching a mapped page behind the end of a file that shrank is death without an exception.
        if self.engine.reap() == -signal.SIGBUS and (problems := changed(self.weights)):
            self.startup.fail(problems)
        self.startup.engine_exited(how)

    def _check(self) -> None:
        """The checks, on their own thread: resolve, tell the engine, look, give the word."""
        from hotstart.cli.limits import memory_limit
        from hotstart.errors import EngineError, HotstartError, ProblemsFound

        assert self.startup is not None
        try:
            self._look()
        except ProblemsFound as error:
            self.startup.fail(error.problems)
        except HotstartError as error:
            self.startup.fail([error])
        except BaseException as error:
            if not memory_limit(error):  # where memory ended says nothing of the cause
                _log().exception("the checks failed")
            self.startup.fail([EngineError(f"the checks failed: {type(error).__name__}: {error}")])

    def _look(self) -> None:
        import msgspec

        from hotstart.cli.check import fits_here, run_checks
        from hotstart.config import cache_root
        from hotstart.config.settings import encode
        from hotstart.errors import raise_all
        from hotstart.frontend.startup import Checked
        from hotstart.messages import Go, frame, framed
        from hotstart.storage.changes import note

        assert self.startup is not None
        config = self.config
        root = cache_root.resolve(config.cache_root or None, os.environ)
        log = _log()
        log.info("%s", root.reason) if root.writable else log.warning("%s", root.reason)
        self.cache_root = root.path if root.writable else ""
        located = self._located()
        with self.timeline.phase("check"):
            config = msgspec.structs.replace(
                config,
                model=located.model,
                cache_root=self.cache_root,
            )
            self.writer.send(framed(encode(config)))
            report = run_checks(config, device=fits_here, opened=self._pass_on)
            raise_all(report.problems)
        for text in report.texts("storage"):
            log.info("storage: %s", text)
        for warning in report.warnings:
            log.warning("%s", warning)
        if report.checkpoint is not None:
            self.weights = note(file.path for file in report.checkpoint.files)
        assert report.files is not None
        assert report.text is not None
        assert report.geometry is not None
        if self._passing is not None:
            self._passing.join()
        self.writer.send(frame(Go()))
        self.startup.pass_checks(
            Checked(
                files=report.files,
                text=report.text,
                served_names=config.model.served_model_name or (config.model.model,),
                max_model_len=None
                if config.model.max_model_len == -1
                else config.model.max_model_len or report.geometry.max_position_embeddings,
            )
        )
        self._explain(report)

    def _pass_on(self, checkpoint: Checkpoint) -> None:
        """Spare the engine the headers; it may not be up to receive them, so nobody waits for it here."""
        import threading

        from hotstart.checkpoint import passing
        from hotstart.messages import WeightFiles, frame

        message = frame(WeightFiles(passing.encode(checkpoint)))
        self._passing = threading.Thread(target=self.writer.send, args=(message,), daemon=True)
        self._passing.start()

    def _explain(self, report: Report) -> None:
        """Say how the weights are read. The engine, which has begun, need not wait for a line of the log."""
        from hotstart.cli.explain import Expectation, plan_for
        from hotstart.config.load_formats import is_stream
        from hotstart.errors import HotstartError

        if (
            report.checkpoint is None
            or not report.checkpoint.files
            or is_stream(self.config.load.load_format)
        ):
            return
        try:
            plan = plan_for(self.config, report, report.checkpoint)
        except HotstartError:
            return  # the engine meets the same problem, and reports it
        self.expected = Expectation(plan, self.cache_root)
        _log().info("read plan: %s", self.expected)

    def _tls_problem(self) -> HotstartError | None:
        """Why the HTTP side cannot be set up with the files of ``--ssl-*``."""
        from hotstart.errors import HotstartError

        try:
            self._check_tls()
        except HotstartError as error:
            return error
        return None

    def _check_tls(self) -> None:
        if self.config.http.ssl_certfile is not None:
            from hotstart.cli.tls import check_tls

            check_tls(self.config.http)

    def _located(self) -> Config:
        """The settings with the model's directory; what must be fetched first has a phase of its own."""
        from hotstart.checkpoint.resolve import is_path
        from hotstart.cli.check import located
        from hotstart.errors import HotstartError
        from hotstart.loading.loader_check import check_loader
        from hotstart.storage.location import is_location

        config = self.config
        if is_path(config.model.model):
            try:
                return located(config)
            except HotstartError:
                if config.load.expect_mount is None:
                    raise
                return config  # the mount is the likelier cause: the checks look at it and report both
        check_loader(config)
        self._check_tls()  # a download may take hours, and be served with these files meanwhile
        with self.timeline.phase("fetch" if is_location(config.model.model) else "download") as phase:

            def report(done: int, total: int) -> None:
                phase.total = total
                if done > phase.bytes:
                    self.timeline.progress(phase, done)

            return located(config, report)

    def _announce(self) -> None:
        """A listener of the startup: what an operator wants to see once it serves."""
        import time

        from hotstart.frontend.startup import State

        startup = self.startup
        assert startup is not None
        if startup.state is not State.READY or startup.ready is None or self.progress is None:
            return
        from hotstart.cli.progress import startup_table, write_startup_json
        from hotstart.errors import HotstartError
        from hotstart.units import format_seconds

        progress, self.progress = self.progress, None
        progress.stop()
        ready, log = startup.ready, _log()
        took = time.monotonic() - self.timeline.origin
        if progress.tabular:
            log.info("start timeline\n%s", startup_table(self.timeline))
        cache = self.config.cache
        given = cache.kv_cache_memory_bytes or cache.num_gpu_blocks_override
        log.info("KV cache: %s", _kv_cache_line(ready, computed=not given))
        if self.config.log.startup_json:
            try:
                write_startup_json(self.timeline, self.config.log.startup_json)
            except HotstartError as error:
                log.warning("%s", error)
        log.info(
            "serving on %s, %s, context %d, at most %d sequences and %d tokens a step",
            ready.device,
            ready.dtype,
            ready.max_model_len,
            ready.max_num_seqs,
            ready.max_num_batched_tokens,
        )
        if self.expected is not None and (outcome := self.expected.outcome(self.timeline)):
            log.info("weights: %s", outcome)
        log.info("ready after %s", format_seconds(took))


def _kv_cache_line(ready: Ready, *, computed: bool) -> str:
    """How large, and why. On a CPU the size is a bound: pages appear when tokens are written."""
    from hotstart.units import format_size

    size = f"{format_size(ready.kv_cache_bytes)} ({ready.kv_cache_tokens} tokens)"
    on_cpu = ready.device.startswith("cpu")
    if on_cpu:
        size = f"taken as tokens are written, up to {size}"
    if not computed:
        return f"{size}, {ready.kv_cache_reason}"
    flag = f"--kv-cache-memory-bytes={ready.kv_cache_bytes}"
    if on_cpu:
        return f"{size}; this bound, or a lower one, as a flag: {flag}"
    return f"{size}: {ready.kv_cache_reason}; to skip the computation next time: {flag}"


def _log() -> logging.Logger:
    import logging

    return logging.getLogger("hotstart")


def _version() -> str:
    from hotstart import __version__

    return __version__


def _warn_loopback(config: Config, listening: socket.socket) -> None:
    from hotstart.cli.bind import loopback_only
    from hotstart.storage.mounts import container

    inside = container() if loopback_only(listening) else ""
    if inside:  # a warning: by default it listens everywhere, and nothing else tells that nobody gets here
        _log().warning(
            "bound to loopback inside a container (%s): nothing outside it can connect; leave --host out",
            inside,
        )
