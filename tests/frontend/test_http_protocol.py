"""What a connection may cost, and what a client may offer on it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from hotstart.frontend import http_protocol
from hotstart.frontend.http_protocol import MAX_HEADER_BYTES, MAX_PIPELINED
from hotstart.messages import FinishReason

from .conftest import Running
from .fake_engine import PATIENCE


def connect(server: Running) -> socket.socket:
    address = urlsplit(server.url)
    assert address.port is not None
    return socket.create_connection((address.hostname, address.port), timeout=PATIENCE)


def closed(connection: socket.socket) -> bool:
    """Whether the server closes it; reads what still comes."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def test_a_client_is_logged_by_its_own_address(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "uvicorn.access"):
        with server.client() as client:
            assert client.get("/ping").status_code == 200
    [line] = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert line.startswith("127.0.0.1:")


def test_a_flood_of_pipelined_requests_ends_the_connection(server: Running) -> None:
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 20 * MAX_PIPELINED)
        assert closed(connection)


def test_a_few_pipelined_requests_are_answered(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
        data = b""
        while data.count(b"HTTP/1.1 200") < 4:
            data += connection.recv(1 << 16)


@pytest.mark.parametrize(
    "headers", [b"X: " + b"a" * 2 * MAX_HEADER_BYTES, b"X: y\r\n" * MAX_HEADER_BYTES], ids=["one", "many"]
)
def test_headers_without_end_end_the_connection(server: Running, headers: bytes) -> None:
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + headers)
        assert closed(connection)


