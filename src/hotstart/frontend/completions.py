"""``POST /v1/completions``: prompts in, text out."""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET, UnsetType

from hotstart.frontend.answering import event
from hotstart.frontend.context import Frontend, check_ids, encode, vocab_size
from hotstart.frontend.errors import ApiError
from hotstart.frontend.generation import Choice, Delta, Generation
from hotstart.frontend.logprobs import TextOffset, TokenNames, completion_logprobs, prompt_logprobs_body
from hotstart.frontend.protocol import fields
from hotstart.frontend.protocol.completions import (
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from hotstart.frontend.protocol.requests import MaybeUsage, PromptLogprobsBody
from hotstart.frontend.sampling import bound_max_tokens, check_logprobs, per_choice, sampling_params
from hotstart.frontend.startup import Checked
from hotstart.frontend.usage import UsageReport
from hotstart.messages import SamplingParams

_DEFAULT_MAX_TOKENS = 16


class Completions:
    """The kind of request that has prompts."""

    request_type = CompletionRequest

    def check(self, request: CompletionRequest) -> None:
        """Refuse contradictions."""
        if request.stream and request.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs cannot be streamed.", param="prompt_logprobs")
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise ApiError(
                400, f"best_of {request.best_of} is not supported, only as many as n.", param="best_of"
            )
        if _asked(request) == 0 and not request.echo:
            raise ApiError(400, "max_tokens: expected `int` >= 1 unless echo is true.", param="max_tokens")

    async def prepare(
        self,
        frontend: Frontend,
        checked: Checked,
        request: CompletionRequest,
        *,
        request_id: str,
        arrival: float,
    ) -> CompletionAnswer:
        """One choice for each prompt and each of its ``n``."""
        model = frontend.check_model(request.model, checked)
        tokenizer = checked.text.tokenizer
        n = request.n or 1
        prompts = await _encode(frontend, checked, request)
        if len(prompts) * n > fields.MAX_CHOICES:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with n {n}: at most {fields.MAX_CHOICES} choices a request.",
                param="n",
            )
        choices: list[Choice] = []
        for ids, _ in prompts:
            params = _params(frontend, checked, request, len(ids))
            for i in range(n):
                choices.append(Choice(len(choices), ids, per_choice(params, i), tokenizer, arrival))
        return CompletionAnswer(frontend, checked, request, model, f"cmpl-{request_id}", prompts, choices)


