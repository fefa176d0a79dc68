"""From a request to :class:`~hotstart.messages.SamplingParams`: defaults, limits, and what contradicts."""

from __future__ import annotations

from typing import Any

import msgspec

from hotstart.frontend.errors import ApiError
from hotstart.frontend.protocol.requests import GenerationRequest
from hotstart.messages import SamplingParams


def sampling_params(
    request: GenerationRequest,
    defaults: dict[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    vocab_size: int,
) -> SamplingParams:
    """What the engine is told. A field that the request leaves out takes the model's default."""
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise ApiError(
            400, f"min_tokens {min_tokens} is larger than max_tokens {max_tokens}.", param="min_tokens"
        )
    stop = [request.stop] if isinstance(request.stop, str) else list(request.stop or ())
    return SamplingParams(
        temperature=_pick(request.temperature, defaults, "temperature", 1.0),
        top_p=_pick(request.top_p, defaults, "top_p", 1.0),
        top_k=int(_pick(request.top_k, defaults, "top_k", 0)),
        min_p=_pick(request.min_p, defaults, "min_p", 0.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_pick(request.repetition_penalty, defaults, "repetition_penalty", 1.0),
        seed=request.seed,
        stop=stop,
        stop_token_ids=list(request.stop_token_ids or ()),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(request, vocab_size),
        skip_special_tokens=request.skip_special_tokens is not False,
    )


def per_choice(params: SamplingParams, i: int) -> SamplingParams:
    """Parameters of choice ``i`` of one prompt: with a seed, each choice has its own."""
    if params.seed is None or i == 0:
        return params
    return msgspec.structs.replace(params, seed=params.seed + i)


def check_prompt_length(tokens: int, *, context: int, param: str, at_least: bool = False) -> None:
    """Raise :class:`ApiError` 400 for a prompt of ``tokens`` (or more) that leaves no room to answer."""
    if tokens >= context:
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens. However, your request has "
            f"{'at least ' if at_least else ''}{tokens} input tokens. Please reduce the length of the input.",
            param=param,
        )


def bound_max_tokens(
    asked: int | None,
    *,
    prompt: int,
    context: int,
    default: int | None,
    prompt_param: str,
    param: str = "max_tokens",
) -> int:
    """How many tokens may be generated.

    ``asked`` must fit into the context beside the prompt; without it, ``default`` or all that is
    left of the context, whichever is less. Raises :class:`ApiError` 400 with the numbers.
    """
    check_prompt_length(prompt, context=context, param=prompt_param)
    left = context - prompt
    if asked is None:
        return left if default is None else min(default, left)
    if asked > left:
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{asked + prompt} tokens ({prompt} in the input, {asked} in the output). Please reduce "
            f"the length of the input or {param}.",
            param=param,
        )
    return asked


def check_logprobs(count: int | None, *, limit: int, vocab_size: int, param: str) -> int | None:
    """``count`` within ``--max-logprobs`` (-1: no bound) and the vocabulary."""
    if count is not None and 0 <= limit < count:
        raise ApiError(
            400, f"{param} {count} is larger than {limit}, the limit set by --max-logprobs.", param=param
        )
    if count is not None and count > vocab_size:
        raise ApiError(
            400, f"{param} {count} is more than the {vocab_size} tokens of the vocabulary.", param=param
        )
    return count


def _pick(given: float | None, defaults: dict[str, Any], key: str, neutral: float) -> float:
    return given if given is not None else defaults.get(key, neutral)


def _logit_bias(request: GenerationRequest, vocab_size: int) -> dict[int, float]:
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    for token in bias:
        if token >= vocab_size:
            raise ApiError(
                400,
                f"logit_bias names token {token}, but the vocabulary has {vocab_size} tokens.",
                param="logit_bias",
            )
    return bias
