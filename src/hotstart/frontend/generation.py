"""One HTTP request's work in the engine: its choices, and the text they have produced so far.

Tokens of a step are turned into text where they arrive; the request's task wakes once per step,
or once in all when nothing is streamed. What a slow client has not taken yet is merged, so memory
stays bounded by the answer itself.
"""

from __future__ import annotations

import asyncio

from hotstart.frontend.detokenizer import StopStrings, detokenizer
from hotstart.frontend.errors import ApiError
from hotstart.frontend.tokenizer import Tokenizer
from hotstart.messages import FinishReason, SamplingParams, TokenLogprobs


class Delta:
    """What one choice has produced since it was last taken."""

    __slots__ = ("choice", "finish", "logprobs", "parts", "stop_reason", "token_ids")

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.parts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish = FinishReason.RUNNING
        self.stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """The text, joined."""
        return "".join(self.parts)


class Choice:
    """One answer to one prompt: one request of the engine."""

    def __init__(
        self, index: int, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer, arrival: float
    ) -> None:
        self.id = -1
        self.index = index
        self.prompt = prompt
        self.params = params
        self.tokenizer = tokenizer
        self.arrival = arrival
        self.generation: Generation | None = None
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float = arrival
        self.cached_tokens = 0
        self.generated = 0
        self.finish = FinishReason.RUNNING
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.delta = Delta(self)
        self.queued = False
        self._detokenizer = detokenizer(tokenizer, prompt, skip_special_tokens=params.skip_special_tokens)
        include = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop, include=include) if params.stop else None

    def accept(
        self, token: int, finish: FinishReason, logprobs: TokenLogprobs | None, stop_id: int | None
    ) -> bool:
        """Take in one entry of a step; whether there is something to show now.

        ``token`` is -1 for an end without a token. A stop string may set :attr:`finish` although
        the engine goes on: the caller aborts it there.
        """
        delta, text = self.delta, ""
        if token >= 0:
            self.generated += 1
            delta.token_ids.append(token)
            if logprobs is not None:
                delta.logprobs.append(logprobs)
            # The token that ended the answer is no part of its text.
            if finish is not FinishReason.STOP or self.params.include_stop_str_in_output:
                text = self._detokenizer.push(token)
        if self._stops is not None and self.generated > self.params.min_tokens:
            text = self._stops.push(text)
            if self._stops.matched is not None:
                finish, delta.stop_reason = FinishReason.STOP, self._stops.matched
            elif finish:
                text += self._stops.flush()
        if text:
            delta.parts.append(text)
        if finish:
            self.finish = delta.finish = finish
            if stop_id is not None and delta.stop_reason is None:
                delta.stop_reason = stop_id
        return bool(text or finish)


class Generation:
    """All choices of one HTTP request."""

    def __init__(self, choices: list[Choice], *, streaming: bool) -> None:
        self.choices = choices
        self.streaming = streaming
        self.unfinished = len(choices)
        self._ready: list[Choice] = []
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        for choice in choices:
            choice.generation = self

    @property
    def finished(self) -> bool:
        """Whether every choice has ended and been taken."""
        return self.unfinished == 0 and not self._ready

    async def take(self) -> list[Delta]:
        """What is new, by choice, after waiting for it; everything at once when nothing is streamed.

        Raises :class:`ApiError` when the engine could not finish the request.
        """
        while not self._showable():
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        ready, self._ready = self._ready, []
        deltas = []
        for choice in ready:
            choice.queued = False
            deltas.append(choice.delta)
            choice.delta = Delta(choice)
        return deltas

    def offer(self, choice: Choice) -> None:
        """``choice`` has something to show."""
        if choice.finish:
            self.unfinished -= 1
        if not choice.queued:
            choice.queued = True
            self._ready.append(choice)
        if self.streaming or self.unfinished == 0:
            self._wake()

    def fail(self, error: ApiError) -> None:
        """End with ``error``; what was produced and not taken is dropped."""
        if self._error is None:
            self._error = error
            self._wake()

    def _showable(self) -> bool:
        return self._error is not None or (bool(self._ready) and (self.streaming or self.unfinished == 0))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
