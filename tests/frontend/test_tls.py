"""HTTPS: what works over TCP works over TLS."""

from __future__ import annotations

import json
import resource
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import trustme

from hotstart.frontend import server as server_module

from .conftest import Launch, Running
from .fake_engine import PATIENCE


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture
def secured(launch: Launch, authority: trustme.CA, tmp_path: Path) -> Running:
    """A ready server that speaks TLS; it is called 127.0.0.1."""
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    for blob in issued.cert_chain_pems:
        blob.write_to_path(tmp_path / "cert.pem", append=True)
    http = {"ssl_keyfile": str(tmp_path / "key.pem"), "ssl_certfile": str(tmp_path / "cert.pem")}
    running = launch(http=http)
    running.url = running.url.replace("http:", "https:")
    running.make_ready()
    return running


def test_a_completion_and_a_stream_arrive_over_https(secured: Running, trusting: ssl.SSLContext) -> None:
    secured.engine.answer_with(secured.ids(" fox"))
    body = {"prompt": "the", "max_tokens": 1}
    with secured.client(verify=trusting) as client:
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == " fox"
        streamed = client.post("/v1/completions", json={**body, "stream": True}).text
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
    assert json.loads(events[0])["choices"][0]["text"] == " fox"
    assert events[-1] == "[DONE]"


def test_a_client_that_does_not_trust_the_certificate_is_not_answered(secured: Running) -> None:
    with secured.client() as client, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        client.get("/ping")


@pytest.mark.parametrize("further", [0, 2], ids=["alone", "with requests that queue"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    "leave",
    [ssl.SSLSocket.close, lambda connection: connection.shutdown(socket.SHUT_WR)],
    ids=["close", "half"],
)
def test_a_client_that_leaves_over_https_frees_its_request(
    secured: Running,
    trusting: ssl.SSLContext,
    leave: Callable[[ssl.SSLSocket], None],
    stream: bool,
    further: int,
) -> None:
    body = json.dumps({"prompt": "the", "max_tokens": 2, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    host, port = secured.url.removeprefix("https://").split(":")
    with (
        socket.create_connection((host, int(port)), PATIENCE) as plain,
        trusting.wrap_socket(plain, server_hostname=host) as connection,
    ):
        connection.sendall(request)
        running = secured.engine.next_request()
        if further:
            connection.sendall(request * further)
        leave(connection)
        assert secured.engine.next_abort() == [running.id]


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("https://").split(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def test_a_client_that_never_begins_the_handshake_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.05)
    secured: Running = request.getfixturevalue("secured")
    with connect(secured) as connection:
        assert connection.recv(1) == b""


def test_a_client_is_refused_before_the_handshake_when_files_are_short(
    secured: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8, 8))
    with connect(secured) as connection:
        assert connection.recv(1) == b""
    assert "refused 1 connection: nearly all of the 8 files" in caplog.text
