"""Models, tokenisation, and the answers about the server itself."""

from __future__ import annotations

from typing import Literal, TypeVar

from msgspec import Struct

from hotstart.frontend.protocol import fields as f
from hotstart.frontend.protocol.chat import Messages
from hotstart.frontend.protocol.requests import Timestamp

T = TypeVar("T", bound=Struct)


class ModelPermission(Struct, kw_only=True):
    """A relic that OpenAI's clients still parse."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: Timestamp
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(Struct, kw_only=True):
    """One served name."""

    id: str
    object: Literal["model"] = "model"
    created: Timestamp
    owned_by: str = "hotstart"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(Struct, kw_only=True):
    """``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeRequest(Struct, kw_only=True):
    """``POST /tokenize``: either ``prompt`` or ``messages``."""

    model: f.ModelName | None = None
    prompt: f.Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """None: true for a prompt, false for messages."""
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: f.TemplateKwargs | None = None
    return_token_strs: bool | None = False


class TokenizeResponse(Struct, kw_only=True):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """``POST /detokenize``."""

    model: f.ModelName | None = None
    tokens: f.TokenIds


class DetokenizeResponse(Struct):
    """The text of token ids."""

    prompt: str


class LoadResponse(Struct):
    """``GET /load``: requests being answered now."""

    server_load: int


class VersionResponse(Struct):
    """``GET /version``."""

    version: str


class LivezResponse(Struct, kw_only=True):
    """``GET /livez``. Bytes are those of the phase that moves them, and of the weights once ready.

    In a phase that counts no bytes they are 0, and ``percent`` is null.
    """

    status: str
    """``loading``, ``ready``, ``draining``, ``stalled``, ``failed`` or ``stopped``."""
    phase: str
    bytes: int
    total: int
    percent: float | None
    seconds_left: float | None
    elapsed: float
    message: str | None = None
