"""Text to token ids and back, on the ``tokenizers`` library alone.

Ids equal those of transformers: the same file, the same special tokens, and the same rule that
``add_bos_token`` and ``add_eos_token`` count only where there is no tokenizer.json to say it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hotstart.checkpoint.base import ModelFiles
from hotstart.errors import HotstartError, ModelError, raise_all

if TYPE_CHECKING:
    import tokenizers

_INLINE_CHARS = 64 * 1024
"""Longer texts are encoded in a thread, so that the event loop keeps answering."""
_ESTIMATE_CHARS = 1 << 20
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space")
_ID_DIGITS = 10
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A loaded tokenizer. Thread-safe: nothing changes after construction but caches."""

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str]) -> None:
        self.backend = backend
        self.special_tokens = special_tokens
        """``bos_token`` and so on, for templates."""
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_ids = frozenset(added)
        self.byte_style, self.strips_first_space = _byte_style(backend)
        """``level`` (byte-level BPE), ``fallback`` (SentencePiece style) or None: use :meth:`decode`;
        and whether a text loses the space of its first word's piece."""
        self._bytes: dict[int, bytes] = {}
        self._longest: int | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Takes about 1 µs per 4 characters; see :meth:`encode_async`."""
        encoding = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return list(encoding.ids)

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """:meth:`encode` without stalling the event loop on a long text."""
        if len(text) <= _INLINE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, for refusing huge texts before encoding them."""
        if len(text) < _ESTIMATE_CHARS or self.byte_style != "level":
            return 0
        if self._longest is None:
            self._longest = max(map(len, self.backend.get_vocab()))
        return len(text) // max(1, self._longest)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; ids without a token are left out."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """One token alone, as log probabilities show it; partial characters become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def piece(self, token: int) -> str:
        """The vocabulary's own spelling of a token (``Ġhello``, ``▁hello``)."""
        return self.backend.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, in UTF-8; possibly a part of a character."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        piece = self.backend.id_to_token(token)
        if piece is None:
            return b""
        if self.byte_style == "level":
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in piece)
            except KeyError:
                return piece.encode("utf-8", "replace")
        if self.byte_style == "fallback":
            match = _BYTE_TOKEN.match(piece)
            return (
                bytes((int(match[1], 16),)) if match else piece.replace("▁", " ").encode("utf-8", "replace")
            )
        return self.backend.decode([token], skip_special_tokens=False).encode("utf-8", "replace")


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Build the tokenizer of a model directory.

    Raises :class:`~hotstart.errors.ModelError` when there is none, or a damaged one.
    """
    import tokenizers

    config = files.tokenizer_config or {}
    raise_all(_wrong_types(files))
    special = _special_tokens(files)
    if files.tokenizer_json is not None:
        try:
            backend = tokenizers.Tokenizer.from_file(files.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(
                f"{files.text_folder}/tokenizer.json cannot be used: {error}",
                expected="a tokenizer.json written by the tokenizers library",
                advice="Fetch the file again; a text stub of large-file storage is a usual cause",
            ) from None
    elif files.vocab_json is not None and files.merges_txt is not None:
        backend = _byte_level_bpe(
            files.vocab_json, files.merges_txt, add_prefix_space=bool(config.get("add_prefix_space"))
        )
        special = {**_special_tokens_by_id(files, backend), **special}
    else:
        raise ModelError(
            f"There is no tokenizer in {files.text_folder}",
            expected="tokenizer.json, or vocab.json with merges.txt",
            advice="Copy it from the original model, or write one with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    backend.no_truncation()
    backend.no_padding()
    _add_specials(backend, special, config)
    if files.tokenizer_json is None:
        is_opt = files.config.get("model_type") == "opt"
        bos = special.get("bos_token") if config.get("add_bos_token", is_opt) else None
        eos = special.get("eos_token") if config.get("add_eos_token") else None
        _frame(backend, bos, eos)
    return Tokenizer(backend, special)


def _wrong_types(files: ModelFiles) -> list[HotstartError]:
    """One error for each entry that is not of the type it should be."""
    problems: list[HotstartError] = []

    def refuse(file: str, name: str, value: object, expected: str) -> None:
        shown = json.dumps(value)  # as the file has it
        found = f"{file} sets {name} to {shown[:80]}{' …' if len(shown) > 80 else ''}"
        problems.append(
            ModelError(found, expected=expected, advice="Copy the file again, or correct it there")
        )

    for file, content in (
        ("special_tokens_map.json", files.special_tokens_map),
        ("tokenizer_config.json", files.tokenizer_config),
    ):
        for name, value in (content or {}).items():
            if name in _NAMED and value is not None and not _is_text(value) and not _is_token(value):
                refuse(file, name, value, "the token's text, or an object with its content")
            if name in _SWITCHES and value is not None and not isinstance(value, bool):
                refuse(file, name, value, "true or false")
    listed = (files.tokenizer_config or {}).get("added_tokens_decoder")
    if listed is not None and not isinstance(listed, dict):
        refuse("tokenizer_config.json", "added_tokens_decoder", listed, "an object of tokens by their ids")
        return problems
    for key, entry in (listed or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS and _is_token(entry)):
            name = f"added_tokens_decoder[{json.dumps(key)}]"
            refuse("tokenizer_config.json", name, entry, "a token id, and an object with the token's content")
    return problems


def _is_text(value: object) -> bool:
    """Half of a surrogate pair can be written in JSON, and is no text."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _is_token(value: object) -> bool:
    return isinstance(value, dict) and _is_text(value.get("content"))


