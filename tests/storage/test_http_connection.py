"""Connections as weights need them: hosts of every spelling, proxies, TLS, redirects, nothing left open."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fault_proxy import Fault, FaultServer, until
from hotstart.errors import ConfigError, StorageError
from hotstart.storage.connections import Connections, follow, proxy_for
from hotstart.storage.http_connection import Address, HttpConnection, in_turns
from hotstart.storage.object_store import NEVER
from hotstart.storage.source import ReadCancelled

DATA = bytes(range(256)) * 40
FILES = {"a": DATA}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(path / "key.pem"), "-out", str(path / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    return path


def server_side(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    return context


def client_side(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate / "cert.pem"))


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def connections() -> Iterator[Connections]:
    made = Connections(patience=10.0)
    yield made
    made.close()


def body_of(connections: Connections, url: str) -> bytes:
    connection, head = connections.get(url, {}, NEVER)
    body = connection.body(head, 1 << 20, NEVER)
    connections.give_back(connection)
    return body


@pytest.mark.parametrize(
    "fault", [Fault(), Fault(chunked=1000), Fault(headers={"Content-Length": None}, cut=10_240)]
)
def test_a_body_comes_whole_however_it_is_framed(connections: Connections, fault: Fault) -> None:
    with FaultServer(FILES, fault) as server:
        assert body_of(connections, f"{server.url}/a") == DATA


@pytest.mark.parametrize("fault", [Fault(cut=10_000), Fault(chunked=1000, cut=9000), Fault(cut=0)])
def test_a_body_that_is_cut_is_an_error_and_no_shorter_file(connections: Connections, fault: Fault) -> None:
    with FaultServer(FILES, fault) as server:
        connection, head = connections.get(f"{server.url}/a", {}, NEVER)
        with pytest.raises(ConnectionResetError, match="before the end"):
            connection.body(head, 1 << 20, NEVER)
        connection.close()


@pytest.mark.parametrize("fault", [Fault(), Fault(chunked=1000)])
def test_a_connection_whose_body_was_read_to_its_end_is_used_again(
    connections: Connections, fault: Fault
) -> None:
    with FaultServer(FILES, fault) as server:
        for _ in range(3):
            body_of(connections, f"{server.url}/a")
        assert server.connections == 1


def test_a_server_that_says_close_is_believed(connections: Connections) -> None:
    with FaultServer(FILES, Fault(headers={"Connection": "keep-alive, Close"})) as server:
        for _ in range(2):
            body_of(connections, f"{server.url}/a")
        assert server.connections == 2


def test_a_first_part_of_a_body_leaves_no_connection_behind_it(connections: Connections) -> None:
    with FaultServer(FILES) as server:
        connection, head = connections.get(f"{server.url}/a", {}, NEVER)
        assert connection.body(head, 100, NEVER) == DATA[:100]
        connections.give_back(connection)
        assert body_of(connections, f"{server.url}/a") == DATA
        assert server.connections == 2


def test_an_ipv6_host_is_asked_by_its_address_in_brackets(connections: Connections) -> None:
    with FaultServer(FILES, host="::1") as server:
        assert body_of(connections, f"{server.url}/a") == DATA
        assert server.requests[0].headers["host"] == f"[::1]:{server.port}"


def test_the_host_header_has_the_port(connections: Connections) -> None:
    with FaultServer(FILES) as server:
        body_of(connections, f"{server.url}/a")
        assert server.requests[0].headers["host"] == f"127.0.0.1:{server.port}"


def test_tls(certificate: Path) -> None:
    connections = Connections(patience=10.0, tls=lambda: client_side(certificate))
    with FaultServer(FILES, tls=server_side(certificate)) as server:
        for _ in range(2):
            assert body_of(connections, f"{server.url}/a") == DATA
        assert server.connections == 1
        connections.close()


def test_an_https_address_of_a_port_without_tls_is_named_at_once(connections: Connections) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def refuse() -> None:
            with listener.accept()[0] as client:
                client.recv(4096)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        server = threading.Thread(target=refuse)
        server.start()
        with pytest.raises(StorageError, match=f"{port} answers https:// in plain HTTP"):
            body_of(connections, f"https://127.0.0.1:{port}/a")
        server.join(10)


def test_a_certificate_of_nobody_is_refused_at_once_and_named(
    certificate: Path, connections: Connections
) -> None:
    with FaultServer(FILES, tls=server_side(certificate)) as server:
        with pytest.raises(StorageError, match="is not trusted: self-signed"):
            body_of(connections, f"{server.url}/a")


def test_a_proxy_gets_whole_addresses_and_the_password(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultServer(FILES) as proxy:
        monkeypatch.setenv("http_proxy", f"http://me:s%40cret@127.0.0.1:{proxy.port}")
        assert body_of(connections, "http://store.example:8080/a") == DATA
        asked = proxy.requests[0]
        assert asked.target == "http://store.example:8080/a"
        assert asked.headers["host"] == "store.example:8080"
        assert asked.headers["proxy-authorization"] == "Basic bWU6c0BjcmV0"


def test_tls_goes_through_a_proxy_by_a_tunnel(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = Connections(patience=10.0, tls=lambda: client_side(certificate))
    with FaultServer(FILES, tls=server_side(certificate)) as server, FaultServer({}) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{proxy.port}")
        assert body_of(connections, f"{server.url}/a") == DATA
        assert proxy.connects == [f"127.0.0.1:{server.port}"]
        connections.close()


def test_a_host_in_no_proxy_is_asked_itself(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultServer(FILES) as server:
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
        assert body_of(connections, f"{server.url}/a") == DATA


def test_a_proxy_of_another_kind_is_refused_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "socks5://me:secret@proxy.example:1080")
    with pytest.raises(ConfigError, match=r"socks5://proxy\.example") as caught:
        proxy_for("https", "store.example")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("http://127.0.0.1:9000/b/k", "http://127.0.0.1:9001/b/k"),
        ("http://b.s3.amazonaws.com/k", "https://b.s3.eu-west-1.amazonaws.com/k"),
        ("https://a.example.co.uk/k", "https://b.example.co.uk/k"),
        ("https://store.example/m/k", "../other/k?x=1"),
    ],
)
def test_a_redirect_within_a_cloud_is_followed(url: str, location: str) -> None:
    assert follow(url, location).endswith(location.removeprefix(".."))


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("https://store.example/k", "http://store.example/k"),
        ("https://store.example/k", "https://elsewhere.example/k"),
        ("https://a.one.co.uk/k", "https://a.two.co.uk/k"),
        ("http://10.0.0.1/k", "http://10.0.0.2/k"),
        ("http://10.0.0.1/k", "http://169.254.169.254/latest"),
        ("http://minio/k", "http://other/k"),
        ("https://store.example/k", "file:///etc/passwd"),
        ("http://store.example/k", "http://[store.example/k"),
        ("http://store.example/k", "http://store.example:99999/k"),
        ("http://store.example/k", "http://elsewhere.example:port/k"),
    ],
)
def test_a_redirect_that_leaves_cloud_or_encryption_is_refused(url: str, location: str) -> None:
    with pytest.raises(StorageError, match="is redirected to"):
        follow(url + "?sig=hidden", location)


def test_a_lasting_redirect_is_paid_for_once(connections: Connections) -> None:
    moved = Fault(path="/old", status=301, headers={"Location": "/a"})
    with FaultServer(FILES, moved) as server:
        for _ in range(3):
            assert body_of(connections, f"{server.url}/old") == DATA
        assert server.gets == ["/old", "/a", "/a", "/a"]


def test_connecting_can_be_cancelled() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        place = ("http", "127.0.0.1", full.getsockname()[1])
        waiting = [socket.socket() for _ in range(8)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(place[1:])
        cancel = threading.Event()
        ended: list[BaseException] = []

        def work() -> None:
            try:
                HttpConnection(place, cancel, patience=1000.0).close()
            except (ReadCancelled, OSError) as error:
                ended.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        cancel.set()
        thread.join(30)
        for sock in waiting:
            sock.close()
        assert [type(error) for error in ended] == [ReadCancelled]


def test_a_stalled_handshake_can_be_cancelled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = ("https", "127.0.0.1", silent.getsockname()[1])
        cancel = threading.Event()
        ended: list[BaseException] = []

        def work() -> None:
            try:
                HttpConnection(place, cancel, patience=1000.0)
            except ReadCancelled as error:
                ended.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        accepted, _ = silent.accept()
        cancel.set()
        thread.join(30)
        accepted.close()
        assert ended


def test_connections_spread_over_a_stores_addresses_and_do_not_wait_for_a_dead_family() -> None:
    six: list[Address] = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (f"::{n}", 1)) for n in range(8)]
    four: list[Address] = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.0.0.{n}", 1)) for n in range(8)]
    orders = [in_turns(six + four) for _ in range(50)]
    assert all(sorted(order) == sorted(six + four) for order in orders)
    assert all([each[0] for each in order[:2]] == [socket.AF_INET6, socket.AF_INET] for order in orders)
    assert len({order[0][4] for order in orders}) > 3


def test_closing_closes_what_is_idle(connections: Connections) -> None:
    with FaultServer(FILES) as server:
        body_of(connections, f"{server.url}/a")
        connections.close()
        until(lambda: server.open_connections == 0)