class CompletionAnswer:
    """Writes completions."""

    def __init__(
        self,
        frontend: Frontend,
        checked: Checked,
        request: CompletionRequest,
        model: str,
        response_id: str,
        prompts: list[tuple[list[int], str | None]],
        choices: list[Choice],
    ) -> None:
        self.generation = Generation(choices, streaming=bool(request.stream))
        self._request = request
        self._model = model
        self._id = response_id
        self._created = int(time.time())
        self._prompts = prompts
        self._tokenizer = checked.text.tokenizer
        http = frontend.config.http
        self._names = TokenNames(self._tokenizer, http, request)
        self._only_echo = _asked(request) == 0
        prompt_ids = [ids for ids, _ in prompts]
        self._usage = UsageReport(http, request, prompt_ids, choices, answered=not self._only_echo)
        self._offsets = [TextOffset(self._tokenizer) for _ in choices]
        self._opened = [False] * len(choices)

    def whole(self, deltas: list[Delta]) -> bytes:
        """The JSON body."""
        choices = []
        for delta in sorted(deltas, key=lambda delta: delta.choice.index):
            choice = self._choice(delta)
            choice.prompt_logprobs = self._prompt_logprobs(delta.choice)
            choices.append(choice)
        return msgspec.json.encode(
            CompletionResponse(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=self._usage.total(),
            )
        )

    def events(self, deltas: list[Delta]) -> bytes:
        """One event per choice."""
        return b"".join(self._event([self._choice(delta)], self._usage.running()) for delta in deltas)

    def closing(self) -> bytes:
        """The usage event, if asked for."""
        return self._event([], self._usage.total()) if self._usage.at_end else b""

    def _event(self, choices: list[CompletionChoice], usage: MaybeUsage) -> bytes:
        return event(
            CompletionChunk(
                id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
            )
        )

    def _choice(self, delta: Delta) -> CompletionChoice:
        choice, request = delta.choice, self._request
        first = not self._opened[choice.index]
        self._opened[choice.index] = True
        echoed = bool(request.echo) and first
        only_echo = self._only_echo
        text = "" if only_echo else delta.text
        token_ids = [] if only_echo else delta.token_ids
        result = CompletionChoice(
            index=choice.index,
            text=self._prompt_text(choice) + text if echoed else text,
            logprobs=None if request.logprobs is None else self._logprobs(delta, token_ids, echoed=echoed),
            finish_reason="length" if only_echo else delta.finish.text,
            stop_reason=None if only_echo else delta.stop_reason,
        )
        if request.return_token_ids:
            result.token_ids = token_ids
            if first:
                result.prompt_token_ids = choice.prompt
        return result

    def _logprobs(self, delta: Delta, token_ids: list[int], *, echoed: bool) -> CompletionLogprobs:
        choice = delta.choice
        tokens, positions = list(token_ids), [*delta.logprobs]
        before = choice.prompt_logprobs or [] if echoed else []
        return completion_logprobs(
            self._names,
            [*choice.prompt[: len(before)], *tokens],
            [*before, *positions],
            top=self._request.logprobs or 0,
            offset=self._offsets[choice.index],
        )

    def _prompt_text(self, choice: Choice) -> str:
        ids, text = self._prompts[choice.index // (self._request.n or 1)]
        if text is not None:
            return text
        return self._tokenizer.decode(ids, skip_special_tokens=self._request.skip_special_tokens is not False)

    def _prompt_logprobs(self, choice: Choice) -> PromptLogprobsBody | None:
        # With echo and logprobs they are computed unasked; vLLM answers them then, too.
        if choice.prompt_logprobs is None:
            return None
        return prompt_logprobs_body(self._names, choice.prompt_logprobs)


async def _encode(
    frontend: Frontend, checked: Checked, request: CompletionRequest
) -> list[tuple[list[int], str | None]]:
    """Each prompt's ids, and its text where it was given as text."""
    tokenizer = checked.text.tokenizer
    encoded: list[tuple[list[int], str | None]] = []
    for prompt in _separate(request.prompt):
        if isinstance(prompt, str):
            frontend.check_length(prompt, tokenizer, param="prompt")
            special = request.add_special_tokens is not False
            ids = await encode(tokenizer, prompt, add_special_tokens=special, param="prompt")
            encoded.append((ids, prompt))
        else:
            encoded.append((prompt, None))
        check_ids(encoded[-1][0], checked, param="prompt")
    return encoded


def _separate(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a request. Raises :class:`ApiError` for a mixture of kinds."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ids]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if ids or len({type(item) for item in prompts}) > 1:
        raise ApiError(400, "prompt: expected strings, or token ids, or lists of token ids.", param="prompt")
    if len(prompts) > fields.MAX_PROMPTS:
        raise ApiError(400, f"prompt: at most {fields.MAX_PROMPTS} prompts a request.", param="prompt")
    return prompts


def _asked(request: CompletionRequest) -> int | UnsetType | None:
    """The bound of the answer's tokens, by whichever name."""
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def _params(frontend: Frontend, checked: Checked, request: CompletionRequest, length: int) -> SamplingParams:
    limit, size = frontend.config.model.max_logprobs, vocab_size(checked)
    logprobs = check_logprobs(request.logprobs, limit=limit, vocab_size=size, param="logprobs")
    prompt_logprobs = check_logprobs(
        request.prompt_logprobs, limit=limit, vocab_size=size, param="prompt_logprobs"
    )
    if request.echo and logprobs is not None and prompt_logprobs is None:
        prompt_logprobs = logprobs
    defaults = checked.text.sampling_defaults
    asked = _asked(request)
    default = defaults.get("max_new_tokens")
    if asked is UNSET:
        asked, default = None, min(_DEFAULT_MAX_TOKENS, default or _DEFAULT_MAX_TOKENS)
    elif asked == 0:
        asked = 1  # an echo alone still takes one step; its token is not shown
    return sampling_params(
        request,
        defaults,
        max_tokens=bound_max_tokens(
            asked,
            prompt=length,
            context=frontend.context_length(),
            default=default,
            prompt_param="prompt",
            param="max_tokens" if request.max_completion_tokens is None else "max_completion_tokens",
        ),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        vocab_size=size,
    )
