"""What a connection may cost, and what a client may offer on it."""

from __future__ import annotations

import contextlib
import json
import socket
from urllib.parse import urlsplit

import pytest

from hotstart.frontend.http_protocol import MAX_HEADER_BYTES, MAX_PIPELINED

from .conftest import Running
from .fake_engine import PATIENCE


def connect(server: Running) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=PATIENCE)


def closed(connection: socket.socket) -> bool:
    """Whether the server closes it; reads what still comes."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


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
