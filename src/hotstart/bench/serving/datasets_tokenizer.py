"""What counts the tokens of a prompt: the model's tokenizer from its directory, or the server's.

A directory is faster, by far; the server's answers are right without knowing where its files lie.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hotstart.errors import ConfigError, StorageError

if TYPE_CHECKING:
    import ssl

    from hotstart.frontend.chat_template import ChatTemplate
    from hotstart.frontend.tokenizer import Tokenizer as Loaded

_FILES = ("tokenizer.json", "vocab.json", "merges.txt")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "config.json", "chat_template.jinja")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORDS = 4000
"""Random words that are sent to a server to learn some thousands of its tokens."""
_PATIENCE = 60.0
"""Seconds that the server may take to answer about its tokens."""


class Tokenizer(Protocol):
    """Text to ids and back, and the ids that a random text can be made of."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones included."""

    def alphabet(self) -> Sequence[int]:
        """Ids that are no special tokens, each of which is alone a text with that id."""

    def conversation(self, prompt: str, kwargs: Mapping[str, object]) -> str | None:
        """The prompt as a user's turn in the model's chat template; None where there is none."""


class DirectoryTokenizer:
    """The tokenizer and the template of a model directory."""

    def __init__(self, loaded: Loaded, template: ChatTemplate | None = None) -> None:
        self._loaded = loaded
        self._template = template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._loaded.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones included."""
        return self._loaded.decode(ids, skip_special_tokens=False)

    def alphabet(self) -> Sequence[int]:
        """Parts of characters are left out: as text they are other, and more, tokens."""
        backend = self._loaded.backend
        ids = [id for id in sorted(backend.get_vocab().values()) if id not in self._loaded.added_ids]
        texts = backend.decode_batch([[id] for id in ids])
        again = backend.encode_batch_fast(texts, add_special_tokens=False)
        # Where a tokenizer puts a space before a text, few tokens come back alone, and all will do.
        return [id for id, encoding in zip(ids, again, strict=True) if encoding.ids == [id]] or ids

    def conversation(self, prompt: str, kwargs: Mapping[str, object]) -> str | None:
        """See :class:`Tokenizer`. Raises ``ConfigError`` where the template refuses it."""
        if self._template is None:
            return None
        from hotstart.frontend.chat_template import TemplateRefusedError

        content: object = prompt
        if self._template.content_format == "openai":
            content = [{"type": "text", "text": prompt}]
        try:
            return self._template.render([{"role": "user", "content": content}], extra=kwargs)
        except TemplateRefusedError as error:
            raise ConfigError(
                f"the chat template in {self._template.origin} refuses a prompt: {error}",
                advice="Send the prompts as they are: --skip-chat-template",
            ) from None


class ServerTokenizer:
    """``/tokenize`` and ``/detokenize``, as vLLM, SGLang, llama.cpp's server and hotstart have them."""

    def __init__(
        self,
        base_url: str,
        model: str,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Asks nothing yet; see :meth:`check`."""
        parts = urllib.parse.urlsplit(base_url)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._url = f"{parts.scheme}://{parts.netloc}{self._prefix}"
        self._model = model
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        host, port = parts.hostname or "", parts.port
        self._connection: http.client.HTTPConnection = (
            http.client.HTTPSConnection(host, port, timeout=_PATIENCE, context=tls)
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=_PATIENCE)
        )

    def __enter__(self) -> ServerTokenizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        self._connection.close()

    def check(self) -> None:
        """Raise ``ConfigError`` where the server does not turn text into tokens."""
        if not self.encode("amber"):
            raise self._unusable("/tokenize", "answers with no tokens")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises ``ConfigError``, ``StorageError``."""
        asked: dict[str, object] = {"prompt": text, "add_special_tokens": add_special_tokens}
        found = self._tokens(asked)
        if not found and text:  # llama.cpp's server names the fields otherwise
            found = self._tokens({"content": text, "add_special": add_special_tokens})
        return found

    def _tokens(self, asked: dict[str, object]) -> list[int]:
        found = self._ask("/tokenize", asked).get("tokens")
        if not isinstance(found, list) or not all(isinstance(token, int) for token in found):
            raise self._unusable("/tokenize", "answers without a list of tokens")
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. Raises ``ConfigError``, ``StorageError``."""
        answer = self._ask("/detokenize", {"tokens": list(ids)})
        for name in ("prompt", "text", "content"):
            if isinstance(text := answer.get(name), str):
                return text
        raise self._unusable("/detokenize", "answers without a text")

    def alphabet(self) -> Sequence[int]:
        """What some random words are made of: a server does not tell its vocabulary."""
        dice = random.Random(0)  # which words it learns from does not matter
        words = ("".join(dice.choices(_LETTERS, k=dice.randint(2, 9))) for _ in range(_WORDS))
        return sorted(set(self.encode(" ".join(words), add_special_tokens=False)))

    def conversation(self, prompt: str, kwargs: Mapping[str, object]) -> str | None:
        """The prompt in the server's own template; None where it answers that there is none."""
        asked: dict[str, object] = {
            "messages": [{"role": "user", "content": prompt}],
            "add_generation_prompt": True,
            "chat_template_kwargs": dict(kwargs),
        }
        try:
            ids = self._tokens(asked)
        except ConfigError:
            return None
        return self.decode(ids) if ids else None

    def _ask(self, path: str, body: dict[str, object]) -> dict[str, Any]:
        content = json.dumps({"model": self._model, **body}).encode()
        try:
            status, answer = self._post(path, content)
        except (OSError, http.client.HTTPException) as error:
            raise StorageError(
                f"{self._url}{path} cannot be asked: {error or type(error).__name__}"
            ) from None
        if status != 200:
            raise self._unusable(path, f"answers {status}: {answer[:200].decode('utf-8', 'replace')}")
        try:
            found = json.loads(answer)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._unusable(path, "answers with no JSON object")
        return found

    def _post(self, path: str, content: bytes) -> tuple[int, bytes]:
        try:
            return self._exchange(path, content)
        except (ConnectionError, http.client.HTTPException):
            # An idle connection may have been closed meanwhile; the second one is new.
            self._connection.close()
            return self._exchange(path, content)

    def _exchange(self, path: str, content: bytes) -> tuple[int, bytes]:
        self._connection.request("POST", self._prefix + path, content, self._headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def _unusable(self, path: str, found: str) -> ConfigError:
        return ConfigError(
            f"{self._url}{path} {found}",
            expected="the tokens of a text, to make prompts of a known length",
            advice="Name the directory of the model's tokenizer: --tokenizer DIR",
        )


def tokenizer_for(name: str | None, model: str, server: ServerTokenizer) -> tuple[Tokenizer, str]:
    """The tokenizer, and in words where it comes from.

    ``name`` is ``--tokenizer``, a directory or a name on the hub. Without it the model's name counts if
    it is a directory here that has a tokenizer, as it is where server and client share a machine; else
    the server is asked. Raises ConfigError, ModelError, StorageError.
    """
    if name is not None:
        directory = name if os.path.isdir(name) else _of_hub(name)
        return read_tokenizer(directory), f"the tokenizer in {directory}"
    if any(os.path.exists(os.path.join(model, file)) for file in _FILES):
        return read_tokenizer(model), f"the tokenizer in {model}"
    server.check()
    return server, "the server's /tokenize"


def read_tokenizer(directory: str) -> DirectoryTokenizer:
    """The tokenizer in a directory, which may hold nothing else. Raises ModelError, StorageError."""
    from hotstart.checkpoint.base import ModelFiles
    from hotstart.checkpoint.files import load_model_files, read_json
    from hotstart.frontend.chat_template import ChatTemplate
    from hotstart.frontend.tokenizer import load_tokenizer

    def there(name: str) -> str | None:
        path = os.path.join(directory, name)
        return path if os.path.exists(path) else None

    if there("config.json"):
        files = load_model_files(directory)
    else:
        settings = {name: read_json(path) for name in _SETTINGS[:2] if (path := there(name))}
        template = settings.get("tokenizer_config.json", {}).get("chat_template")
        files = ModelFiles(
            path=directory,
            config={},
            tokenizer_config=settings.get("tokenizer_config.json"),
            special_tokens_map=settings.get("special_tokens_map.json"),
            tokenizer_json=there("tokenizer.json"),
            vocab_json=there("vocab.json"),
            merges_txt=there("merges.txt"),
            chat_template=template if isinstance(template, str) else None,
            chat_template_source="tokenizer_config.json",
        )
    loaded = load_tokenizer(files)
    if not files.chat_template:
        return DirectoryTokenizer(loaded)
    origin = os.path.join(directory, files.chat_template_source)
    compiled = ChatTemplate(files.chat_template, origin=origin, special_tokens=loaded.special_tokens)
    return DirectoryTokenizer(loaded, compiled)


def _of_hub(name: str) -> str:
    from hotstart.checkpoint.hub import Files, download
    from hotstart.checkpoint.resolve import is_path

    if is_path(name):
        raise ConfigError(
            f"--tokenizer {name} is no directory",
            expected="the directory of a tokenizer, or a name on the hub",
        )
    return download(name, files=Files((*_FILES, *_SETTINGS)))
