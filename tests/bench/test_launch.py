"""Watching a start from outside: what counts as answering, ready and first token, and a clean end."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from hotstart.bench import processes
from hotstart.bench.client import CHAT, Target
from hotstart.bench.launch import Server, Start, observe, running, split_command
from hotstart.errors import EngineError
from running_server import free_port

STUB = str(Path(__file__).with_name("stub_server.py"))


def stub(*options: str, model: str = "stub", early: bool = True, timeout: float = 60.0) -> Server:
    port = free_port()
    argv = (sys.executable, STUB, str(port), *options)
    return Server("stub", argv, Target("127.0.0.1", port, model=model), early, timeout)


def in_order(start: Start) -> bool:
    return 0 < start.answers <= start.ready <= start.first_token


def test_server_that_holds_early_requests_answers_the_first_one_it_got() -> None:
    start = observe(stub("--early", "hold"))
    assert start.held
    assert in_order(start)


def test_server_that_refuses_early_requests_is_asked_until_it_accepts() -> None:
    start = observe(stub("--early", "refuse", "--ready-after", "5"))
    assert not start.held
    assert in_order(start)


def test_server_without_health_is_ready_when_it_lists_a_model_and_is_asked_by_that_name() -> None:
    start = observe(stub("--no-health", model=""))
    assert in_order(start)


def test_first_request_after_ready_does_not_count_as_held() -> None:
    start = observe(stub(early=False))
    assert not start.held
    assert start.first_ttft < start.first_token


def test_phases_come_from_the_server() -> None:
    (phase,) = observe(stub("--phases")).phases
    assert (phase["name"], phase["start"], phase["end"]) == ("read", 0.1, 0.3)


def test_server_without_phases_has_none() -> None:
    assert observe(stub()).phases == ()


def test_phases_come_from_the_log_of_a_server_that_has_no_others() -> None:
    start = observe(stub("--prints", "INFO Loading weights took 0.25 seconds", "--prints", "ready"))
    (phase,) = start.phases
    assert phase["name"] == "load weights"
    assert 0 <= float(str(phase["start"])) <= float(str(phase["end"])) < start.first_token


def test_reads_and_peak_memory_of_the_processes_are_counted_in_every_start(tmp_path: Path) -> None:
    start = observe(stub())
    assert start.read_bytes is not None
    assert start.peak_rss > 1 << 20


def test_port_that_something_else_has_is_not_measured() -> None:
    server = stub()
    with socket.create_server(("127.0.0.1", server.target.port)):
        with pytest.raises(EngineError, match="where something listens already"):
            observe(server)


def test_load_after_the_first_token_counts_tokens_by_the_second() -> None:
    minute = observe(stub(), load_seconds=1.0).minute
    assert minute is not None
    assert len(minute.tokens) == 1
    assert minute.tokens[0] >= 4


def test_memory_and_idle_cpu_are_measured_on_request() -> None:
    start = observe(stub(), memory=True, idle_seconds=0.1)
    assert start.peak_pss > 1 << 20
    assert 0 <= start.idle_cpu < 10


def test_server_that_ends_early_is_reported_with_its_exit_code_and_last_line() -> None:
    with pytest.raises(EngineError, match=r"(?s)stub ended with exit code 3 .*no such device"):
        observe(stub("--dies", "no such device"))


def test_refused_request_is_reported_with_the_servers_words() -> None:
    with pytest.raises(EngineError, match=r"HTTP 400.*no stories here"):
        observe(stub("--rejects", "stories"))


def test_stream_without_text_is_no_first_token() -> None:
    with pytest.raises(EngineError, match="gives no text"):
        observe(stub("--silent"))


def test_first_token_may_be_a_thought() -> None:
    assert in_order(observe(stub("--thinks")))


def test_server_that_is_never_ready_times_out() -> None:
    with pytest.raises(EngineError, match="has not answered within 1 s"):
        observe(stub("--ready-after", "1000000000", timeout=1.0))


def test_process_left_behind_is_reported_and_ended() -> None:
    with pytest.raises(EngineError, match="left processes behind when it stopped: ") as caught:
        observe(stub("--orphan"))
    pid = int(str(caught.value).rstrip(".").rpartition(" ")[2])
    assert processes.tree(pid) == []


def test_nothing_listens_after_the_start_was_observed() -> None:
    server = stub()
    observe(server)
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect((server.target.host, server.target.port))


def test_running_server_is_stopped_on_the_way_out() -> None:
    server = stub()
    with running(server) as target:
        assert target.model == "stub"
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect((target.host, target.port))


def test_command_line_may_begin_with_environment() -> None:
    assert split_command("A=1 'my server' --port 9") == ("env", "A=1", "my server", "--port", "9")
    assert split_command("server --x") == ("server", "--x")


def test_chat_endpoint_is_asked_with_messages() -> None:
    from hotstart.bench.client import request_body

    body = request_body(Target("127.0.0.1", 1, CHAT, "m"), "Hi", max_tokens=4)
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert "prompt" not in body
