"""The Python API: ``LLM(path).generate([...])``, vLLM's small surface on the same engine.

The engine runs in the caller's process and thread; torch is imported plainly, since the caller's
own code may want all of it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, cast

from msgspec import Meta, Struct, ValidationError, convert, structs

from hotstart.checkpoint.base import ModelFiles
from hotstart.checkpoint.files import load_model_files, overrides_of
from hotstart.checkpoint.folder import shown_folder
from hotstart.cli.check import directory_of, located
from hotstart.cli.check_place import check_mount
from hotstart.config.keywords import config_of
from hotstart.config.settings import Config
from hotstart.engine.assemble import build, follow_up, prepare
from hotstart.engine.lean_torch import import_plainly
from hotstart.errors import ConfigError
from hotstart.frontend.conversation import render_prompt
from hotstart.frontend.errors import ApiError
from hotstart.frontend.generation import Choice
from hotstart.frontend.protocol import fields as f
from hotstart.frontend.protocol.chat import Messages
from hotstart.frontend.sampling import per_choice
from hotstart.frontend.start import load_text
from hotstart.frontend.tokenizer import Tokenizer
from hotstart.loading.loader_check import check_loader
from hotstart.messages import NewRequest, SamplingParams, TokenLogprobs, pack_ids

Prompt = str | Sequence[int] | dict[str, Any]

_BOUNDS: dict[str, Any] = {
    "n": f.Choices,
    "temperature": f.Temperature,
    "top_p": f.TopP,
    "top_k": f.TopK,
    "min_p": f.MinP,
    "presence_penalty": f.Penalty,
    "frequency_penalty": f.Penalty,
    "repetition_penalty": f.RepetitionPenalty,
    "seed": f.Seed | None,
    "stop": f.StopStrings,
    "stop_token_ids": f.StopTokenIds,
    "min_tokens": f.MaybeNoTokens,
    "max_tokens": Annotated[int, Meta(ge=1)],
    "logprobs": f.LogprobsCount | None,
    "prompt_logprobs": f.LogprobsCount | None,
    "logit_bias": dict[int, f.Bias],
}


class CompletionOutput(Struct, kw_only=True):
    """One text."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput(Struct, kw_only=True):
    """What became of one prompt; ``outputs`` has ``n`` entries."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = True


class LLM:
    """A model in this process.

    ``model`` is a directory or a hub name; further keywords are the flags of ``serve`` that concern
    a model (``max_model_len``, ``dtype``, ``kv_cache_memory_bytes``, …): see
    :mod:`hotstart.config.keywords`. Sets the number of torch's threads for the whole process on a
    CPU. Raises the errors of a start: ConfigError, ModelError, StorageError, DeviceError.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        config = _resolved(config_of(model, settings))
        prepared = prepare(config)
        self._text = load_text(_text_files(config), config)
        self._template_kwargs = config.model.default_chat_template_kwargs
        import_plainly()
        weights = prepared.placement.weights(prepared, lambda done: None)
        afterwards = follow_up(prepared, logging.getLogger("hotstart.engine").log)
        if afterwards is not None:
            afterwards.start(weights.follow(afterwards))
        weights.start()
        built = build(prepared, weights)
        weights.wait()
        if afterwards is not None:
            afterwards.confirm()
            afterwards.go_on()
        weights.close()
        for _ in built.tune():
            pass
        self._engine = built.engine
        self.max_model_len = built.kv.max_model_len
        self.vocab_size = prepared.geometry.vocab_size
        self._max_logprobs = min(config.model.max_logprobs, self.vocab_size)
        self._next_id = 0

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: ``encode(text)``, ``decode(ids)``."""
        return self._text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for."""
        defaults = dict(self._text.sampling_defaults)
        limit = defaults.pop("max_new_tokens", None)
        params = SamplingParams(**defaults)
        return params if limit is None else structs.replace(params, max_tokens=limit)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, in order, as one batch.

        A prompt is a text, a list of token ids, or vLLM's ``{"prompt": …}`` and
        ``{"prompt_token_ids": […]}``. Raises ConfigError, before anything is computed, for a prompt
        that is empty, beyond the vocabulary or the context, and for parameters out of bounds.
        """
        texts = [_plain(prompt) for prompt in _as_list(prompts)]
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        every = (
            [sampling_params] * len(texts)
            if isinstance(sampling_params, SamplingParams)
            else list(sampling_params)
        )
        if len(every) != len(texts):
            raise ConfigError(
                f"{len(texts)} prompts and {len(every)} sampling parameters",
                expected="as many of each, or one",
            )
        runs = [self._prepare(prompt, params) for prompt, params in zip(texts, every, strict=True)]
        choices = {choice.id: choice for run in runs for choice in run.choices}
        try:
            self._run(choices)
        finally:
            for request_id in choices:
                self._engine.abort(request_id)  # those that an interrupt left behind
        return [run.output() for run in runs]

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, or one, through the model's chat template.

        Raises ConfigError for a model without a template and for messages that it refuses, and what
        :meth:`generate` raises.
        """
        single = not messages or isinstance(messages[0], dict)
        conversations = cast("list[list[dict[str, Any]]]", [messages] if single else messages)
        extra = {**self._template_kwargs, **(chat_template_kwargs or {})}
        prompts = []
        for conversation in conversations:
            try:
                text = render_prompt(
                    self._text,
                    convert(conversation, Messages),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    template_kwargs=extra,
                )
            except (ApiError, ValidationError) as error:
                raise ConfigError(f"a conversation cannot be rendered: {str(error).rstrip('.')}") from None
            prompts.append(self._text.tokenizer.encode(text, add_special_tokens=False))
        return self.generate(cast("list[Prompt]", prompts), sampling_params)

    def _prepare(self, prompt: str | list[int], params: SamplingParams) -> _Run:
        ids = self._text.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids or len(ids) >= self.max_model_len:
            raise ConfigError(
                f"a prompt of {len(ids)} tokens",
                expected=f"1 to {self.max_model_len - 1} (max_model_len - 1)",
            )
        self._check_ids("a prompt", ids)
        room = self.max_model_len - len(ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        params = structs.replace(params, max_tokens=limit, stop=stop)
        self._check(params)
        run = _Run(prompt if isinstance(prompt, str) else None, ids)
        for index in range(params.n):
            own = per_choice(params, index)
            choice = Choice(index, ids, own, self._text.tokenizer, time.monotonic())
            choice.id = self._next_id
            self._next_id += 1
            run.choices.append(choice)
        return run

    def _check(self, params: SamplingParams) -> None:
        """The bounds that the HTTP API has, too."""
        for name, bound in _BOUNDS.items():
            value = getattr(params, name)
            try:
                convert(value, bound)
            except ValidationError as error:
                expected = str(error).removeprefix("Expected ")
                raise ConfigError(f"SamplingParams has {name}={value!r}", expected=expected) from None
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise ConfigError(
                f"SamplingParams has min_tokens={params.min_tokens}",
                expected=f"at most {params.max_tokens} (max_tokens, or what is left of max_model_len)",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self._max_logprobs:
                raise ConfigError(
                    f"SamplingParams has {name}={getattr(params, name)}",
                    expected=f"at most {self._max_logprobs} (max_logprobs)",
                )
        self._check_ids("logit_bias", params.logit_bias)

    def _check_ids(self, what: str, ids: Iterable[int]) -> None:
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise ConfigError(
                f"{what} has the token id {wrong}", expected=f"0 to {self.vocab_size - 1} (vocabulary)"
            )

    def _run(self, choices: dict[int, Choice]) -> None:
        """Step until every choice has ended."""
        for choice in choices.values():
            new = NewRequest(choice.id, pack_ids(choice.prompt), choice.params)
            self._engine.add(new)
        while self._engine.has_work:
            step = self._engine.step()
            if step is None:
                continue
            for event in step.scheduled:
                choices[event.id].cached_tokens = event.cached_tokens
            for prompt in step.prompt_logprobs:
                choices[prompt.id].prompt_logprobs = prompt.positions
            for request_id, token, finish in step.unpack():
                choice = choices[request_id]
                choice.accept(token, finish, step.logprobs.get(request_id), step.stop_ids.get(request_id))
                if choice.finish and not finish:
                    self._engine.abort(request_id)  # a stop string, which the engine cannot see


class _Run:
    """A prompt and its choices."""

    def __init__(self, prompt: str | None, ids: list[int]) -> None:
        self.prompt = prompt
        self.ids = ids
        self.choices: list[Choice] = []

    def output(self) -> RequestOutput:
        """The public form."""
        first = self.choices[0]
        return RequestOutput(
            request_id=str(first.id),
            prompt=self.prompt,
            prompt_token_ids=self.ids,
            prompt_logprobs=first.prompt_logprobs,
            num_cached_tokens=first.cached_tokens,
            outputs=[
                CompletionOutput(
                    index=choice.index,
                    text=choice.delta.text,
                    token_ids=choice.delta.token_ids,
                    logprobs=choice.delta.logprobs if choice.params.logprobs is not None else None,
                    finish_reason=choice.finish.text,
                    stop_reason=choice.delta.stop_reason,
                )
                for choice in self.choices
            ],
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts, or one."""
    if isinstance(prompts, (str, dict)) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _plain(prompt: Prompt) -> str | list[int]:
    """A text or token ids."""
    found: Any = prompt
    if isinstance(prompt, dict):
        found = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if found is None:
            raise ConfigError(
                f"a prompt with {', '.join(sorted(prompt)) or 'nothing in it'}",
                expected="prompt or prompt_token_ids",
            )
    return found if isinstance(found, str) else list(found)


def _resolved(config: Config) -> Config:
    """With the directory of the model; what is not on this machine is fetched first."""
    check_loader(config)
    config = located(config)
    check_mount(config)
    return config


def _text_files(config: Config) -> ModelFiles:
    """The small files, with the tokenizer's from where it is."""
    model = config.model
    tokenizer = None
    if model.tokenizer is not None:
        tokenizer = directory_of(config, model.tokenizer, model.tokenizer_revision)
    return load_model_files(
        model.path, shown=shown_folder(model), overrides=overrides_of(model), tokenizer=tokenizer
    )
