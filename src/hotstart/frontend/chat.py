"""``POST /v1/chat/completions``: a conversation in, the assistant's next message out."""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET

from hotstart.frontend.answering import event
from hotstart.frontend.context import Frontend, check_ids, encode, vocab_size
from hotstart.frontend.conversation import render_prompt
from hotstart.frontend.errors import ApiError
from hotstart.frontend.generation import Choice, Delta, Generation
from hotstart.frontend.logprobs import TokenNames, chat_logprobs, prompt_logprobs_body
from hotstart.frontend.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    ChunkChoice,
)
from hotstart.frontend.protocol.requests import MaybeUsage
from hotstart.frontend.sampling import bound_max_tokens, check_logprobs, per_choice, sampling_params
from hotstart.frontend.startup import Checked
from hotstart.frontend.usage import UsageReport
from hotstart.messages import SamplingParams


class Chat:
    """The kind of request that has messages."""

    request_type = ChatRequest

    def check(self, request: ChatRequest) -> None:
        """Refuse contradictions."""
        if request.stream and request.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs cannot be streamed.", param="prompt_logprobs")
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")

    async def prepare(
        self, frontend: Frontend, checked: Checked, request: ChatRequest, *, request_id: str, arrival: float
    ) -> ChatAnswer:
        """Render, encode, and make one choice for each of ``n``."""
        model = frontend.check_model(request.model, checked)
        tokenizer = checked.text.tokenizer
        kwargs: dict[str, object] = {**frontend.config.model.default_chat_template_kwargs}
        if request.reasoning_effort is not None:
            kwargs["reasoning_effort"] = request.reasoning_effort
        continues = bool(request.continue_final_message)
        prompt = render_prompt(
            checked.text,
            request.messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=continues,
            template_kwargs={**kwargs, **(request.chat_template_kwargs or {})},
        )
        frontend.check_length(prompt, tokenizer, param="messages")
        special = bool(request.add_special_tokens)
        ids = await encode(tokenizer, prompt, add_special_tokens=special, param="messages")
        check_ids(ids, checked, param="messages")
        params = _params(frontend, checked, request, len(ids))
        choices = [Choice(i, ids, per_choice(params, i), tokenizer, arrival) for i in range(request.n or 1)]
        return ChatAnswer(frontend, checked, request, model, f"chatcmpl-{request_id}", choices)


class ChatAnswer:
    """Writes chat completions."""

    def __init__(
        self,
        frontend: Frontend,
        checked: Checked,
        request: ChatRequest,
        model: str,
        response_id: str,
        choices: list[Choice],
    ) -> None:
        self.generation = Generation(choices, streaming=bool(request.stream))
        self._request = request
        self._model = model
        self._id = response_id
        self._created = int(time.time())
        self._prompt = choices[0].prompt
        http = frontend.config.http
        self._names = TokenNames(checked.text.tokenizer, http, request)
        self._usage = UsageReport(http, request, [self._prompt], choices)
        last = request.messages[-1]
        new_message = request.add_generation_prompt is not False
        self._role = frontend.config.model.response_role if new_message else last.role
        self._echo = ""
        if request.echo and last.role == self._role and isinstance(last.content, str):
            self._echo = last.content
        self._opened = [False] * len(choices)

    def whole(self, deltas: list[Delta]) -> bytes:
        """The JSON body."""
        response = ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(delta) for delta in sorted(deltas, key=lambda delta: delta.choice.index)],
            usage=self._usage.total(),
        )
        positions = deltas[0].choice.prompt_logprobs
        if self._request.prompt_logprobs is not None and positions is not None:
            response.prompt_logprobs = prompt_logprobs_body(self._names, positions)
        if self._request.return_token_ids:
            response.prompt_token_ids = self._prompt
        return msgspec.json.encode(response)

    def events(self, deltas: list[Delta]) -> bytes:
        """For each choice: its role before its first words, then the words."""
        events = []
        for delta in deltas:
            index = delta.choice.index
            if not self._opened[index]:
                self._opened[index] = True
                opening = ChunkChoice(index=index, delta=ChatDelta(role=self._role, content=self._echo))
                events.append(self._event([opening], self._usage.running()))
            events.append(self._event([self._chunk(delta)], self._usage.running()))
        return b"".join(events)

    def closing(self) -> bytes:
        """The usage event, if asked for."""
        return self._event([], self._usage.total()) if self._usage.at_end else b""

    def _event(self, choices: list[ChunkChoice], usage: MaybeUsage) -> bytes:
        return event(
            ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)
        )

    def _choice(self, delta: Delta) -> ChatChoice:
        return ChatChoice(
            index=delta.choice.index,
            message=AnswerMessage(role=self._role, content=self._echo + delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish.text,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._request.return_token_ids else UNSET,
        )

    def _chunk(self, delta: Delta) -> ChunkChoice:
        text = delta.text
        return ChunkChoice(
            index=delta.choice.index,
            delta=ChatDelta(content=text) if text or not delta.finish else ChatDelta(),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish.text,
            stop_reason=delta.stop_reason if delta.finish else UNSET,
            token_ids=delta.token_ids if self._request.return_token_ids else UNSET,
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(
            self._names, delta.token_ids, delta.logprobs, top=self._request.top_logprobs or 0
        )


def _params(frontend: Frontend, checked: Checked, request: ChatRequest, length: int) -> SamplingParams:
    limit, size = frontend.config.model.max_logprobs, vocab_size(checked)
    defaults = checked.text.sampling_defaults
    newer = request.max_completion_tokens is not None
    return sampling_params(
        request,
        defaults,
        max_tokens=bound_max_tokens(
            request.max_completion_tokens if newer else request.max_tokens,
            prompt=length,
            context=frontend.context_length(),
            default=defaults.get("max_new_tokens"),
            prompt_param="messages",
            param="max_completion_tokens" if newer else "max_tokens",
        ),
        logprobs=check_logprobs(request.top_logprobs or 0, limit=limit, vocab_size=size, param="top_logprobs")
        if request.logprobs
        else None,
        prompt_logprobs=check_logprobs(
            request.prompt_logprobs, limit=limit, vocab_size=size, param="prompt_logprobs"
        ),
        vocab_size=size,
    )