def test_an_offer_of_http2_is_ignored_and_the_body_is_read(server: Running) -> None:
    body = json.dumps({"model": "nope", "prompt": "x"}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings, close\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    with connect(server) as connection:
        connection.sendall(head + body)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"nope" in answer


def test_an_absurd_content_length_is_refused(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: " + b"0" * 5000 + b"2\r\n\r\n{}"
        )
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400")


def generation(*, stream: bool, version: bytes = b"1.1") -> bytes:
    """The bytes of a request."""
    body = json.dumps({"prompt": "the", "max_tokens": 2, "stream": stream}).encode()
    return (
        b"POST /v1/completions HTTP/%s\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (version, len(body), body)
    )


def ask(server: Running, *, stream: bool, version: bytes = b"1.1") -> socket.socket:
    """A request on a connection of its own, whose sending half is still open."""
    connection = connect(server)
    connection.sendall(generation(stream=stream, version=version))
    return connection


def answer_on(connection: socket.socket) -> bytes:
    """The body of the next answer, to its end."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    assert response.status == 200
    return response.read()


def test_a_client_that_closes_its_sending_half_is_answered(server: Running) -> None:
    with ask(server, stream=False) as connection:
        request = server.engine.next_request()
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        server.engine.step([(request.id, 5, FinishReason.LENGTH)])
        assert json.loads(answer_on(connection))["choices"][0]["finish_reason"] == "length"
        assert closed(connection)


def test_a_stream_goes_on_when_its_client_closes_the_sending_half(server: Running) -> None:
    with ask(server, stream=True) as connection:
        request = server.engine.next_request()
        server.engine.step([(request.id, server.ids(" fox")[0], FinishReason.RUNNING)])
        seen = b""
        while b"fox" not in seen:
            seen += connection.recv(1 << 16)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1 << 16) == b"3\r\n:\n\n\r\n"
        server.engine.step([(request.id, server.ids(" dog")[0], FinishReason.LENGTH)])
        rest = b""
        while part := connection.recv(1 << 16):
            rest += part
    assert b'" dog"' in rest
    assert b"data: [DONE]" in rest


def test_a_client_that_leaves_between_two_tokens_frees_its_request(server: Running) -> None:
    with ask(server, stream=True) as connection:
        request = server.engine.next_request()
        server.engine.step([(request.id, server.ids(" fox")[0], FinishReason.RUNNING)])
        seen = b""
        while b"fox" not in seen:
            seen += connection.recv(1 << 16)
    assert server.engine.next_abort() == [request.id]


def test_a_client_that_half_closes_and_then_leaves_frees_its_request(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As behind a relay, which learns that its client is gone when it is told something.
    monkeypatch.setattr(http_protocol, "_PROBE_SECONDS", 0.01)
    with ask(server, stream=False) as connection:
        request = server.engine.next_request()
        connection.shutdown(socket.SHUT_WR)
        assert b"100 Continue" in connection.recv(1 << 16)
    assert server.engine.next_abort() == [request.id]


def test_the_end_of_what_an_http_1_0_client_sends_is_the_end_of_the_connection(server: Running) -> None:
    with ask(server, stream=False, version=b"1.0") as connection:
        request = server.engine.next_request()
        connection.shutdown(socket.SHUT_WR)
        assert server.engine.next_abort() == [request.id]
        assert connection.recv(1 << 16) == b""


@pytest.mark.parametrize(
    "leave", [socket.socket.close, lambda c: c.shutdown(socket.SHUT_WR)], ids=["close", "half"]
)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("at_once", [True, False], ids=["sent together", "sent later"])
def test_a_client_that_leaves_while_requests_queue_frees_the_running_one(
    server: Running,
    caplog: pytest.LogCaptureFixture,
    leave: Callable[[socket.socket], None],
    stream: bool,
    at_once: bool,
) -> None:
    first, queued = generation(stream=stream), generation(stream=stream) * 2
    with connect(server) as connection:
        connection.sendall(first + queued if at_once else first)
        request = server.engine.next_request()
        if not at_once:
            connection.sendall(queued)
        leave(connection)
        assert server.engine.next_abort() == [request.id]
    with server.client() as client:
        assert client.get("/ping").status_code == 200  # the loop has gone round since
    assert server.engine.requests == [request]
    assert not [record for record in caplog.records if record.exc_info]


def test_queued_requests_are_answered_in_order_and_the_last_may_end_with_the_sending_half(
    server: Running,
) -> None:
    with connect(server) as connection:
        connection.sendall(generation(stream=False) * 2)
        first = server.engine.next_request()
        server.engine.step([(first.id, 5, FinishReason.LENGTH)])
        answer_on(connection)
        second = server.engine.next_request()
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        server.engine.step([(second.id, 5, FinishReason.LENGTH)])
        assert json.loads(answer_on(connection))["choices"][0]["finish_reason"] == "length"


def test_clients_that_close_their_sending_half_take_no_descriptor(server: Running) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(ask(server, stream=False)) for _ in range(8)]
        requests = [server.engine.next_request() for _ in connections]
        before = open_files()
        for connection in connections:
            connection.shutdown(socket.SHUT_WR)
            assert b"100 Continue" in connection.recv(1 << 16)
        assert open_files() == before
        connections[3].close()
        assert server.engine.next_abort() == [requests[3].id]


@pytest.fixture
def short_of_files(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A server that is ready, and has no descriptor left for connections."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8, 8))
    monkeypatch.setattr(http_protocol, "_LINGER_SECONDS", PATIENCE)
    return server


def refused(server: Running) -> socket.socket:
    """A connection on which the refusal has been read, to its end."""
    connection = connect(server)
    answer = b""
    while part := connection.recv(1 << 16):
        answer += part
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"Too many connections are open" in answer
    return connection


def send_until_reset(connection: socket.socket) -> None:
    def send_on() -> None:
        while True:
            connection.sendall(b"x" * 1024)

    with pytest.raises(ConnectionError):
        send_on()


def test_a_refused_client_may_finish_its_request(
    short_of_files: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with refused(short_of_files) as connection:
        for _ in range(20):
            connection.sendall(generation(stream=False))
    assert "refused 1 connection: nearly all of the 8 files" in caplog.text


def test_a_refused_client_that_goes_on_sending_is_cut_off(
    short_of_files: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_LINGER_SECONDS", 0.01)
    with refused(short_of_files) as connection:
        send_until_reset(connection)


def test_only_a_few_refused_clients_may_finish_their_requests(
    short_of_files: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_MOST_LINGERING", 1)
    with refused(short_of_files) as first, refused(short_of_files) as second:
        send_until_reset(first)
        second.sendall(generation(stream=False))
        second.sendall(generation(stream=False))
