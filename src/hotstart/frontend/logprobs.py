"""Log probabilities in the three shapes that the API has for them."""

from __future__ import annotations

import codecs

from hotstart.config.settings import HttpConfig
from hotstart.frontend.protocol.chat import ChatLogprob, ChatLogprobs, TopLogprob
from hotstart.frontend.protocol.completions import CompletionLogprobs
from hotstart.frontend.protocol.requests import GenerationRequest, PromptLogprob, PromptLogprobsBody
from hotstart.frontend.tokenizer import Tokenizer
from hotstart.messages import TokenLogprobs

_LOWEST = -9999.0
"""JSON has no infinity; vLLM uses the same floor."""


class TokenNames:
    """How tokens are written in answers: as text, or as ``token_id:42`` when asked for."""

    def __init__(self, tokenizer: Tokenizer, http: HttpConfig, request: GenerationRequest) -> None:
        self._tokenizer = tokenizer
        asked = request.return_tokens_as_token_ids
        self._as_ids = http.return_tokens_as_token_ids if asked is None else asked

    def name(self, token: int) -> str:
        """The token's text."""
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def key(self, token: int) -> str:
        """The name, but a token that ends or begins within a character is spelled as OpenAI does it.

        ``bytes:\\xe2\\x80``: other than U+FFFD, which stands for all of them, it names one sequence.
        """
        data = self._tokenizer.token_bytes(token)
        try:
            data.decode()
        except UnicodeDecodeError:
            if not self._as_ids:
                return "bytes:" + "".join(map(_spelled, data))
        return self.name(token)

    def utf8(self, token: int) -> list[int]:
        """The token's bytes; of the name when names are ids."""
        return list(self.name(token).encode() if self._as_ids else self._tokenizer.token_bytes(token))


class TextOffset:
    """Where a text stands, in characters, as tokens come; a character counts once it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.at = 0
        self._bytes = tokenizer.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def pass_by(self, token: int) -> None:
        """Move behind ``token``."""
        self.at += len(self._decode(self._bytes(token)))


def completion_logprobs(
    names: TokenNames,
    tokens: list[int],
    positions: list[TokenLogprobs | None],
    *,
    top: int,
    offset: TextOffset,
) -> CompletionLogprobs:
    """The lists of ``/v1/completions``; ``offset`` moves behind them.

    The dictionaries need keys that differ: of several tokens with one text, as ``A`` and the byte
    0x41 of some vocabularies, the chosen or most likely has it for its key, the others ``token_id:42``.
    """
    result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token, position in zip(tokens, positions, strict=False):
        result.tokens.append(names.key(token))
        result.text_offset.append(offset.at)
        offset.pass_by(token)
        if position is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        result.token_logprobs.append(_floor(position.logprobs[0]))
        best: dict[str, float] = {}
        for i, logprob in {token: position.logprobs[0], **dict(_top(position, top))}.items():
            key = names.key(i)
            best[f"token_id:{i}" if key in best else key] = _floor(logprob)
        result.top_logprobs.append(best)
    return result


def chat_logprobs(
    names: TokenNames, tokens: list[int], positions: list[TokenLogprobs], *, top: int
) -> ChatLogprobs:
    """The list of ``/v1/chat/completions``."""
    return ChatLogprobs(
        [
            ChatLogprob(
                token=names.name(token),
                logprob=_floor(position.logprobs[0]),
                bytes=names.utf8(token),
                top_logprobs=[
                    TopLogprob(token=names.name(i), logprob=_floor(p), bytes=names.utf8(i))
                    for i, p in _top(position, top)
                ],
            )
            for token, position in zip(tokens, positions, strict=False)
        ]
    )


def prompt_logprobs_body(names: TokenNames, positions: list[TokenLogprobs | None]) -> PromptLogprobsBody:
    """vLLM's ``prompt_logprobs``: per position, id → probability, rank and text."""
    return [
        None
        if position is None
        else {
            str(token): PromptLogprob(_floor(logprob), rank, names.name(token))
            for token, logprob, rank in zip(position.ids, position.logprobs, position.ranks, strict=True)
        }
        for position in positions
    ]


def _top(position: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    return list(zip(position.ids[1 : 1 + count], position.logprobs[1 : 1 + count], strict=True))


def _spelled(byte: int) -> str:
    return chr(byte) if 0x20 <= byte < 0x7F and byte != ord("\\") else f"\\x{byte:02x}"


def _floor(logprob: float) -> float:
    return max(logprob, _LOWEST)
