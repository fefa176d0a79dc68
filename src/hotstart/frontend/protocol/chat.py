"""``POST /v1/chat/completions``."""

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


class ContentPart(Struct, kw_only=True):
    """A piece of a message; types other than text and refusal are refused by name."""

    type: f.Label
    text: f.Text | None = None
    refusal: f.Text | None = None


class FunctionCall(Struct, kw_only=True):
    """What the assistant called earlier; ``arguments`` is JSON text."""

    name: f.Label
    arguments: f.Text | None = None


class ToolCall(Struct, kw_only=True):
    """A call in an assistant message of the history."""

    function: FunctionCall
    id: f.Label | None = None
    type: f.Label | None = "function"


class Message(Struct, kw_only=True):
    """One message of the conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: f.Text | list[ContentPart] | None = None
    name: f.Label | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: f.Label | None = None
    reasoning_content: f.Text | None = None
    reasoning: f.Text | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=f.MAX_MESSAGES)]


class ChatRequest(GenerationRequest, kw_only=True):
    """``max_completion_tokens`` wins over the deprecated ``max_tokens``."""

    messages: Messages
    max_tokens: f.MaxTokens | None = None
    max_completion_tokens: f.MaxTokens | None = None
    logprobs: bool | None = False
    top_logprobs: f.LogprobsCount | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    chat_template_kwargs: f.TemplateKwargs | None = None
    reasoning_effort: f.Label | None = None


class TopLogprob(Struct, kw_only=True):
    """A candidate; ``bytes`` is its UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, kw_only=True):
    """The chosen token and the most likely ones beside it."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """One entry per token."""

    content: list[ChatLogprob]


class AnswerMessage(Struct, kw_only=True):
    """What the assistant said."""

    role: str
    content: str
    refusal: str | None = None
    tool_calls: list[ToolCall] = []


class ChatChoice(Struct, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(Struct, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Timestamp
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobsBody | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True):
    """What a chunk adds."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True):
    """One answer's share of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """One event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: Timestamp
    model: str
    choices: list[ChunkChoice]
    usage: MaybeUsage = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
