"""A small OpenAI client that notices when things happen.

Blocking and of the standard library, so that nothing stands between the socket and the clock.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

# Ordinary words: whatever a model says to them, its first token is text.
_WORDS = (
    "amber", "anchor", "autumn", "basket", "bridge", "candle", "canyon", "castle", "cedar", "clover",
    "copper", "coral", "desert", "ember", "falcon", "feather", "forest", "garden", "glacier", "harbor",
    "hazel", "island", "ivory", "jasmine", "lantern", "lemon", "magnet", "maple", "marble", "meadow",
    "mirror", "nectar", "ocean", "olive", "orchard", "pepper", "pillar", "prairie", "quartz", "raven",
    "river", "saddle", "silver", "summit", "tunnel", "valley", "velvet", "walnut", "willow", "window",
)  # fmt: skip


class RefusedError(Exception):
    """The server answered, but not with a stream."""

    def __init__(self, status: int, body: str) -> None:
        self.status = status
        self.body = body
        super().__init__(f"HTTP {status}: {body[:500]}")


@dataclass(frozen=True)
class Target:
    """Where to ask, and for what."""

    host: str
    port: int
    endpoint: str = COMPLETIONS
    model: str = ""
    timeout: float = 600.0
    """Seconds one socket operation may take; a held request waits this long for its first byte."""


@dataclass(frozen=True)
class Chunk:
    """One event of a stream."""

    at: float
    """When it arrived, in ``time.monotonic()``."""
    text: str
    tokens: int
    """``usage.completion_tokens`` where the event carries it, else 0."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer; times are ``time.monotonic()``."""

    sent: float
    first: float
    """When the first chunk with text arrived."""
    last: float
    text: str
    chunks: tuple[float, ...] = ()
    """When each chunk with text arrived."""
    tokens: int = 0
    """``usage.completion_tokens``; without usage, the number of chunks with text."""

    @property
    def ttft(self) -> float:
        """Seconds from the request to the first text."""
        return self.first - self.sent


def fresh_prompt(words: int = 12) -> str:
    """A prompt that no cache has seen; about one and a half tokens a word."""
    chosen = random.SystemRandom().choices(_WORDS, k=words)
    return f"Write a short story about these words: {', '.join(chosen)}. Once upon a time"


def request_body(
    target: Target, prompt: str | list[int], *, max_tokens: int, ignore_eos: bool = True
) -> dict[str, object]:
    """The JSON of a streaming greedy request; ``ignore_eos`` is vLLM's, others pass over it."""
    body: dict[str, object] = {
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        body["ignore_eos"] = True
    if target.model:
        body["model"] = target.model
    if target.endpoint == CHAT:
        return body | {"messages": [{"role": "user", "content": prompt}]}
    return body | {"prompt": prompt}


def get(target: Target, path: str, connection: http.client.HTTPConnection | None = None) -> tuple[int, bytes]:
    """Status and body; on ``connection`` when given, which then stays open. Raises ``OSError``."""
    own = connection is None
    connection = connection or connect(target)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except http.client.HTTPException as error:
        raise ConnectionError(str(error)) from error
    finally:
        if own:
            connection.close()


def connect(target: Target) -> http.client.HTTPConnection:
    """A connection that opens at the first request."""
    return http.client.HTTPConnection(target.host, target.port, timeout=target.timeout)


def ask(target: Target, body: dict[str, object]) -> Answer:
    """Send one request and read its stream to the end.

    Raises as :func:`stream` does, and ``ValueError`` when the stream ends without any text.
    """
    sent = time.monotonic()
    arrived: list[float] = []
    texts: list[str] = []
    tokens = 0
    for chunk in stream(target, body):
        if chunk.text:
            arrived.append(chunk.at)
            texts.append(chunk.text)
        tokens = chunk.tokens or tokens
    if not arrived:
        raise ValueError("the stream ended without any text")
    return Answer(sent, arrived[0], arrived[-1], "".join(texts), tuple(arrived), tokens or len(arrived))


def stream(target: Target, body: dict[str, object]) -> Iterator[Chunk]:
    """Send one request and yield what comes, when it comes.

    Raises :class:`RefusedError` for any status but 200 and for an error inside the stream, and
    ``OSError`` when the connection fails.
    """
    connection = connect(target)
    try:
        payload = json.dumps(body).encode()
        connection.request("POST", target.endpoint, payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RefusedError(response.status, response.read().decode(errors="replace"))
        for event in events(iter(response.readline, b"")):
            now = time.monotonic()
            if "error" in event:
                raise RefusedError(200, json.dumps(event["error"]))
            yield Chunk(now, _text_of(event), _tokens_of(event))
    except http.client.HTTPException as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def events(lines: Iterator[bytes]) -> Iterator[dict[str, object]]:
    """The JSON objects of a server-sent event stream, up to ``[DONE]``."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)


def _text_of(event: dict[str, object]) -> str:
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return ""
    choice = choices[0]
    delta = choice.get("delta") or {}
    # A model that thinks first streams its thoughts under one of two names.
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    return str(choice.get("text") or delta.get("content") or thought or "")


def _tokens_of(event: dict[str, object]) -> int:
    usage = event.get("usage")
    return int(usage.get("completion_tokens", 0)) if isinstance(usage, dict) else 0
