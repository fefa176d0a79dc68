"""The text side of a model, built before any weight is read: cheap, and without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hotstart.checkpoint.base import ModelFiles
from hotstart.checkpoint.files import read_json
from hotstart.config.settings import Config
from hotstart.config.text_file import read_text
from hotstart.errors import ConfigError, HotstartError, ModelError, raise_all
from hotstart.frontend.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from hotstart.frontend.chat_template import ChatTemplate

_SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 100.0),
    "max_new_tokens": (1, 2**31 - 1),
}
"""What a model may set for requests that leave it out: as for requests themselves."""
_ORDINARY_TEXT = "The quick brown fox, 2 of 3."
_WHOLE = ("top_k", "max_new_tokens")


@dataclass(frozen=True)
class Text:
    """What turns requests into tokens and tokens into answers."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    no_template: str = ""
    """Why chat is refused, and what to do; empty when there is a template."""
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    """Of generation_config.json and its overrides; ``max_new_tokens`` bounds what is not asked for."""
    warnings: tuple[str, ...] = ()
    """Of tokens that the model's files name and the model does not have."""


def load_text(files: ModelFiles, config: Config) -> Text:
    """Build tokenizer, template and sampling defaults; all problems are raised together.

    A missing chat template is no problem: completions work, and chat says what to do.
    """
    problems: list[HotstartError] = []
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    defaults: dict[str, Any] = {}
    warnings: list[str] = []
    try:
        tokenizer = load_tokenizer(files)
        warnings += _check_vocabulary(files, tokenizer)
        warnings += _check_encoding(tokenizer)
    except HotstartError as error:
        problems.append(error)
    try:
        warnings += _check_end_tokens(files)
    except HotstartError as error:
        problems.append(error)
    warnings += [f"the chat template in {name} is empty: it counts as none" for name in files.empty_templates]
    try:
        template = _load_template(files, config, tokenizer.special_tokens if tokenizer else {})
    except HotstartError as error:
        problems.append(error)
    try:
        defaults = _sampling_defaults(files, config)
    except HotstartError as error:
        problems.append(error)
    raise_all(problems)
    assert tokenizer is not None
    return Text(tokenizer, template, "" if template else _no_template(files), defaults, tuple(warnings))


def model_vocab_size(files: ModelFiles) -> int | None:
    """Rows of the embedding, by config.json; None when it does not say."""
    text_config = files.config.get("text_config")
    nested = text_config.get("vocab_size") if isinstance(text_config, dict) else None
    size = files.config.get("vocab_size", nested)
    return size if isinstance(size, int) else None


def _check_vocabulary(files: ModelFiles, tokenizer: Tokenizer) -> list[str]:
    """Raise ModelError when ordinary text can give tokens that the model has no embedding for.

    Fine-tunes often add a padding token and leave the embedding as it was: no text holds that token,
    so it is a warning, which is returned.
    """
    size = model_vocab_size(files)
    if size is None:
        return []
    ordinary = tokenizer.backend.get_vocab_size(with_added_tokens=False)
    if ordinary > size:
        raise ModelError(
            f"the tokenizer in {files.text_folder} has {ordinary} tokens and the model's embedding {size} "
            "(vocab_size of config.json)",
            expected="a tokenizer whose tokens all have an embedding",
            advice="The tokenizer belongs to another model: copy both from the same place",
        )
    beyond = sorted(token for token in tokenizer.added_ids if token >= size)
    if not beyond:
        return []
    names = ", ".join(tokenizer.piece(token) for token in beyond[:3])
    return [
        f"{len(beyond)} added tokens ({names}{' …' if len(beyond) > 3 else ''}) lie beyond the model's "
        f"vocabulary of {size}: prompts that hold one are refused"
    ]


def _check_encoding(tokenizer: Tokenizer) -> list[str]:
    """Warn of a tokenizer that is whole and yet has no tokens for an ordinary text."""
    try:
        tokenizer.encode(_ORDINARY_TEXT)
    except Exception as error:  # the library raises bare Exception
        return [f"the tokenizer cannot encode ordinary text, which requests then hear: {error}"]
    return []


def _check_end_tokens(files: ModelFiles) -> list[str]:
    """Raise ModelError for ``eos_token_id`` that is no id; warn of one that can never come."""
    size = model_vocab_size(files)
    beyond: list[str] = []
    for name, content in (("generation_config.json", files.generation_config), ("config.json", files.config)):
        value = (content or {}).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
            raise ModelError(
                f"{name} sets eos_token_id to {value!r}",
                expected="a token id, or a list of them",
                advice="Copy the file again, or correct it there",
            )
        beyond += [f"{token} in {name}" for token in ids if size is not None and token >= size]
    if not beyond:
        return []
    return [f"eos_token_id {', '.join(beyond)} is beyond the vocabulary of {size}: it never ends a text"]


def _no_template(files: ModelFiles) -> str:
    looked = f"chat_template.jinja and tokenizer_config.json in {files.text_folder}"
    named = f" (only named ones: {', '.join(files.chat_templates)})" if files.chat_templates else ""
    return (
        f"This model has no chat template: none was found in {looked}{named}. "
        "Restart with --chat-template FILE, or use /v1/completions."
    )


def _load_template(files: ModelFiles, config: Config, special_tokens: dict[str, str]) -> ChatTemplate | None:
    given = config.model.chat_template
    if given is not None:
        source, origin = _given_template(given)
    elif files.chat_template is not None:
        source, origin = files.chat_template, files.chat_template_source or files.path
    else:
        return None
    from hotstart.frontend.chat_template import ChatTemplate

    return ChatTemplate(
        source,
        origin=origin,
        special_tokens=special_tokens,
        content_format=config.model.chat_template_content_format,
        from_flag=given is not None,
    )


def _given_template(given: str) -> tuple[str, str]:
    """``--chat-template`` is a file, or the template itself when it looks like one."""
    try:
        source = read_text(given)
    except (OSError, ValueError) as error:
        if "{" in given or "\n" in given:
            return given, "--chat-template"
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"--chat-template {given} cannot be read: {reason}", expected="a file, or a template's text"
        ) from None
    if not source.strip():
        raise ConfigError(
            f"--chat-template {given} is empty",
            expected="a jinja2 template",
            advice="If a command was to write it, see why it failed",
        )
    return source, given


def _sampling_defaults(files: ModelFiles, config: Config) -> dict[str, Any]:
    chosen = config.model.generation_config
    if chosen == "auto":
        found = files.generation_config or {}
    elif chosen == "vllm":
        found = {}
    else:
        found = _read_generation_config(chosen)
    over = config.model.override_generation_config
    defaults: dict[str, Any] = {}
    for key, (low, high) in _SAMPLING_BOUNDS.items():
        value = over.get(key, found.get(key))
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise _bad_default(key, value, f"a number from {low:g} to {high:g}", by_flag=key in over)
        defaults[key] = int(value) if key in _WHOLE else value
    return defaults


def _bad_default(key: str, value: object, expected: str, *, by_flag: bool) -> HotstartError:
    if by_flag:
        return ConfigError(f"--override-generation-config sets {key} to {value!r}", expected=expected)
    return ModelError(
        f"generation_config.json sets {key} to {value!r}",
        expected=expected,
        advice="Correct it, or start with --generation-config vllm",
    )


def _read_generation_config(directory: str) -> dict[str, Any]:
    path = os.path.join(directory, "generation_config.json")
    try:
        return read_json(path)
    except HotstartError as error:
        raise type(error)(
            f"--generation-config {directory}: {error.found}",
            expected=error.expected or "a directory with generation_config.json, or auto or vllm",
            advice=error.advice,
        ) from None
