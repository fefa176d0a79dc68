"""What docs/troubleshooting.md says of storage, provoked: mounts, reads, stores, copies, digests."""

from __future__ import annotations

import errno
import logging
import os
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fault_proxy import Fault, FaultServer
from fuse_pass_through import mounted
from hotstart.checkpoint.base import Checkpoint
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.checkpoint.remote import ObjectFolder, open_store
from hotstart.cli.main import main
from hotstart.config.settings import LoadConfig
from hotstart.errors import HotstartError
from hotstart.loading.afterwards import Afterwards
from hotstart.loading.image import Image
from hotstart.storage.disk_copy import DiskCopies, Limit
from hotstart.storage.object_store import NEVER
from hotstart.storage.source import FileSource
from object_servers import S3Server
from stuck_storage import StuckFolder

KEYS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "else"}
_OTHERS = ("AWS_", "AZURE_", "GOOGLE_", "RUNAI_", "S3_", "SSL_CERT_")


class Place:
    """A model in a directory, in a store at ``s3://models/tiny``, and its files for a web server."""

    def __init__(
        self,
        model: Path,
        store: S3Server,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """``folder`` is the home directory, and holds ``model``."""
        self.model = model
        self.store = store
        self.folder = folder
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        for name in list(os.environ):
            if name.startswith(_OTHERS) or name.lower().endswith("_proxy"):
                monkeypatch.delenv(name)
        self.set(HOME=str(folder), AWS_EC2_METADATA_DISABLED="true")

    def set(self, **environ: str) -> None:
        for name, value in environ.items():
            self._monkeypatch.setenv(name, value)

    def check(self, model: str, *flags: str, **environ: str) -> str:
        """Output of a ``hotstart check`` that finds something."""
        self.set(**environ)
        caches = () if "--cache-root" in flags else ("--cache-root", str(self.folder / "cache"))
        return self.run("check", model, "--port", "0", "--storage-timeout", "0.5", *caches, *flags)

    def run(self, *words: str) -> str:
        """Output of a command that ends in an error."""
        assert main(list(words)) > 1
        captured = self._capsys.readouterr()
        return captured.out + captured.err

    def web(self, *faults: Fault, tls: ssl.SSLContext | None = None) -> FaultServer:
        """Serves the model at ``/m``."""
        files = {f"m/{path.name}": path.read_bytes() for path in self.model.iterdir()}
        return FaultServer(files, *faults, tls=tls)

    def checkpoint(self, server: FaultServer, copies: DiskCopies | None = None) -> Checkpoint:
        """The weights as a load finds them."""
        store = open_store(f"{server.url}/m", environ={}, patience=0.5)
        return open_checkpoint(ObjectFolder(store, str(self.model), copies))


def refused(do: Callable[[], object]) -> str:
    with pytest.raises(HotstartError) as raised:
        do()
    return str(raised.value)


def load(checkpoint: Checkpoint, patience: float = 60.0) -> Image:
    """Read to the end."""
    image = Image(checkpoint, strategy="buffered", patience=patience)
    image.start()
    try:
        image.wait()
    finally:
        image.close()
    return image


def after(checkpoint: Checkpoint, **settings: str) -> str:
    """What is logged about copies and digests once a model is ready."""
    said: list[str] = []

    def say(level: int, text: str) -> None:
        said.append(f"{logging.getLevelName(level)} {text}")

    afterwards = Afterwards(checkpoint, LoadConfig(**settings), "", say)
    afterwards.start(())
    afterwards.confirm()
    afterwards.go_on()
    afterwards.wait()
    return "\n".join(said)


def wrong_volume(place: Place) -> str:
    return place.check(str(place.model), "--expect-mount", "/proc:nfs4")


def model_beside_the_mount(place: Place) -> str:
    return place.check(str(place.model), "--expect-mount", "/proc")


def read_that_hangs(place: Place) -> str:
    folder = StuckFolder(str(place.model), descriptors=10)
    try:
        return refused(lambda: load(open_checkpoint(folder), patience=0.1))
    finally:
        folder.go.set()


def read_that_fails(place: Place) -> str:
    fails = (sorted(path.name for path in place.model.glob("*.safetensors"))[0], 0, errno.EIO)
    with mounted(place.model, place.folder / "failing", fails=fails) as mount:
        source = FileSource(str(mount.path / fails[0]))
        try:
            return refused(lambda: source.read_into(memoryview(bytearray(100)), 0, NEVER))
        finally:
            source.close()


def no_direct_reads(place: Place) -> str:
    with mounted(place.model, place.folder / "buffered", direct=False) as mount:
        return refused(lambda: FileSource(str(next(mount.path.glob("*.safetensors"))), direct=True))


def file_that_is_being_copied(place: Place) -> str:
    path = next(place.model.glob("*.safetensors"))
    source = FileSource(str(path))
    os.truncate(path, 100)
    try:
        return refused(lambda: source.read_into(memoryview(bytearray(source.size)), 0, NEVER))
    finally:
        source.close()


def wrong_digest(place: Place) -> str:
    names = [path.name for path in place.model.glob("*.safetensors")]
    (place.model / "SHA256SUMS").write_text("".join(f"{'0' * 64}  {name}\n" for name in names))
    folder = StuckFolder(str(place.model), descriptors=0)
    return refused(lambda: after(open_checkpoint(folder), verify="digest"))


def file_in_place_of_a_folder(place: Place) -> str:
    return place.check("s3://models/tiny/model.safetensors")


def absent_prefix(place: Place) -> str:
    return place.check("s3://models/tinny", **place.store.environ)


def bucket_of_models(place: Place) -> str:
    return place.check("s3://models", **place.store.environ)


def web_without_model(place: Place) -> str:
    with place.web() as server:
        return place.check(f"{server.url}/other")


def web_without_index(place: Place) -> str:
    with place.web(Fault(path="index.json", status=404)) as server:
        return place.check(f"{server.url}/m")


def no_credentials(place: Place) -> str:
    return place.check("s3://models/tiny", AWS_ENDPOINT_URL=place.store.endpoint)


def wrong_key(place: Place) -> str:
    return place.check("s3://models/tiny", **{**place.store.environ, "AWS_SECRET_ACCESS_KEY": "wrong"})


def absent_bucket(place: Place) -> str:
    return place.check("s3://modles/tiny", **place.store.environ)


def bucket_in_the_endpoint(place: Place) -> str:
    environ = {**place.store.environ, "AWS_ENDPOINT_URL": f"{place.store.endpoint}/models"}
    return place.check("s3://models/tiny", **environ)


def wrong_clock(place: Place) -> str:
    earlier = {"Date": "Tue, 01 Jan 2019 00:00:00 GMT"}
    with place.web(Fault(status=403, body=b"<Code>SignatureDoesNotMatch</Code>", headers=earlier)) as server:
        return place.check("s3://m", AWS_ENDPOINT_URL=server.url, **KEYS)


def refusal(status: int, code: str) -> Callable[[Place], str]:
    """What a small server never says: a large one's refusal."""

    def provoke(place: Place) -> str:
        body = f"<Error><Code>{code}</Code><Message>In its words.</Message></Error>".encode()
        with place.web(Fault(status=status, body=body)) as server:
            return place.check("s3://m", AWS_ENDPOINT_URL=server.url, **KEYS)

    return provoke


def half_a_pair(place: Place) -> str:
    return place.check("s3://models/tiny", AWS_ACCESS_KEY_ID="somebody")


def absent_profile(place: Place) -> str:
    return place.check("s3://models/tiny", AWS_PROFILE="work")


def profile_with_a_browser(place: Place) -> str:
    (place.folder / "config").write_text("[profile work]\nsso_session = somewhere\n")
    return place.check("s3://m/m", AWS_CONFIG_FILE=str(place.folder / "config"), AWS_PROFILE="work")


def program_without_keys(place: Place) -> str:
    (place.folder / "config").write_text("[default]\ncredential_process = false\n")
    return place.check("s3://m/m", AWS_CONFIG_FILE=str(place.folder / "config"))


def no_account(place: Place) -> str:
    return place.check("az://models/tiny")


def other_credentials_of_google(place: Place) -> str:
    (place.folder / "key.json").write_text('{"type": "external_account"}')
    return place.check("gs://models/tiny", GOOGLE_APPLICATION_CREDENTIALS=str(place.folder / "key.json"))


def nobody_there(place: Place) -> str:
    with place.web() as gone:
        pass
    return place.check(f"{gone.url}/m")


def overloaded_store(place: Place) -> str:
    with place.web(Fault(status=503)) as server:
        return place.check(f"{server.url}/m")


def proxy_of_another_kind(place: Place) -> str:
    return place.check("http://store.example/m", HTTP_PROXY="socks5://proxy.example:1080")


def private_certificate(place: Place) -> str:
    pem = place.folder / "server.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    subject = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command, *subject, "-keyout", pem, "-out", f"{pem}.crt"], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{pem}.crt", pem)
    with place.web(tls=context) as server:
        return place.check(f"{server.url}/m")


