"""Ranges of an object over a network that breaks in every way: the right bytes, or the right error."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest

from fault_proxy import Fault, FaultServer, until
from hotstart.errors import HotstartError, StorageError
from hotstart.storage.location import parse_location
from hotstart.storage.object_source import ObjectSource
from hotstart.storage.object_store import NEVER, ObjectStore
from hotstart.storage.source import ReadCancelled

DATA = random.Random(1).randbytes(200_000)
FILES = {"m/a.bin": DATA}
OTHER = random.Random(2).randbytes(len(DATA))


def opened(server: FaultServer, patience: float = 10.0) -> tuple[ObjectStore, ObjectSource]:
    """The object as a loader opens it: its identity from a first request."""
    store = ObjectStore(parse_location(f"{server.url}/m"), environ={}, patience=patience)
    first = store.fetch("a.bin", 8)
    assert first is not None
    source = store.source("m/a.bin", first.size, first.identity)
    assert isinstance(source, ObjectSource)
    return store, source


def read(server: FaultServer, patience: float = 10.0, begin: int = 1000, end: int = 151_000) -> bytes:
    _, source = opened(server, patience)
    buffer = bytearray(end - begin)
    try:
        source.read_into(memoryview(buffer), begin, NEVER)
    finally:
        source.close()
    return bytes(buffer)


PASSING = {
    "cut": Fault(nth=2, cut=50_000),
    "cut before the first byte": Fault(nth=2, cut=0),
    "reset": Fault(nth=2, cut=50_000, reset=True),
    "500": Fault(nth=2, status=500),
    "429": Fault(nth=2, status=429),
    "a burst of 503": Fault(status=503, headers={"Retry-After": "0"}, times=4, if_range=lambda b, e: b > 0),
    "RequestTimeout": Fault(nth=2, status=400, body=b"<Error><Code>RequestTimeout</Code></Error>"),
    "another range": Fault(nth=2, headers={"Content-Range": "bytes 0-149999/200000"}),
    "no range": Fault(nth=2, headers={"Content-Range": None}),
    "a shorter length": Fault(nth=2, headers={"Content-Length": "1000"}),
    "a longer length": Fault(nth=2, headers={"Content-Length": "150001"}),
    "two lengths": Fault(nth=2, headers={"Content-Length": "150000\r\nContent-Length: 7"}),
    "a truncated body": Fault(nth=2, body=DATA[1000:9000], headers={"Content-Length": "150000"}, cut=8000),
    "no length": Fault(nth=2, headers={"Content-Length": None}, cut=150_000),
    "no length, cut": Fault(nth=2, headers={"Content-Length": None}, cut=149_999),
    "chunks": Fault(nth=2, chunked=7001),
    "chunks, cut": Fault(nth=2, chunked=7001, cut=60_000),
    "not HTTP": Fault(nth=2, headers={"X": "y\r\n" + "z" * 70_000}),
    "an idle connection closed": Fault(nth=1, close_after=True),
    "a redirect": Fault(path="/m/", nth=2, status=307, headers={"Location": "/m/a.bin?again"}),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_leaves_the_right_bytes(name: str) -> None:
    fault = PASSING[name]
    fault.seen = 0
    with FaultServer(FILES, fault) as server:
        assert read(server) == DATA[1000:151_000]


def test_a_broken_range_is_continued_where_it_broke() -> None:
    with FaultServer(FILES, Fault(nth=2, cut=50_000)) as server:
        read(server)
        assert [request.range for request in server.requests[1:]] == [(1000, 151_000), (51_000, 151_000)]


def test_one_connection_serves_many_ranges() -> None:
    with FaultServer(FILES) as server:
        _, source = opened(server)
        for begin in range(0, 100_000, 10_000):
            source.read_into(memoryview(bytearray(10_000)), begin, NEVER)
        source.close()
        assert server.connections == 1


def test_a_connection_closed_while_idle_is_no_failure() -> None:
    with FaultServer(FILES, Fault(close_after=True)) as server:
        store, source = opened(server)
        for begin in range(0, 50_000, 10_000):
            source.read_into(memoryview(bytearray(10_000)), begin, NEVER)
        source.close()
        assert store.speed.retried == 0


REPLACED: dict[str, Callable[[FaultServer], object]] = {
    "the file": lambda server: server.files.update({"m/a.bin": OTHER}),
    "the file by a shorter one": lambda server: server.files.update({"m/a.bin": DATA[:100]}),
    "the file by a longer one": lambda server: server.files.update({"m/a.bin": DATA + b"!"}),
}


# Without an ETag a file of the same size and time is the same one.
@pytest.mark.parametrize(
    ("name", "etag"),
    [
        (name, etag)
        for name in REPLACED
        for etag in ("strong", "weak", "none")
        if (name, etag) != ("the file", "none")
    ],
)
def test_a_replaced_object_is_an_error_and_never_a_mixture(name: str, etag: str) -> None:
    fault = Fault(nth=2, cut=50_000)
    after = Fault(nth=3, do=REPLACED[name])
    with FaultServer(FILES, after, fault, etag=etag) as server:
        with pytest.raises(StorageError, match="was replaced while it was read"):
            read(server)


def test_without_an_etag_the_time_pins_the_object() -> None:
    later = Fault(nth=2, headers={"Last-Modified": "Mon, 02 Jun 2025 10:00:01 GMT"})
    with FaultServer(FILES, later, etag="none") as server:
        with pytest.raises(StorageError, match="was replaced"):
            read(server)


LASTING = {
    "403": (Fault(status=403, body=b"<Error><Code>AccessDenied</Code></Error>"), "AccessDenied"),
    "404": (Fault(status=404), "is gone"),
    "416": (Fault(status=416), "was replaced"),
    "ranges ignored": (Fault(ignore_range=True), "ignores Range"),
    "compressed": (Fault(headers={"Content-Encoding": "gzip"}), "comes compressed"),
    "another host": (Fault(status=302, headers={"Location": "http://example.org/x"}), "somebody else's"),
    "a loop": (Fault(status=302, headers={"Location": "/m/a.bin"}), "more than 5 redirects"),
    "301 without a place": (Fault(status=301, body=b"<Code>PermanentRedirect</Code>"), "another region"),
}


@pytest.mark.parametrize("name", LASTING)
def test_a_fault_that_stays_is_named_at_once(name: str) -> None:
    fault, words = LASTING[name]
    fault.seen = 0
    fault.if_range = lambda begin, end: begin > 0
    with FaultServer(FILES, fault) as server:
        with pytest.raises(HotstartError, match=words):
            read(server, patience=1000.0)


def test_no_progress_for_the_patience_is_given_up_with_place_and_cause() -> None:
    down = Fault(status=503, body=b"<Code>SlowDown</Code>", if_range=lambda begin, end: begin > 0)
    with FaultServer(FILES, Fault(nth=2, cut=50_000), down) as server:
        with pytest.raises(StorageError, match=r"at byte 51000, in .* attempts: 503 SlowDown"):
            read(server, patience=0.6)


def test_a_store_that_is_slow_but_moves_is_never_given_up() -> None:
    drip = Fault(cut=10_000, delay=0.1, if_range=lambda begin, end: begin > 0)
    with FaultServer(FILES, drip) as server:
        assert read(server, patience=0.6) == DATA[1000:151_000]


def test_a_connection_that_says_nothing_more_is_replaced_before_patience_ends() -> None:
    with FaultServer(FILES, Fault(nth=2, stall=50_000)) as server:
        assert read(server, patience=2.0) == DATA[1000:151_000]
        assert server.requests[-1].range[0] == 51_000


def test_a_store_that_stays_silent_is_given_up() -> None:
    with FaultServer(FILES, Fault(stall=-1, if_range=lambda begin, end: begin > 0)) as server:
        with pytest.raises(StorageError, match="nothing arrived"):
            read(server, patience=0.6)


@pytest.mark.parametrize("fault", [{"bandwidth": 1000.0}, {"stall": 100}, {"stall": -1}])
def test_a_range_much_slower_than_the_others_is_replaced(fault: dict[str, float]) -> None:
    with FaultServer(FILES) as server:
        store, source = opened(server, patience=1000.0)
        for begin in range(0, 90_000, 10_000):
            source.read_into(memoryview(bytearray(10_000)), begin, NEVER)
        server.faults.append(Fault(nth=1, **fault))  # type: ignore[arg-type]
        buffer = bytearray(100_000)
        source.read_into(memoryview(buffer), 0, NEVER)
        source.close()
        assert bytes(buffer) == DATA[:100_000]
        assert store.speed.replaced == 1


@pytest.mark.parametrize("stall", [-1, 100])
def test_a_range_slow_from_the_start_is_replaced_once_it_is_known_what_is_usual(stall: int) -> None:
    with FaultServer(FILES, Fault(nth=2, stall=stall)) as server:
        store, source = opened(server, patience=1000.0)
        buffer = bytearray(10_000)
        first = threading.Thread(target=source.read_into, args=(memoryview(buffer), 0, NEVER))
        first.start()
        until(lambda: len(server.requests) == 2)
        for begin in range(0, 90_000, 10_000):
            source.read_into(memoryview(bytearray(10_000)), begin, NEVER)
        first.join(60)
        source.close()
        assert bytes(buffer) == DATA[:10_000]
        assert store.speed.replaced == 1


def test_a_slow_range_that_may_not_be_replaced_yet_is_replaced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultServer(FILES) as server:
        store, source = opened(server, patience=1000.0)
        for begin in range(0, 90_000, 10_000):
            source.read_into(memoryview(bytearray(10_000)), begin, NEVER)
        server.faults.append(Fault(nth=1, stall=100))
        answers = iter([False, True])
        monkeypatch.setattr(store.speed, "replace", lambda: next(answers))
        buffer = bytearray(10_000)
        reader = threading.Thread(target=source.read_into, args=(memoryview(buffer), 0, NEVER), daemon=True)
        reader.start()
        reader.join(30)
        assert bytes(buffer) == DATA[:10_000]
        source.close()


def test_where_everything_becomes_slow_few_are_replaced() -> None:
    with FaultServer(FILES) as server, ThreadPoolExecutor(16) as pool:
        store, source = opened(server, patience=1000.0)
        for begin in range(0, 90_000, 10_000):
            source.read_into(memoryview(bytearray(10_000)), begin, NEVER)
        server.faults.append(Fault(bandwidth=10_000.0))
        buffers = [bytearray(10_000) for _ in range(16)]
        list(pool.map(lambda n: source.read_into(memoryview(buffers[n]), n * 10_000, NEVER), range(16)))
        source.close()
        assert b"".join(buffers) == DATA[:160_000]
        assert store.speed.replaced <= 4


@pytest.mark.parametrize(
    "fault", [{"stall": 100}, {"stall": -1}, {"status": 503, "headers": {"Retry-After": "99"}}]
)
def test_whatever_it_waits_for_a_read_can_be_cancelled(fault: dict[str, object]) -> None:
    with FaultServer(FILES) as server:
        _, source = opened(server, patience=1000.0)
        server.faults.append(Fault(**fault))  # type: ignore[arg-type]
        cancel = threading.Event()
        ended: list[BaseException] = []

        def work() -> None:
            try:
                source.read_into(memoryview(bytearray(1000)), 0, cancel)
            except ReadCancelled as error:
                ended.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        until(lambda: len(server.requests) == 2)
        cancel.set()
        thread.join(30)
        assert ended
        source.close()


def signed(server: FaultServer) -> tuple[ObjectStore, ObjectSource]:
    """The object as S3 has it: requests carry a signature."""
    environ = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "A" * 16,
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    store = ObjectStore(parse_location("s3://m"), environ=environ, patience=1000.0)
    first = store.fetch("a.bin", 8)
    assert first is not None
    source = store.source("a.bin", first.size, first.identity)
    assert isinstance(source, ObjectSource)
    return store, source


EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


@pytest.mark.parametrize(("status", "body"), [(403, b"<Code>AccessDenied</Code>"), (400, EXPIRED)])
def test_a_signature_refused_in_mid_load_is_renewed(status: int, body: bytes) -> None:
    with FaultServer(FILES, Fault(nth=3, status=status, body=body)) as server:
        _, source = signed(server)
        buffer = bytearray(len(DATA))
        for begin in range(0, len(DATA), 50_000):
            source.read_into(memoryview(buffer)[begin : begin + 50_000], begin, NEVER)
        source.close()
        assert bytes(buffer) == DATA
        assert len(server.requests) == 6
        assert all("X-Amz-Signature=" in request.target for request in server.requests)


def test_credentials_that_have_expired_are_renewed_once_and_then_named() -> None:
    with FaultServer(FILES) as server:
        _, source = signed(server)
        server.faults.append(Fault(status=400, body=EXPIRED))
        with pytest.raises(StorageError, match=r"again after signing anew.*ExpiredToken") as caught:
            source.read_into(memoryview(bytearray(100)), 0, NEVER)
        source.close()
        assert len(server.requests) == 3
        assert "Signature" not in str(caught.value)


def test_many_readers_renew_the_credentials_once(caplog: pytest.LogCaptureFixture) -> None:
    with FaultServer(FILES) as server, ThreadPoolExecutor(8) as pool:
        _, source = signed(server)
        together = threading.Barrier(8)
        server.faults.append(Fault(times=8, status=403, do=lambda server: together.wait(20) and None))
        buffers = [bytearray(1000) for _ in range(8)]
        list(pool.map(lambda n: source.read_into(memoryview(buffers[n]), n * 1000, NEVER), range(8)))
        source.close()
        assert b"".join(buffers) == DATA[:8000]
        assert [record.message for record in caplog.records if "signing anew" in record.message] == [
            "s3://m refuses what it allowed before: signing anew"
        ]


def test_an_address_signed_while_the_credentials_are_renewed_is_used_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FaultServer(FILES) as server:
        store, source = signed(server)
        assert store.renew(0)  # nothing is signed any more
        sign = store._sign

        def slowly(method: Literal["GET", "HEAD"], key: str) -> str:
            url = sign(method, key)
            monkeypatch.setattr(store, "_sign", sign)
            assert store.renew(1)  # by another reader, meanwhile
            return url + "&old"

        monkeypatch.setattr(store, "_sign", slowly)
        for _ in range(2):
            source.read_into(memoryview(bytearray(100)), 0, NEVER)
        source.close()
        assert [request.target.endswith("&old") for request in server.requests[1:]] == [True, False]


def test_closing_the_last_source_closes_the_connections() -> None:
    with FaultServer(FILES) as server:
        store, source = opened(server)
        other = store.source("m/a.bin", source.size, source.identity)
        source.close()
        source.close()
        assert server.open_connections == 1
        other.close()
        until(lambda: server.open_connections == 0)


@pytest.mark.parametrize("doing", ["fetch", "read"])
@pytest.mark.parametrize(
    ("status", "advice"),
    [(503, "overloaded, or limits requests"), (429, "overloaded"), (502, "a proxy before it")],
)
def test_a_store_that_answers_and_lasts_in_failing_is_not_called_unreachable(
    status: int, advice: str, doing: str
) -> None:
    failing = Fault(status=status, body=b"<Code>SlowDown</Code>")
    with FaultServer(FILES) as server:
        store, source = opened(server, patience=0.3)
        server.faults.append(failing)
        with pytest.raises(StorageError, match=f"{status} SlowDown") as caught:
            store.fetch("a.bin", 8) if doing == "fetch" else source.read_into(
                memoryview(bytearray(8)), 0, NEVER
            )
        source.close()
    assert "cannot be reached" not in str(caught.value)
    assert advice in caught.value.advice


def test_a_store_that_never_answered_is_named_without_a_secret() -> None:
    with FaultServer(FILES) as server:
        address = server.url
    store = ObjectStore(parse_location(f"{address}/m?sig=hidden"), environ={}, patience=0.3)
    with pytest.raises(StorageError, match=r"cannot be reached.*refused") as caught:
        store.fetch("a.bin", 8)
    assert "hidden" not in str(caught.value)


def test_header_of_a_large_file_shows_that_the_server_ignores_ranges() -> None:
    with FaultServer({"m/a.bin": bytes(9 << 20)}, Fault(ignore_range=True)) as server:
        store = ObjectStore(parse_location(f"{server.url}/m"), environ={}, patience=10.0)
        with pytest.raises(StorageError, match="ignores Range"):
            store.fetch("a.bin", 1 << 20)
        store.close()