def _special_tokens(files: ModelFiles) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in (files.special_tokens_map or {}, files.tokenizer_config or {}):
        for name, value in source.items():
            if name in _NAMED or (name.endswith("_token") and isinstance(value, (str, dict))):
                content = value.get("content") if isinstance(value, dict) else value
                if isinstance(content, str):
                    found[name] = content
    return found


def _special_tokens_by_id(files: ModelFiles, backend: tokenizers.Tokenizer) -> dict[str, str]:
    """What the model's configuration says by id, for directories without a tokenizer configuration."""
    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "pad_token_id"}
    found: dict[str, str] = {}
    for name, key in names.items():
        token_id = files.config.get(key)
        if not isinstance(token_id, int) or not 0 <= token_id < 1 << 32:
            continue  # vocabularies have gaps: only the library's own bound counts
        piece = backend.id_to_token(token_id)
        if piece is not None:
            found[name] = piece
    return found


def _byte_level_bpe(vocab: str, merges: str, *, add_prefix_space: bool) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    try:
        model = models.BPE.from_file(vocab, merges)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(
            f"{vocab} and {merges} cannot be used: {error}",
            expected="a byte-level BPE vocabulary and its merges, as GPT-2 and OPT have them",
            advice="Fetch both files again",
        ) from None
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_specials(backend: tokenizers.Tokenizer, special: dict[str, str], config: dict[str, Any]) -> None:
    """Make every named special token one token, with the flags that the configuration gives."""
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if entry["content"] not in known:
            flags = {
                k: bool(entry[k]) for k in ("single_word", "lstrip", "rstrip", "normalized") if k in entry
            }
            backend.add_tokens([AddedToken(entry["content"], special=bool(entry.get("special")), **flags)])
            known.add(entry["content"])
    extra = [content for content in dict.fromkeys(special.values()) if content and content not in known]
    if extra:
        backend.add_special_tokens([AddedToken(content, special=True) for content in extra])


def _frame(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Begin every text with ``bos`` and end it with ``eos``, where given."""
    from tokenizers import processors

    named = {token: backend.token_to_id(token) for token in (bos, eos) if token}
    single = " ".join(part for part in (bos, "$A", eos) if part)
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(named.items()))


def _byte_style(backend: tokenizers.Tokenizer) -> tuple[str | None, bool]:
    if backend.decoder is None:
        return None, False
    described = json.loads(backend.decoder.__getstate__())
    steps = described.get("decoders", [described])
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return "level", False
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    fallback = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if steps in (fallback, [*fallback, strip]):
        return "fallback", strip in steps
    return None, False


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, reversed (``bytes_to_unicode`` in its encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