def store_without_tls(place: Place) -> str:
    return place.check("s3://models/tiny", AWS_ENDPOINT_URL=f"https://127.0.0.1:{place.store.port}")


def whole_files(place: Place) -> str:
    with place.web(Fault(ignore_range=True)) as server:
        checkpoint = place.checkpoint(server)
        assert checkpoint.folder is not None
        source = checkpoint.folder.source(checkpoint.files[0])
        try:
            return refused(lambda: source.read_into(memoryview(bytearray(100)), 0, NEVER))
        finally:
            source.close()


def compressed_files(place: Place) -> str:
    with place.web(Fault(headers={"Content-Encoding": "gzip"})) as server:
        return place.check(f"{server.url}/m")


def other_peoples_server(place: Place) -> str:
    with place.web(Fault(status=302, headers={"Location": "http://elsewhere.example/m"})) as server:
        return place.check(f"{server.url}/m")


def model_replaced(place: Place) -> str:
    with place.web() as server:
        checkpoint = place.checkpoint(server)
        server.files = {name: data[::-1] for name, data in server.files.items()}
        return refused(lambda: load(checkpoint))


def store_that_falls_silent(place: Place) -> str:
    with place.web() as server:
        checkpoint = place.checkpoint(server)
        server.faults = [Fault(stall=0)]
        return refused(lambda: load(checkpoint))


