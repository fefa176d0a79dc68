"""What both kinds of generation request have in common, and their answers' shared parts."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, UnsetType

from hotstart.frontend.protocol import fields as f


class StreamOptions(Struct, kw_only=True):
    """``stream_options``."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(Struct, kw_only=True):
    """Fields of ``/v1/completions`` and ``/v1/chat/completions`` alike; vLLM's extensions included.

    None means: the server's default, which generation_config.json may set.
    """

    model: f.ModelName | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: f.Choices | None = 1
    temperature: f.Temperature | None = None
    top_p: f.TopP | None = None
    top_k: f.TopK | None = None
    min_p: f.MinP | None = None
    presence_penalty: f.Penalty | None = 0.0
    frequency_penalty: f.Penalty | None = 0.0
    repetition_penalty: f.RepetitionPenalty | None = None
    seed: f.Seed | None = None
    stop: f.StopString | f.StopStrings | None = None
    stop_token_ids: f.StopTokenIds | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    min_tokens: f.MaybeNoTokens | None = 0
    logit_bias: f.LogitBias | None = None
    prompt_logprobs: f.LogprobsCount | None = None
    skip_special_tokens: bool | None = True
    echo: bool | None = False
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = False


class PromptTokensDetails(Struct):
    """Part of :class:`Usage`."""

    cached_tokens: int


class Usage(Struct, kw_only=True):
    """Tokens read and written."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class PromptLogprob(Struct):
    """One candidate at one position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsBody = list[dict[str, PromptLogprob] | None]


class ErrorInfo(Struct, kw_only=True):
    """The inner object of OpenAI's error body."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(Struct):
    """OpenAI's error body."""

    error: ErrorInfo


Timestamp = Annotated[int, Meta(ge=0)]
MaybeUsage = Usage | None | UnsetType
