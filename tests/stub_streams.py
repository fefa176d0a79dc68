"""A server with scripted streams, for tests of ``bench serve``; as a program, a load for its client.

python stub_streams.py PORT --ttft 1 --gap 0.1 --tokens 50
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from httptools import HttpRequestParser

Step = tuple[float, bytes]
"""Seconds to wait, and what to send then."""
DONE = b"data: [DONE]\n\n"


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(words: str, *, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": words, "finish_reason": finish}])


def delta(*, finish: str | None = None, **content: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": content, "finish_reason": finish}])


def usage(tokens: int, prompt: int = 7, **details: Any) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": tokens, **details})


@dataclass(frozen=True)
class Script:
    """What becomes of one request."""

    steps: tuple[Step, ...] = ()
    status: int = 200
    headers: str = ""
    """Lines, each with its end."""
    cut: bool = False
    """The connection is reset behind the steps."""
    until_close: bool = False
    """The body ends where the connection does."""


def words(number: int, *, tokens: int | None = None, gap: float = 0.0, first: float = 0.0) -> Script:
    """An ordinary completion; ``tokens`` is what usage says, 0: there is none."""
    steps = [(first if not place else gap, text(f" w{place}")) for place in range(number)]
    steps.append((0.0, text("", finish="length")))
    if tokens != 0:
        steps.append((0.0, usage(number if tokens is None else tokens)))
    return Script((*steps, (0.0, DONE)))


@dataclass
class Stub:
    """``with Stub([script, …]) as stub``: requests get the scripts in turn, the last one again and again."""

    scripts: Sequence[Script] = (words(3),)
    models: Sequence[dict[str, str]] = ({"id": "stub"},)
    models_status: int = 200
    metrics: Sequence[str] = ()
    """What /metrics says, one after another."""
    tokenizes: bool = True
    """Whether /tokenize counts the words."""
    tls: ssl.SSLContext | None = None
    port: int = 0
    requests: list[tuple[dict[str, str], Any]] = field(default_factory=list)
    """Headers and body of what was asked of the model."""
    connections: int = 0

    def __enter__(self) -> Stub:
        self._loop = asyncio.new_event_loop()
        server = self._loop.run_until_complete(self.listen(self._loop))
        self.port = server.sockets[0].getsockname()[1]
        self._server = server
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://localhost:{self.port}"

    async def listen(self, loop: asyncio.AbstractEventLoop) -> asyncio.Server:
        self._open: set[Connection] = set()
        return await loop.create_server(
            lambda: Connection(self), "127.0.0.1", self.port, backlog=2048, ssl=self.tls
        )

    def close_idle(self) -> None:
        """As servers do with connections that nobody has used for a while; returns when it is done."""

        async def close() -> None:
            for connection in list(self._open):
                connection.transport.close()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(30)

    async def _stop(self) -> None:
        self._server.close()
        for connection in list(self._open):
            connection.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def take(self) -> Script:
        return self.scripts[min(len(self.requests), len(self.scripts)) - 1]

    def told(self) -> str:
        first, *rest = self.metrics
        self.metrics = rest or [first]
        return first


class Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.stub.connections += 1
        self.stub._open.add(self)
        self.parser = HttpRequestParser(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.stub._open.discard(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.path = ""
        self.headers: dict[str, str] = {}
        self.body = b""

    def on_url(self, url: bytes) -> None:
        self.path += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        stub = self.stub
        if self.path.endswith("/v1/models"):
            self.reply(stub.models_status, {"data": list(stub.models)})
        elif self.path.endswith("/metrics") and stub.metrics:
            self.send(200, "text/plain", stub.told().encode())
        elif self.path.endswith("/tokenize") and stub.tokenizes:
            self.reply(200, {"tokens": list(range(len(json.loads(self.body)["prompt"].split())))})
        elif self.path.endswith("completions"):
            stub.requests.append((self.headers, json.loads(self.body)))
            self.task = asyncio.get_running_loop().create_task(self.play(stub.take()))
        else:
            self.reply(404, {"error": f"no {self.path} here"})

    def reply(self, status: int, document: object) -> None:
        self.send(status, "application/json", json.dumps(document).encode())

    def send(self, status: int, kind: str, body: bytes) -> None:
        head = f"HTTP/1.1 {status} So\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    async def play(self, script: Script) -> None:
        framing = "Connection: close" if script.until_close else "Transfer-Encoding: chunked"
        kind = "text/event-stream" if script.status == 200 else "application/json"
        head = f"HTTP/1.1 {script.status} So\r\nContent-Type: {kind}\r\n{script.headers}{framing}\r\n\r\n"
        self.transport.write(head.encode())
        for seconds, data in script.steps:
            if seconds:
                await asyncio.sleep(seconds)
            self.transport.write(data if script.until_close else b"%x\r\n%s\r\n" % (len(data), data))
        if script.cut:
            await asyncio.sleep(0)  # what was written goes out first
            self.transport.abort()
        elif script.until_close:
            self.transport.close()
        else:
            self.transport.write(b"0\r\n\r\n")


async def _serve(stub: Stub) -> None:
    server = await stub.listen(asyncio.get_running_loop())
    print("listening", flush=True)
    async with server:
        await server.serve_forever()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--ttft", type=float, default=1.0, help="seconds to the first chunk")
    parser.add_argument("--gap", type=float, default=0.1, help="seconds to each further one")
    parser.add_argument("--tokens", type=int, default=50, help="chunks of each answer, a token each")
    options = parser.parse_args()
    script = words(options.tokens, first=options.ttft, gap=options.gap)
    import uvloop

    with suppress(KeyboardInterrupt):
        uvloop.run(_serve(Stub([script], port=options.port)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
