"""Checksums that stores keep of their objects: which are understood, compared, and never believed."""

from __future__ import annotations

import base64
import hashlib
import zlib
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fault_proxy import Fault, FaultServer
from hotstart.checkpoint.remote import open_store
from hotstart.storage.aws_credentials import Keys
from hotstart.storage.aws_signature import sign
from hotstart.storage.checksums import Checksum, Hasher, Offer, label, offered
from hotstart.storage.object_checksum import stored_checksum
from object_servers import KEY, SECRET, AzureServer, GcsServer, ObjectServer, S3Server

DATA = bytes(range(256)) * 100
SIZE = len(DATA)


def raw(algorithm: str, data: bytes) -> bytes:
    if algorithm == "crc32":
        return zlib.crc32(data).to_bytes(4, "big")
    return hashlib.new(algorithm, data, usedforsecurity=False).digest()


def text(algorithm: str, data: bytes = DATA) -> str:
    return base64.b64encode(raw(algorithm, data)).decode()


def of_parts(algorithm: str, part: int) -> str:
    """As S3 writes it: the digest of the parts' digests, and their number."""
    digests = [raw(algorithm, DATA[at : at + part]) for at in range(0, SIZE, part)]
    return f"{text(algorithm, b''.join(digests))}-{len(digests)}"


@pytest.mark.parametrize(
    ("headers", "algorithm"),
    [
        ({"x-amz-checksum-sha256": text("sha256"), "x-amz-checksum-type": "FULL_OBJECT"}, "sha256"),
        ({"x-amz-checksum-sha1": text("sha1")}, "sha1"),
        ({"x-amz-checksum-crc32": text("crc32")}, "crc32"),
        ({"x-goog-hash": f"crc32c=n03x6A==,md5={text('md5')}"}, "md5"),
        ({"x-goog-hash": f"crc32c=n03x6A==, md5={text('md5')}"}, "md5"),
        ({"content-md5": text("md5")}, "md5"),
        ({"x-ms-blob-content-md5": text("md5")}, "md5"),
        ({"repr-digest": f"sha-256=:{text('sha256')}:"}, "sha256"),
        ({"repr-digest": f"sha-512=:{text('sha512')}:, sha-256=:{text('sha256')}:"}, "sha256"),
        ({"digest": f"SHA-256={text('sha256')}"}, "sha256"),
        ({"digest": f"sha-512={text('sha512')}"}, "sha512"),
        ({"digest": f"SHA={text('sha1')}"}, "sha1"),
    ],
)
def test_checksums_by_every_header(headers: dict[str, str], algorithm: str) -> None:
    best = offered({"etag": '"x"', **headers}).best
    assert best is not None
    assert (best.algorithm, best.value, best.header) == (
        algorithm, raw(algorithm, DATA).hex(), next(iter(headers)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "others"),
    [
        ({"x-amz-checksum-crc64nvme": "AAAAAAAAAAA=", "x-amz-checksum-type": "FULL_OBJECT"}, "CRC-64/NVME"),
        ({"x-amz-checksum-crc32c": "n03x6A=="}, "CRC-32C"),
        ({"x-goog-hash": "crc32c=n03x6A=="}, "CRC-32C"),
    ],
)
def test_what_cannot_be_computed_fast_is_named(headers: dict[str, str], others: str) -> None:
    assert offered(headers) == Offer(others=(others,))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"etag": f'"{hashlib.md5(DATA).hexdigest()}"'},  # looks like one, and need not be
        {"content-md5": "not base64"},
        {"content-md5": text("sha1")},
        {"x-amz-checksum-sha256": text("sha256")[:-4]},
        {"x-amz-checksum-crc32": "-3"},
        {"repr-digest": "sha-256=::"},
        {"x-amz-checksum-type": "FULL_OBJECT", "x-amz-checksum-algorithm": "SHA256"},
    ],
)
def test_what_is_no_checksum_is_none(headers: dict[str, str]) -> None:
    assert offered(headers).best is None


@given(st.binary(max_size=200), st.integers(1, 60), st.lists(st.integers(0, 50)))
def test_a_digest_of_parts_is_the_same_however_the_bytes_come(
    data: bytes, part: int, lengths: list[int]
) -> None:
    hasher, at = Hasher("sha256", part), 0
    for length in [*lengths, len(data)]:
        hasher.update(memoryview(data)[at : at + length])
        at = min(len(data), at + length)
    digests = b"".join(raw("sha256", data[at : at + part]) for at in range(0, len(data), part))
    assert hasher.hexdigest() == raw("sha256", digests).hex()


@pytest.mark.parametrize("algorithm", ["sha256", "sha512", "sha1", "md5", "crc32"])
def test_each_algorithm_of_a_whole_object(algorithm: str) -> None:
    hasher = Hasher(algorithm)
    hasher.update(memoryview(DATA)[:1000])
    hasher.update(memoryview(DATA)[1000:])
    assert hasher.hexdigest() == raw(algorithm, DATA).hex()


def test_kinds_of_digests_as_people_write_them() -> None:
    assert [label("crc32"), label("sha256", 8 << 20)] == ["CRC-32", "SHA-256 of parts of 8.39 MB"]


