"""Roles: keys that a service gives for a token, used on a store that checks signatures."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hotstart.checkpoint.remote import open_store
from hotstart.errors import StorageError
from object_servers import KEY, SECRET, ObjectServer, S3Server

UNTIL = (datetime.now(timezone.utc) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
CREDENTIALS = {
    "AccessKeyId": KEY,
    "SecretAccessKey": SECRET,
    "Token": "",
    "Expiration": UNTIL,
    "Code": "Success",
}
STS = f"""<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>
<AccessKeyId>{KEY}</AccessKeyId><SecretAccessKey>{SECRET}</SecretAccessKey><SessionToken>t</SessionToken>
<Expiration>{UNTIL}</Expiration></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""
DENIED = (
    "<ErrorResponse><Error><Code>AccessDenied</Code><Message>Not authorized</Message></Error></ErrorResponse>"
)


class Services(ThreadingHTTPServer):
    """Stands for STS, for the metadata service of a machine and for that of a container."""

    daemon_threads = True

    def __init__(self, certificate: Path | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self.server_port}"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.asked: list[str] = []
        self.denies = False


class _Handler(BaseHTTPRequestHandler):
    server: Services

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        role = "/latest/meta-data/iam/security-credentials/"
        bodies = {
            "/": STS,
            "/latest/api/token": "token",
            role: "reader",
            f"{role}reader": json.dumps(CREDENTIALS),
            "/v1/credentials": json.dumps(CREDENTIALS),
        }
        body = (DENIED if self.server.denies else bodies.get(path, "")).encode()
        self.send_response(403 if self.server.denies else 200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = answer

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def services(certificate: Path | None = None) -> Iterator[Services]:
    with Services(certificate) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    root = tmp_path_factory.mktemp("buckets")
    (root / "models" / "tiny").mkdir(parents=True)
    (root / "models" / "tiny" / "config.json").write_text("{}")
    with S3Server(root) as server:
        yield server


def environ_of(s3: ObjectServer, **more: str) -> dict[str, str]:
    return {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_REGION": "eu-west-2", "HOME": "/proc/nowhere", **more}


def certificate_in(folder: Path) -> Path:
    """A key and its certificate, signed by an authority in the same file."""
    ca, key, request, leaf = (str(folder / name) for name in ("ca.pem", "key.pem", "csr.pem", "leaf.pem"))
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1\n")
    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for command in (
        [*new, "-x509", "-keyout", f"{ca}.key", "-out", ca, "-subj", "/CN=authority"],
        [*new, "-keyout", key, "-out", request, "-subj", "/CN=127.0.0.1"],
        ["x509", "-req", "-in", request, "-CA", ca, "-CAkey", f"{ca}.key", "-out", leaf,
         "-CAcreateserial", "-extfile", str(extensions)],
    ):  # fmt: skip
        subprocess.run(["openssl", *command], check=True, capture_output=True, timeout=30)
    whole = folder / "whole.pem"
    whole.write_bytes(b"".join(Path(name).read_bytes() for name in (key, leaf, ca)))
    return whole


def web_identity(given: Services, folder: Path) -> dict[str, str]:
    token = folder / "token"
    token.write_text("web-identity-token")
    return {
        "AWS_CA_BUNDLE": str(folder / "ca.pem"),
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/reader",
        "AWS_ENDPOINT_URL_STS": given.url,
        "AWS_EC2_METADATA_DISABLED": "true",  # concerns the machine's role alone
    }


def container(given: Services, folder: Path) -> dict[str, str]:
    token = folder / "token"
    token.write_text("pod-token")
    return {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{given.url}/v1/credentials",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token),
    }


def machine(given: Services, folder: Path) -> dict[str, str]:
    return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": given.url}


@pytest.mark.parametrize("role", [web_identity, container, machine])
def test_a_role_reads_and_lists(role: object, s3: ObjectServer, tmp_path: Path) -> None:
    with services(certificate_in(tmp_path) if role is web_identity else None) as given:
        assert callable(role)
        store = open_store("s3://models/tiny", environ=environ_of(s3, **role(given, tmp_path)), patience=5.0)
        assert store.fetch("config.json", 10) is not None
        assert set(store.list()) == {"config.json"}
        store.close()
        assert given.asked


@pytest.mark.parametrize("role", [web_identity, container, machine])
def test_a_role_that_is_refused_is_named_with_the_services_words(
    role: object, s3: ObjectServer, tmp_path: Path
) -> None:
    with services(certificate_in(tmp_path) if role is web_identity else None) as given:
        given.denies = True
        assert callable(role)
        store = open_store("s3://models/tiny", environ=environ_of(s3, **role(given, tmp_path)), patience=1.0)
        with pytest.raises(StorageError, match=r"(?i)403.*role.*Check that the") as caught:
            store.fetch("config.json", 10)
    assert "token" not in str(caught.value).replace("AWS_WEB_IDENTITY_TOKEN_FILE", "").replace(
        "/api/token", ""
    )
