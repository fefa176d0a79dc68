"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from hotstart.frontend.protocol import fields as f
from hotstart.frontend.protocol.requests import (
    GenerationRequest,
    MaybeUsage,
    PromptLogprobsBody,
    Timestamp,
    Usage,
)

PromptItem = f.Text | f.TokenId | f.TokenIds
Prompt = f.Text | Annotated[list[PromptItem], Meta(min_length=1, max_length=2**24)]


class CompletionRequest(GenerationRequest, kw_only=True):
    """``prompt`` is a string, strings, token ids, or lists of token ids."""

    prompt: Prompt
    max_tokens: f.MaybeNoTokens | UnsetType | None = UNSET
    """Left out: 16. Null: all that the context holds. 0: with ``echo`` only."""
    max_completion_tokens: f.MaxTokens | None = None
    """As in chat, where it belongs: wins over ``max_tokens``."""
    best_of: f.Choices | None = None
    """As many as ``n``: there is no choosing among more."""
    logprobs: f.LogprobsCount | None = None
    add_special_tokens: bool | None = True


class CompletionLogprobs(Struct, kw_only=True):
    """Parallel lists, one entry per token.

    A token that is no whole text is spelled ``bytes:\\xe2\\x80``; of several candidates with one text
    all but the first are ``token_id:42``, so that none is lost.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobsBody | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(Struct, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Timestamp
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Struct, kw_only=True):
    """One event of a streamed answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Timestamp
    model: str
    choices: list[CompletionChoice]
    usage: MaybeUsage = UNSET
