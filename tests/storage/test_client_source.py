"""Objects of clouds that cannot sign: read by the cloud's client, pinned like the others."""

from __future__ import annotations

import random
import threading

import pytest
from obstore.store import S3Store

from fault_proxy import Fault, FaultServer
from hotstart.errors import StorageError
from hotstart.storage.client_source import ClientSource
from hotstart.storage.location import parse_location
from hotstart.storage.object_store import NEVER, ObjectStore
from hotstart.storage.source import ReadCancelled

DATA = random.Random(3).randbytes(5 << 20)
FILES = {"m/a.bin": DATA}


def opened(server: FaultServer) -> ClientSource:
    environ = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "A" * 16,
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    store = ObjectStore(parse_location("s3://m"), environ=environ, patience=2.0)
    client = S3Store(
        "m",
        endpoint=server.url,
        access_key_id="A" * 16,
        secret_access_key="secret",
        client_options={"allow_http": True},
    )
    return ClientSource(store, client, "a.bin", len(DATA), server.etag("m/a.bin"))


def test_the_bytes_of_a_range_in_pieces() -> None:
    with FaultServer(FILES) as server:
        buffer = bytearray(len(DATA) - 5)
        opened(server).read_into(memoryview(buffer), 5, NEVER)
        assert bytes(buffer) == DATA[5:]
        assert len(server.requests) == 2


def test_a_replaced_object_is_an_error() -> None:
    replace = Fault(nth=2, do=lambda server: server.files.update({"m/a.bin": DATA[::-1]}))
    with FaultServer(FILES, replace) as server:
        with pytest.raises(StorageError, match="was replaced while it was read"):
            opened(server).read_into(memoryview(bytearray(len(DATA))), 0, NEVER)


def test_a_range_of_a_grown_object_is_an_error() -> None:
    with FaultServer(FILES) as server:
        source = opened(server)
        source.identity = ""
        server.files["m/a.bin"] = DATA + b"!"
        with pytest.raises(StorageError, match="was replaced while it was read"):
            source.read_into(memoryview(bytearray(100)), 0, NEVER)


def test_a_refusal_is_named() -> None:
    with FaultServer(FILES, Fault(status=403, body=b"<Error><Code>AccessDenied</Code></Error>")) as server:
        with pytest.raises(StorageError, match="AccessDenied"):
            opened(server).read_into(memoryview(bytearray(100)), 0, NEVER)


def test_a_cancelled_read_asks_for_nothing_more() -> None:
    with FaultServer(FILES) as server:
        cancel = threading.Event()
        server.faults.append(Fault(do=lambda server: cancel.set()))
        with pytest.raises(ReadCancelled):
            opened(server).read_into(memoryview(bytearray(len(DATA))), 0, cancel)
        assert len(server.requests) == 1
