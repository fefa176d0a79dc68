"""One streamed answer: the bytes of its events in, and when what came out."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from msgspec import Struct, field


class Answer(Struct):
    """A request as the client saw it; times in seconds of ``time.perf_counter``."""

    planned: float = 0.0
    """When it was to be sent."""
    arrived: float = 0.0
    """When its turn came; from here on it may wait for one of ``--max-concurrency`` to end."""
    start: float = 0.0
    """When it was sent; opening a connection comes after it."""
    first_chunk: float = 0.0
    """When the first chunk of any kind came; 0: none."""
    chunks: array[float] = field(default_factory=lambda: array("d"))
    """When each chunk with content came."""
    end: float = 0.0
    """When the last chunk of the answer came: one with content, or the one that says why it ended."""
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server counts; 0: it did not say."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the server had already; None: it did not say."""
    error: str = ""
    """Why it does not count; empty: it does."""

    @property
    def ttft(self) -> float:
        """Seconds to the first content; 0 without any."""
        return self.chunks[0] - self.start if self.chunks else 0.0

    @property
    def latency(self) -> float:
        """Seconds to the end; 0 where it has none."""
        return self.end - self.start if self.end else 0.0

    @property
    def itl(self) -> list[float]:
        """Seconds between chunks with content."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode
_DONE = b"[DONE]"


class EventReader:
    """Reads an event stream into an :class:`Answer`, whatever the pieces in which it comes."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = b""
        self._data: list[bytes] = []
        self._texts: list[str] = []
        self._finished = False
        """A reason to end was given, or ``[DONE]``."""

    def feed(self, data: bytes, now: float) -> None:
        """Take the next bytes, which came at ``now``. Raises ``ValueError`` for what is no chunk."""
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:])
            elif not line and self._data:
                self._dispatch(now)

    def close(self, now: float) -> None:
        """The stream has ended. Raises ``ValueError`` where the answer has not."""
        if self._rest.startswith(b"data:"):
            self._data.append(self._rest[5:])
        if self._data:
            self._dispatch(now)
        answer = self._answer
        answer.text = "".join(self._texts)
        if not self._finished:
            raise ValueError("the stream ended before the answer did")
        # Tokens that are no text, such as an end that was to be ignored, are tokens all the same.
        if not answer.chunks and answer.output_tokens and answer.end:
            answer.chunks.append(answer.end)
        if not answer.chunks:
            raise ValueError("the stream ended without any content")

    def _dispatch(self, now: float) -> None:
        data = b"\n".join(self._data).strip()
        self._data.clear()
        if data == _DONE:
            self._finished = True
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            shown = data[:200].decode("utf-8", "replace")
            raise ValueError(f"a chunk that is not understood ({error}): {shown}") from None
        if event.error is not None:
            raise ValueError(f"an error in the stream: {_said(event.error)}")
        answer = self._answer
        answer.first_chunk = answer.first_chunk or now
        if event.usage is not None:
            self._count(event.usage)
        if event.choices:
            self._take(event.choices[0], now)

    def _take(self, choice: _Choice, now: float) -> None:
        text, called = choice.text, False
        if (delta := choice.delta) is not None:
            text = delta.content or delta.reasoning_content or delta.reasoning
            called = bool(delta.tool_calls)
        if text or called:
            self._answer.chunks.append(now)
            self._answer.end = now
        if text:
            self._texts.append(text)
        if choice.finish_reason:
            self._finished = True
            self._answer.end = now

    def _count(self, usage: _Usage) -> None:
        """The last figures count: some servers send them with every chunk."""
        answer = self._answer
        answer.prompt_tokens = usage.prompt_tokens or answer.prompt_tokens
        answer.output_tokens = usage.completion_tokens or answer.output_tokens
        if usage.prompt_tokens_details is not None:
            answer.cached_tokens = usage.prompt_tokens_details.cached_tokens


def _said(error: Any) -> str:
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])[:500]
    return msgspec.json.encode(error).decode()[:500]
