"""The small files of a model's directory: read once, bounded, and refused with file, line and column."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from hotstart.checkpoint.base import ModelFiles
from hotstart.checkpoint.lfs import MAX_STUB, stub_error
from hotstart.checkpoint.refusals import no_weights
from hotstart.errors import HotstartError, ModelError, raise_all
from hotstart.storage.access import read_error, read_exactly
from hotstart.units import format_size

if TYPE_CHECKING:
    from hotstart.config.settings import ModelConfig

MAX_JSON = 64 << 20
MAX_TEMPLATE = 4 << 20
MAX_TEMPLATES = 64

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SMALL_FILES = {
    CONFIG: MAX_JSON, "generation_config.json": MAX_JSON, INDEX: 256 << 20,
    "tokenizer.json": 512 << 20, "tokenizer_config.json": MAX_JSON, "special_tokens_map.json": MAX_JSON,
    "vocab.json": MAX_JSON, "merges.txt": MAX_JSON,
    "chat_template.jinja": MAX_TEMPLATE, "chat_template.json": MAX_TEMPLATE,
}  # fmt: skip
"""Everything but weights that is read of a model, wherever it lies, and the bytes that each may have."""
TEMPLATES = "additional_chat_templates"
"""The folder of named chat templates, each a file of its own; they are read too."""


def load_model_files(
    path: str,
    *,
    shown: str = "",
    overrides: dict[str, Any] | None = None,
    tokenizer: str | None = None,
) -> ModelFiles:
    """Read the configuration, the tokenizer's settings and the chat templates of a directory.

    ``shown`` is what messages call it: of copies of a store's files, the store's folder.
    ``overrides`` (``--hf-overrides``) are laid over config.json, nested objects key by key;
    ``tokenizer`` is the directory of tokenizer and templates where it is another one. Raises
    ModelError, or ProblemsFound with one error for each file that is absent, damaged or too large.
    """
    reader = _Reader(path, shown or path)
    config = reader.json(CONFIG)
    if config is None and not reader.problems:
        reader.problems.append(_no_config(path))
    text = reader if tokenizer is None else _Reader(tokenizer, tokenizer)
    tokenizer_config = text.json("tokenizer_config.json")
    templates, source, empty = _templates(text, tokenizer_config or {})
    files = ModelFiles(
        path=reader.shown,
        text_path="" if text is reader else text.shown,
        config=merge(config or {}, overrides or {}),
        generation_config=reader.json("generation_config.json"),
        tokenizer_config=tokenizer_config,
        special_tokens_map=text.json("special_tokens_map.json"),
        tokenizer_json=text.present("tokenizer.json"),
        vocab_json=text.present("vocab.json"),
        merges_txt=text.present("merges.txt"),
        chat_template=templates.get("default"),
        chat_templates=templates if len(templates) > 1 else {},
        chat_template_source=source,
        empty_templates=empty,
    )
    raise_all(reader.problems if text is reader else reader.problems + text.problems)
    return files


def overrides_of(model: ModelConfig) -> dict[str, Any]:
    """What the command line lays over config.json: ``--hf-overrides`` and ``--tie-word-embeddings``."""
    tied = model.tie_word_embeddings
    return model.hf_overrides if tied is None else {**model.hf_overrides, "tie_word_embeddings": tied}


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` laid on top; objects in both are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def template_names(names: Iterable[str]) -> list[str]:
    """Which of the files in :data:`TEMPLATES` are read, in order."""
    usable = (
        name
        for name in names
        if name.endswith(".jinja") and name != "default.jinja" and name.isprintable() and "/" not in name
    )
    return sorted(name for name in usable if not name.startswith("."))[:MAX_TEMPLATES]


def size_limit(name: str) -> int | None:
    """Bytes that one of the small files may have; None: it is none of them."""
    folder, _, template = name.rpartition("/")
    if folder == TEMPLATES and template_names([template]):
        return MAX_TEMPLATE
    return SMALL_FILES.get(name)


def read_json(path: str, *, limit: int = MAX_JSON, shown: str = "") -> dict[str, Any]:
    """The object in a JSON file, which messages call ``shown``.

    Raises ModelError (with line and column) or StorageError.
    """
    text, path = read_text(path, limit=limit, shown=shown), shown or path
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            advice="Copy the file again, or correct it there",
        ) from None
    except RecursionError:
        raise ModelError(f"{path} nests too deeply to be read", expected="a model's JSON file") from None
    except ValueError as error:  # a number of thousands of digits
        raise ModelError(f"{path} is not usable: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {_json_kind(value)}", expected="a JSON object ({…})")
    return cast("dict[str, Any]", value)


def read_text(path: str, *, limit: int, shown: str = "") -> str:
    """A small UTF-8 file, whole, which messages call ``shown``.

    Raises ModelError for stubs, other encodings, and over ``limit`` bytes.
    """
    data, path = _read(path, limit, shown or path), shown or path
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise ModelError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at line {line}, column {column}",
            advice="Copy the file again, or save it as UTF-8",
        ) from None


def _read(path: str, limit: int, shown: str, *, only_head: bool = False) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not hang the start
    except OSError as error:
        raise read_error(path, error, doing="open") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{shown} is no regular file", expected="a file")
        if status.st_size > limit:
            raise ModelError(
                f"{shown} has {format_size(status.st_size)}", expected=f"at most {format_size(limit)}"
            )
        head = os.pread(fd, MAX_STUB, 0)
        if (stub := stub_error(shown, head)) is not None:
            raise stub
        return head if only_head else read_exactly(fd, status.st_size, 0)
    except OSError as error:
        if isinstance(error, HotstartError):
            raise
        raise read_error(path, error) from None
    finally:
        os.close(fd)


class _Reader:
    """Reads files of one directory; None for absent ones, problems collected."""

    def __init__(self, path: str, shown: str) -> None:
        self.path = path
        self.shown = shown
        self.problems: list[HotstartError] = []

    def json(self, name: str) -> dict[str, Any] | None:
        try:
            if path := self._find(name):
                return read_json(path, limit=SMALL_FILES[name], shown=self.called(name))
            return None
        except HotstartError as error:
            self.problems.append(error)
            return None

    def text(self, name: str) -> str | None:
        try:
            if path := self._find(name):
                return read_text(path, limit=MAX_TEMPLATE, shown=self.called(name))
            return None
        except HotstartError as error:
            self.problems.append(error)
            return None

    def present(self, name: str) -> str | None:
        """The path of a file that someone else parses, once it is known to be readable and no stub."""
        path = self._find(name)
        if path is None:
            return None
        try:
            _read(path, SMALL_FILES[name], self.called(name), only_head=True)
        except HotstartError as error:
            self.problems.append(error)
        return path

    def named_templates(self) -> dict[str, str]:
        """additional_chat_templates/NAME.jinja."""
        try:
            names = template_names(os.listdir(os.path.join(self.path, TEMPLATES)))
        except OSError:
            return {}
        texts = {name[: -len(".jinja")]: self.text(f"{TEMPLATES}/{name}") for name in names}
        return {name: text for name, text in texts.items() if text is not None}

    def called(self, name: str) -> str:
        """What messages call a file."""
        return f"{self.shown.rstrip('/')}/{name}"

    def _find(self, name: str) -> str | None:
        path = os.path.join(self.path, name)
        return path if os.path.lexists(path) else None


def _templates(
    reader: _Reader, tokenizer_config: dict[str, Any]
) -> tuple[dict[str, str], str, tuple[str, ...]]:
    """Templates by name, ``default`` among them if there is one, the file that gave the default, empty ones.

    Sources in order: chat_template.jinja, tokenizer_config.json, chat_template.json (old processors).
    """
    jinja = reader.text("chat_template.jinja")
    found = [("chat_template.jinja", {} if jinja is None else {"default": jinja})]
    found.append(("tokenizer_config.json", _named(reader, tokenizer_config, "tokenizer_config.json")))
    legacy = reader.json("chat_template.json")
    found.append(("chat_template.json", _named(reader, legacy or {}, "chat_template.json")))
    templates = reader.named_templates()
    empty = tuple(name for name, named in found if not all(text.strip() for text in named.values()))
    source = ""
    for name, every in found:
        named = {key: text for key, text in every.items() if text.strip()}
        if "default" in named and not source:
            source = reader.called(name)
        templates = {**named, **templates}  # the earlier source wins
    return templates, source, empty


def _named(reader: _Reader, content: dict[str, Any], file: str) -> dict[str, str]:
    """``chat_template`` as text, as a list of {name, template}, or as an object by name."""
    value = content.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(row, dict) for row in value):
        value = {row.get("name"): row.get("template") for row in value}
    if isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        return value
    reader.problems.append(
        ModelError(
            f"chat_template in {reader.called(file)} is {_json_kind(value)}",
            expected="a template's text, or a list of objects with name and template",
        )
    )
    return {}


def _no_config(path: str) -> ModelError:
    try:
        names = os.listdir(path)
    except OSError:
        names = []
    if not names:
        return no_weights(path, names, [])
    weights = any(name.endswith((".safetensors", ".bin", ".gguf")) for name in names)
    return ModelError(
        f"{path} holds {'weights but ' if weights else ''}no config.json",
        expected="a model's directory with config.json, tokenizer files and weights",
        advice="Copy config.json and the tokenizer files from where the weights came from"
        if weights
        else "Check the path",
    )


def _json_kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
