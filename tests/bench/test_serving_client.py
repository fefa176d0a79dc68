"""The client of ``bench serve`` against a server with scripted streams."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import trustme

from hotstart.bench.serving.answer import Answer
from hotstart.bench.serving.client import Client, parse_server
from hotstart.bench.serving.delay import LoopDelay
from hotstart.errors import ConfigError
from stub_streams import DONE, Script, Stub, delta, text, usage, words


def ask(stub: Stub, times: int = 1, *, insecure: bool = False) -> list[Answer]:
    """One after another, on one client."""

    async def work() -> list[Answer]:
        async with Client(parse_server(stub.url, {}, insecure=insecure)) as client:
            answers = [Answer() for _ in range(times)]
            for answer in answers:
                await client.stream("/v1/completions", b'{"model": "stub"}', answer)
            return answers

    return run(work())


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_answer_has_the_times_of_its_chunks_and_the_counts_of_the_server() -> None:
    with Stub([words(4, tokens=9)]) as stub:
        [answer] = ask(stub)
    assert answer.error == ""
    assert answer.start < answer.first_chunk <= answer.chunks[0]
    assert len(answer.chunks) == 4
    assert list(answer.chunks) == sorted(answer.chunks)
    assert answer.end >= answer.chunks[-1]
    assert (answer.text, answer.output_tokens, answer.prompt_tokens) == (" w0 w1 w2 w3", 9, 7)


def test_stall_is_a_gap_of_its_length() -> None:
    steps = ((0.0, text("a")), (0.05, text("b", finish="stop")), (0.0, DONE))
    with Stub([Script(steps)]) as stub:
        [answer] = ask(stub)
    [gap] = answer.itl
    assert gap == answer.chunks[1] - answer.chunks[0] > 0


def test_connection_is_used_again() -> None:
    with Stub() as stub:
        answers = ask(stub, 5)
        assert stub.connections == 1
    assert [answer.error for answer in answers] == [""] * 5


def test_idle_connection_that_the_server_closed_is_replaced() -> None:
    with Stub() as stub:

        async def work() -> Answer:
            async with Client(parse_server(stub.url, {})) as client:
                await client.stream("/v1/completions", b"{}", Answer())
                stub.close_idle()  # and the client has had no chance to notice
                answer = Answer()
                await client.stream("/v1/completions", b"{}", answer)
                return answer

        assert run(work()).error == ""
        assert stub.connections == 2


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (
            Script(((0.0, b'{"error": "busy"}'),), status=429, headers="Retry-After: 3\r\n"),
            'HTTP 429 (Retry-After: 3): {"error": "busy"}',
        ),
        (Script(status=500), "HTTP 500"),
        (
            Script(((0.0, text("a")),), cut=True),
            "the server closed the connection before the answer was whole",
        ),
        (Script(((0.0, text("a")),)), "the stream ended before the answer did"),
        (Script(((0.0, b"data: [1]\n\n"),)), "a chunk that is not understood"),
    ],
)
def test_failure_is_told_and_the_next_request_goes_well(script: Script, error: str) -> None:
    with Stub([script, words(2)]) as stub:
        failed, good = ask(stub, 2)
        assert len(stub.requests) == 2  # neither was sent again
    assert failed.error.startswith(error)
    assert good.error == ""


def test_body_may_end_with_the_connection() -> None:
    steps = ((0.0, delta(content="a")), (0.0, delta(finish="stop")), (0.0, usage(1)), (0.0, DONE))
    with Stub([Script(steps, until_close=True)]) as stub:
        answers = ask(stub, 2)
        assert stub.connections == 2
    assert [(answer.error, answer.output_tokens) for answer in answers] == [("", 1)] * 2


def test_nobody_there_is_an_error_of_the_answer() -> None:
    with Stub() as stub:
        pass
    [answer] = ask(stub)
    assert "Connect call failed" in answer.error or "refused" in answer.error


def test_what_does_not_speak_http_is_an_error_of_the_answer() -> None:
    async def work() -> Answer:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail.example ESMTP\r\n")
            await writer.drain()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            answer = Answer()
            async with Client(parse_server(f"http://127.0.0.1:{port}", {})) as client:
                await client.stream("/v1/completions", b"{}", answer)
            return answer

    error = run(work()).error
    assert error.startswith(("no HTTP: ", "the server closed the connection"))


def test_there_is_no_limit_of_connections_but_the_systems() -> None:
    with Stub([words(2)]) as stub:

        async def work() -> list[Answer]:
            async with Client(parse_server(stub.url, {})) as client:
                answers = [Answer() for _ in range(200)]
                streams = (client.stream("/v1/completions", b"{}", answer) for answer in answers)
                await asyncio.gather(*streams)
                return answers

        assert {answer.error for answer in run(work())} == {""}
        assert stub.connections == 200


def test_certificate_is_checked_unless_told_otherwise() -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    with Stub(tls=context) as stub:
        [refused] = ask(stub)
        [taken] = ask(stub, insecure=True)
    assert "CERTIFICATE_VERIFY_FAILED" in refused.error
    assert (taken.error, len(taken.chunks)) == ("", 3)


def test_loop_that_was_busy_is_seen_to_be_late() -> None:
    async def work() -> list[float]:
        with LoopDelay(interval=0.001) as delay:
            busy_until = time.monotonic() + 0.02
            while time.monotonic() < busy_until:
                pass  # the loop sees nothing meanwhile
            while not delay.late:
                await asyncio.sleep(0)
        return delay.late

    late = run(work())
    assert len(late) >= 20
    assert late[0] >= 0.019


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("https://a.example/llm/", "https://a.example:443/llm"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_address_is_read_as_people_write_it(address: str, url: str) -> None:
    assert parse_server(address, {}).url == url


@pytest.mark.parametrize("address", ["ftp://a", "http://a:port", "http://a?b", "http://"])
def test_other_addresses_are_errors(address: str) -> None:
    with pytest.raises(ConfigError, match="is none of a server"):
        parse_server(address, {})
