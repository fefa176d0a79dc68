"""Token by token to text: never half a character, never the beginning of a stop string.

Most vocabularies spell each token as bytes, so text is an incremental UTF-8 decoder over a table
lookup. Vocabularies whose decoder looks at neighbours (WordPiece, Metaspace) are decoded in a
sliding window that starts a few tokens back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from hotstart.frontend.tokenizer import Tokenizer

_WINDOW = 6
"""Tokens of context that a neighbour-sensitive decoder is given."""
_LONGEST_PENDING = 8
"""Tokens that may wait for a character to complete; more cannot be one character."""


class Detokenizer(Protocol):
    """Turns a growing list of ids into text that is never taken back."""

    def push(self, token: int) -> str:
        """Text that ``token`` completes; possibly none."""
        ...


def detokenizer(
    tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True
) -> Detokenizer:
    """A detokenizer for what follows ``prompt``."""
    skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    if tokenizer.byte_style is None:
        return _WindowDetokenizer(tokenizer, prompt, skip_special_tokens)
    strip = tokenizer.strips_first_space and all(token in tokenizer.special_ids for token in prompt)
    return _ByteDetokenizer(tokenizer, skip, strip_first_space=strip)


class _ByteDetokenizer:
    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int], *, strip_first_space: bool) -> None:
        self._bytes = tokenizer.token_bytes
        self._skip = skip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip = strip_first_space

    def push(self, token: int) -> str:
        if token in self._skip:
            return ""
        data = self._bytes(token)
        if self._strip and data:
            self._strip = False
            data = data[1:] if data[:1] == b" " else data
        return self._decode(data)


class _WindowDetokenizer:
    """Emits the difference between the decoded window with and without the newest tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._ids = list(prompt[-_WINDOW:])
        self._read = len(self._ids)
        self._emitted = self._text(self._ids)

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._text(self._ids)
        waiting = len(self._ids) - self._read < _LONGEST_PENDING
        if len(text) <= len(self._emitted) or (text.endswith("�") and waiting):
            return ""
        new = text[len(self._emitted) :]
        self._ids = self._ids[-_WINDOW:]
        self._read = len(self._ids)
        self._emitted = self._text(self._ids)
        return new

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)


class StopStrings:
    """Finds the stop string that is complete first, and holds back what may become one."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What of ``text`` may be shown. After a match: the text up to it, then nothing more."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else end - len(self.matched)]
        keep = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The held-back text, once it can no longer become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of ``stop`` that ``text`` ends with."""
    if not text:
        return 0
    length = min(len(stop) - 1, len(text))
    while length > 0:
        length = stop.rfind(text[-1], 0, length) + 1
        if length and text.endswith(stop[:length]):
            return length
        length -= 1
    return 0
