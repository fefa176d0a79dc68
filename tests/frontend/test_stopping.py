"""Signals, dying engines, and clients that leave."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from hotstart.errors import EngineError
from hotstart.messages import AddRequests, FinishReason

from .conftest import Launch, Running
from .fake_engine import PATIENCE, READY, FakeEngine

SCRIPT = Path(__file__).with_name("serve_process.py")
RUNNING, LENGTH = FinishReason.RUNNING, FinishReason.LENGTH


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_request(server: Running, stream: bool) -> None:
    leave = server.leave("/v1/completions", prompt="the", stream=stream)
    request = server.engine.next_request()
    leave()
    assert server.engine.next_abort() == [request.id]


def test_a_client_that_leaves_frees_every_choice(server: Running) -> None:
    leave = server.leave("/v1/completions", prompt="the", n=2)
    added = server.engine.next(AddRequests)
    assert isinstance(added, AddRequests)
    leave()
    assert server.engine.next_abort() == [request.id for request in added.requests]


def test_tokens_of_an_aborted_request_are_ignored(server: Running) -> None:
    leave = server.leave("/v1/completions", prompt="the")
    request = server.engine.next_request()
    leave()
    server.engine.next_abort()
    server.engine.step([(request.id, 5, RUNNING)])
    server.engine.answer_with([5])
    assert server.ask("/v1/completions", prompt="the").result(PATIENCE).status_code == 200


def test_an_engine_that_dies_fails_what_waits_and_ends_the_server(server: Running) -> None:
    answer = server.ask("/v1/completions", prompt="the")
    server.engine.next_request()
    server.startup.engine_exited("killed by signal 9 (out of memory?)")
    assert server.exit_code() == EngineError.exit_code
    failed = answer.result(PATIENCE)
    assert failed.status_code == 500
    assert "signal 9" in failed.json()["error"]["message"]


def test_an_engine_that_dies_ends_running_streams_with_an_error_event(server: Running) -> None:
    events = server.stream("/v1/completions", prompt="the")
    request = server.engine.next_request()
    server.engine.step([(request.id, server.ids(" fox")[0], RUNNING)])
    assert json.loads(events.get(timeout=PATIENCE))["choices"][0]["text"] == " fox"
    server.engine.die()
    server.startup.engine_exited("exit code 1")
    assert json.loads(events.get(timeout=PATIENCE))["error"]["code"] == 500
    assert events.get(timeout=PATIENCE) == "[DONE]"
    assert server.exit_code() == EngineError.exit_code


def test_a_full_queue_answers_429(launch: Launch) -> None:
    server = launch(max_queued_requests=1)
    server.make_ready()
    asked = []
    for _ in range(READY.max_num_seqs + 1):
        asked.append(server.ask("/v1/completions", prompt="the"))
        server.engine.next_request()
    refused = server.ask("/v1/completions", prompt="the").result(PATIENCE)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    server.engine.step([(request.id, 5, LENGTH) for request in server.engine.requests])
    assert [answer.result(PATIENCE).status_code for answer in asked] == [200] * len(asked)


def test_requests_that_the_next_step_can_take_up_are_no_queue(launch: Launch) -> None:
    server = launch(max_queued_requests=1)
    server.make_ready()
    asked = [server.ask("/v1/completions", prompt="the") for _ in range(READY.max_num_seqs)]
    for _ in asked:
        server.engine.next_request()
    server.engine.step([(request.id, 5, LENGTH) for request in server.engine.requests])
    assert [answer.result(PATIENCE).status_code for answer in asked] == [200] * len(asked)


class Served:
    """A frontend in a process of its own, since signals need one."""

    def __init__(self, process: subprocess.Popen[str], engine: FakeEngine, port: int) -> None:
        self.process = process
        self.engine = engine
        self.port = port
        self.running = Running.__new__(Running)
        self.running.url = f"http://127.0.0.1:{port}"

    def log_line(self) -> str:
        """The message of the next one."""
        assert self.process.stderr is not None
        message: str = json.loads(self.process.stderr.readline())["message"]
        return message

    def health(self) -> int:
        with httpx.Client(trust_env=False, timeout=PATIENCE) as client:
            return client.get(f"{self.running.url}/health").status_code


@contextmanager
def served(model_dir: Path, *, ready: bool = True, timeout: float = 30.0) -> Iterator[Served]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ours, theirs = socket.socketpair()
    passed = (listener.fileno(), ours.fileno())
    process = subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__).with_name("serve_process.py")),
            *map(str, passed),
            str(model_dir),
            str(timeout),
        ],
        pass_fds=passed,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    listener.close()
    ours.close()
    engine = FakeEngine(theirs)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "passed\n"
        if ready:
            engine.ready()
            assert process.stdout.readline() == "ready\n"
        yield Served(process, engine, port)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        engine.close()


def test_sigterm_when_idle_exits_with_0(model_dir: Path) -> None:
    with served(model_dir) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0


def test_an_idle_server_says_that_it_stops_and_how_it_ended(model_dir: Path) -> None:
    with served(model_dir) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.log_line() == "stopping on SIGTERM: no request runs"
        assert server.log_line() == "stopped, exit code 0"


def test_a_busy_server_says_what_it_waits_for(model_dir: Path) -> None:
    with served(model_dir) as server:
        server.running.ask("/v1/completions", prompt="the")
        request = server.engine.next_request()
        server.process.send_signal(signal.SIGINT)
        said = "stopping on SIGINT: 1 request may finish within 30 s; a second signal cuts them off"
        assert server.log_line() == said
        server.engine.step([(request.id, 5, LENGTH)])
        assert server.log_line() == "stopped, exit code 0"


def test_a_second_signal_says_how_many_requests_it_cuts_off(model_dir: Path) -> None:
    with served(model_dir) as server:
        answers = [server.running.ask("/v1/completions", prompt="the") for _ in range(2)]
        for _ in answers:
            server.engine.next_request()
        server.process.send_signal(signal.SIGINT)
        assert server.log_line().startswith("stopping on SIGINT: 2 requests may finish")
        server.process.send_signal(signal.SIGINT)
        assert server.log_line() == "a second signal, SIGINT: 2 requests cut off"
        assert server.log_line() == "stopped, exit code 0"


def test_requests_that_outlast_the_timeout_are_counted(model_dir: Path) -> None:
    with served(model_dir, timeout=0.1) as server:
        server.running.ask("/v1/completions", prompt="the")
        server.engine.next_request()
        server.process.send_signal(signal.SIGTERM)
        assert server.log_line().startswith("stopping on SIGTERM: 1 request may finish within 0.1 s")
        assert server.log_line() == "0.1 s have passed: 1 request cut off"


def test_a_server_that_is_stopped_while_it_loads_says_so(model_dir: Path) -> None:
    with served(model_dir, ready=False) as server:
        assert server.health() == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.log_line() == "stopping on SIGTERM: the model was still loading"
        assert server.log_line() == "stopped, exit code 143"


def test_a_server_short_of_descriptors_refuses_connections_says_so_and_goes_on(model_dir: Path) -> None:
    with served(model_dir) as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (64, 64))

        def health(connection: socket.socket) -> bytes:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            return connection.recv(1 << 16)

        def connect() -> socket.socket:
            return socket.create_connection(("127.0.0.1", server.port), PATIENCE)

        with contextlib.ExitStack() as idle:
            while (answer := health(idle.enter_context(connect()))).startswith(b"HTTP/1.1 200"):
                pass
            assert b"Too many connections" in answer
            assert "ulimit -n" in server.log_line()
            assert b"Too many connections" in health(idle.enter_context(connect()))
        while server.health() != 200:
            pass
        server.process.send_signal(signal.SIGTERM)
        assert server.log_line().startswith("stopping"), "one line for all that were refused"


def test_sigterm_lets_running_requests_finish_and_admits_no_more(model_dir: Path) -> None:
    with served(model_dir) as server:
        answer = server.running.ask("/v1/completions", prompt="the")
        request = server.engine.next_request()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stdout is not None
        assert server.process.stdout.readline() == "draining\n"
        assert server.health() == 503
        assert server.running.ask("/v1/completions", prompt="the").result(PATIENCE).status_code == 503
        server.engine.step([(request.id, 5, LENGTH)])
        assert answer.result(PATIENCE).status_code == 200
        assert server.process.wait(PATIENCE) == 0


def test_requests_that_outlast_the_shutdown_timeout_are_failed(model_dir: Path) -> None:
    with served(model_dir, timeout=0.0) as server:
        answer = server.running.ask("/v1/completions", prompt="the")
        server.engine.next_request()
        server.process.send_signal(signal.SIGTERM)
        assert answer.result(PATIENCE).status_code == 503
        assert server.process.wait(PATIENCE) == 0


def test_an_engine_that_dies_while_draining_is_named_and_is_no_success(model_dir: Path) -> None:
    with served(model_dir) as server:
        answer = server.running.ask("/v1/completions", prompt="the")
        server.engine.next_request()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stdout is not None
        assert server.process.stdout.readline() == "draining\n"
        server.engine.die()
        failed = answer.result(PATIENCE)
        assert failed.status_code == 500
        assert "The engine is gone" in failed.json()["error"]["message"]
        assert server.process.wait(PATIENCE) == EngineError.exit_code


def test_a_second_sigterm_stops_at_once(model_dir: Path) -> None:
    with served(model_dir, timeout=PATIENCE * 10) as server:
        answer = server.running.ask("/v1/completions", prompt="the")
        server.engine.next_request()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stdout is not None
        assert server.process.stdout.readline() == "draining\n"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        assert answer.result(PATIENCE).status_code == 503


def test_sigterm_before_ready_exits_with_143(model_dir: Path) -> None:
    with served(model_dir, ready=False) as server:
        assert server.health() == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 143
