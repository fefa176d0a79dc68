"""Bounded field types, and the fields that are refused by name.

Every bound is part of the OpenAPI document. A field may be null wherever OpenAI's clients send
null for "default".
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAX_STOP_STRINGS = 64
MAX_PROMPTS = 2048
MAX_CHOICES = 4096
MAX_MESSAGES = 16384

ModelName = Annotated[str, Meta(max_length=4096)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = list[TokenId]
Text = Annotated[str, Meta(max_length=32 * 2**20)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=1024)]
Choices = Annotated[int, Meta(ge=1, le=128)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
MaybeNoTokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(gt=0.0, le=100.0)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
BiasKey = Annotated[str, Meta(pattern="^[0-9]{1,10}$")]
LogitBias = Annotated[dict[BiasKey, Bias], Meta(max_length=1024)]
LogprobsCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Label = Annotated[str, Meta(max_length=512)]
TemplateKwargs = Annotated[dict[str, Any], Meta(max_length=256)]

_NOTHING = frozenset((b"null", b"false", b"[]", b"{}", b'""'))

REFUSED: dict[str, tuple[frozenset[bytes], str]] = {
    name: (_NOTHING | frozenset(neutral), what)
    for name, neutral, what in (
        ("tools", (), "Tool calling"),
        ("tool_choice", (b'"none"', b'"auto"'), "Choosing a tool"),
        ("functions", (), "Function calling"),
        ("function_call", (b'"none"', b'"auto"'), "Function calling"),
        ("response_format", (b'{"type":"text"}', b'{"type": "text"}'), "A response_format other than text"),
        ("guided_json", (), "Guided decoding"),
        ("guided_regex", (), "Guided decoding"),
        ("guided_choice", (), "Guided decoding"),
        ("guided_grammar", (), "Guided decoding"),
        ("guided_decoding_backend", (), "Guided decoding"),
        ("guided_whitespace_pattern", (), "Guided decoding"),
        ("structured_outputs", (), "Structured output"),
        ("suffix", (), "Completion with a suffix"),
        ("best_of", (b"1",), "best_of larger than 1"),
        ("use_beam_search", (), "Beam search"),
        ("prompt_embeds", (), "A prompt of embeddings"),
        ("modalities", (b'["text"]',), "Output other than text"),
        ("audio", (), "Audio"),
        ("mm_processor_kwargs", (), "Input other than text"),
        ("documents", (), "Retrieval from documents"),
        ("chat_template", (), "A chat template in the request"),
        ("truncate_prompt_tokens", (), "Truncation of prompts"),
        ("bad_words", (), "bad_words"),
        ("allowed_token_ids", (), "allowed_token_ids"),
        ("logits_processors", (), "Choosing logits processors"),
        ("cache_salt", (), "cache_salt"),
        ("kv_transfer_params", (), "KV transfer"),
        ("web_search_options", (), "Searching the web"),
        ("vllm_xargs", (), "vllm_xargs"),
        ("priority", (b"0",), "Scheduling by priority"),
        ("thinking_token_budget", (), "A budget for thinking"),
    )
}
"""Fields that would change the answer and are not supported: name → (neutral values, what it is)."""

HARMLESS = REFUSED.keys() | frozenset(
    [
        "prediction",
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "verbosity",
        "length_penalty",
        "early_stopping",
        "spaces_between_special_tokens",
        "include_reasoning",
        "request_id",
        "prompt_cache_retention",
    ]
)
"""Known fields that cannot change the answer here: accepted without a log line. So are the refused
ones when they ask for nothing."""


def refusal(name: str, value: msgspec.Raw) -> str | None:
    """Why ``value`` cannot be accepted for the field ``name``; None when it can.

    Raises ``msgspec.DecodeError`` or ``RecursionError`` for a value that is not JSON after all: as
    :class:`msgspec.Raw` it was only skipped over.
    """
    rule = REFUSED.get(name)
    if rule is None:
        return None
    neutral, what = rule
    raw = bytes(value)
    if raw in neutral or _canonical(raw) in neutral:
        return None
    return f"{what} is not supported; leave `{name}` out"


def _canonical(raw: bytes) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(raw)) if len(raw) < 256 else raw