def copies(place: Place, nbytes: int | None = None) -> DiskCopies:
    return DiskCopies(Limit(str(place.folder / "copies"), nbytes))


def no_room_for_a_copy(place: Place) -> str:
    with place.web() as server:
        return after(place.checkpoint(server, copies(place, 1000)), disk_cache="on")


def copy_of_a_directory(place: Place) -> str:
    folder = StuckFolder(str(place.model), descriptors=0)
    return after(open_checkpoint(folder), disk_cache=str(place.folder / "copies"))


def damaged_copy(place: Place) -> str:
    with place.web() as server:
        after(place.checkpoint(server, copies(place)), disk_cache="on")
        path = next((place.folder / "copies").glob("*/data"))
        with open(path, "r+b") as file:
            file.write(b"\0" * 4)
        return after(place.checkpoint(server, copies(place)), disk_cache="on")


STORAGE: dict[str, Callable[[Place], str]] = {
    "Another volume is mounted": wrong_volume,
    "The model is not on the mount": model_beside_the_mount,
    "A read gives no byte": read_that_hangs,
    "A read fails": read_that_fails,
    "Direct reads are refused": no_direct_reads,
    "A file changes while it is read": file_that_is_being_copied,
    "A digest differs": wrong_digest,
    "The address is not a folder": file_in_place_of_a_folder,
    "Nothing is there": absent_prefix,
    "There are only folders": bucket_of_models,
    "The web server has no model there": web_without_model,
    "The web server has no index": web_without_index,
    "No credentials are found": no_credentials,
    "The keys are refused": wrong_key,
    "The store denies access": refusal(403, "AccessDenied"),
    "The bucket does not exist": absent_bucket,
    "The endpoint contains the bucket": bucket_in_the_endpoint,
    "The bucket is in another region": refusal(301, "PermanentRedirect"),
    "The token has expired": refusal(400, "ExpiredToken"),
    "The clock is wrong": wrong_clock,
    "Half of a pair of keys": half_a_pair,
    "The profile is not found": absent_profile,
    "The profile signs on by a browser": profile_with_a_browser,
    "The profile's program fails": program_without_keys,
    "No storage account is named": no_account,
    "Google's credentials are of another kind": other_credentials_of_google,
    "The store cannot be reached": nobody_there,
    "The store is overloaded": overloaded_store,
    "The proxy cannot be used": proxy_of_another_kind,
    "The certificate is not trusted": private_certificate,
    "The store has no TLS": store_without_tls,
    "The server ignores ranges": whole_files,
    "Files come compressed": compressed_files,
    "A redirect leads elsewhere": other_peoples_server,
    "The model is replaced during the load": model_replaced,
    "The store gives no more bytes": store_that_falls_silent,
    "No copy is written": no_room_for_a_copy,
    "There is no disk copy": copy_of_a_directory,
    "A copy is damaged": damaged_copy,
}
"""By the title of the entry."""