def test_a_signature_is_that_of_amazons_own_example() -> None:
    """https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html"""
    keys = Keys(
        access_key_id="AKIAIOSFODNN7EXAMPLE", secret_access_key="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    )
    url = sign(
        "GET", "https://examplebucket.s3.amazonaws.com/test.txt", keys, "us-east-1",
        headers={}, query={}, now=datetime(2013, 5, 24, tzinfo=timezone.utc), seconds=86400,
    )  # fmt: skip
    assert url.endswith("&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404")


def asked(server: FaultServer, **environ: str) -> Offer:
    keys = {"AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    store = open_store("s3://b/m", environ={"HOME": "/proc/nowhere", **keys, **environ}, patience=5.0)
    offer = stored_checksum(store, "m/a", SIZE, server.etag("b/m/a"))
    store.close()
    return offer


def test_s3_is_asked_for_its_checksum_by_a_header_that_is_signed() -> None:
    fault = Fault(headers={"x-amz-checksum-sha256": text("sha256")})
    with FaultServer({"b/m/a": DATA}, fault) as server:
        best = asked(server).best
        request = server.requests[-1]
    assert best == Checksum("sha256", raw("sha256", DATA).hex(), "x-amz-checksum-sha256")
    assert (request.method, request.headers["x-amz-checksum-mode"]) == ("HEAD", "ENABLED")
    assert "X-Amz-SignedHeaders=host%3Bx-amz-checksum-mode" in request.target


@pytest.mark.parametrize("part", [5000, 6400])  # the last part is shorter, or is not
def test_a_checksum_of_parts_comes_with_their_length(part: int) -> None:
    count = -(-SIZE // part)
    last = SIZE - (count - 1) * part
    composite = {"x-amz-checksum-sha256": of_parts("sha256", part), "x-amz-checksum-type": "COMPOSITE"}

    def answer(length: int) -> Fault:
        headers: dict[str, str | None] = {"x-amz-mp-parts-count": str(count), "Content-Length": str(length)}
        return Fault(nth=1, status=206, headers=headers)

    with FaultServer({"b/m/a": DATA}, Fault(nth=1, headers=dict(composite))) as server:
        server.faults += [answer(part), answer(last)]
        best = asked(server).best
        assert [request.target.count(f"&partNumber={n}&") for n, request in enumerate(server.requests)] == [
            0, 1, 0,
        ]  # fmt: skip
    assert best is not None
    assert best.part == part
    hasher = Hasher("sha256", part)
    hasher.update(memoryview(DATA))
    assert hasher.hexdigest() == best.value


def test_a_checksum_of_parts_whose_length_is_not_told_is_not_compared() -> None:
    fault = Fault(headers={"x-amz-checksum-crc32": of_parts("crc32", 5000)})
    with FaultServer({"b/m/a": DATA}, fault) as server:
        assert asked(server) == Offer(others=("parts of unknown length",))


@pytest.mark.parametrize("status", [403, 404, 405, 412, 501])
def test_a_store_that_does_not_tell_has_no_checksum(status: int) -> None:
    with FaultServer({"b/m/a": DATA}, Fault(status=status)) as server:
        assert asked(server) == Offer()


def test_the_checksum_of_an_object_that_was_replaced_is_none() -> None:
    headers: dict[str, str | None] = {"x-amz-checksum-sha256": text("sha256"), "ETag": '"another"'}
    with FaultServer({"b/m/a": DATA}, Fault(headers=headers)) as server:
        assert asked(server) == Offer()


def test_a_server_that_stumbles_is_asked_again() -> None:
    fault = Fault(nth=1, status=503)
    with FaultServer({"b/m/a": DATA}, fault, Fault(headers={"Content-MD5": text("md5")})) as server:
        offer = asked(server)
    assert offer.best is not None


def test_a_web_server_is_asked_for_sha256() -> None:
    fault = Fault(headers={"Repr-Digest": f"sha-256=:{text('sha256')}:"})
    with FaultServer({"m/a": DATA}, fault) as server:
        store = open_store(f"{server.url}/m", environ={}, patience=5.0)
        best = stored_checksum(store, "m/a", SIZE, server.etag("m/a")).best
        store.close()
        assert server.requests[-1].headers["want-repr-digest"] == "sha-256=10, sha-512=5"
    assert best is not None
    assert best.value == raw("sha256", DATA).hex()


def real(scheme: str, server: ObjectServer) -> Offer:
    store = open_store(
        f"{scheme}://models/m", environ={"HOME": "/proc/nowhere", **server.environ}, patience=5.0
    )
    first = store.fetch("a.bin", 10)
    assert first is not None
    offer = stored_checksum(store, "m/a.bin", SIZE, first.identity)
    store.close()
    return offer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "buckets" / "models" / "m"
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(DATA)
    return tmp_path / "buckets"


MD5 = hashlib.md5(DATA).hexdigest()


def test_googles_emulator_gives_an_md5(root: Path) -> None:
    with GcsServer(root) as server:
        assert real("gs", server) == Offer(Checksum("md5", MD5, "x-goog-hash"), ("CRC-32C",))


@pytest.mark.skipif(AzureServer.program is None, reason="azurite is not installed (npm install -g azurite)")
def test_azures_emulator_gives_an_md5(root: Path, tmp_path: Path) -> None:
    with AzureServer(root, tmp_path / "state") as server:
        assert real("az", server) == Offer(Checksum("md5", MD5, "content-md5"))


def test_a_store_that_checks_signatures_takes_ours_and_gives_nothing(root: Path) -> None:
    """Its ETag looks like an MD5 and is none."""
    with S3Server(root) as server:
        store = open_store("s3://models/m", environ={"HOME": "/proc/nowhere", **server.environ}, patience=5.0)
        first = store.fetch("a.bin", 10)
        assert first is not None
        assert len(first.identity) == len(f'"{MD5}"')
        assert first.identity != f'"{MD5}"'
        store.close()
        assert real("s3", server) == Offer()
