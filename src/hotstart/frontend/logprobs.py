"""Log probabilities in the three shapes that the API has for them."""

from __future__ import annotations

from hotstart.frontend.protocol.chat import ChatLogprob, ChatLogprobs, TopLogprob
from hotstart.frontend.protocol.completions import CompletionLogprobs
from hotstart.frontend.protocol.requests import PromptLogprob, PromptLogprobsBody
from hotstart.frontend.tokenizer import Tokenizer
from hotstart.messages import TokenLogprobs

_LOWEST = -9999.0
"""JSON has no infinity; vLLM uses the same floor."""


class TokenNames:
    """How tokens are written in answers: as text, or as ``token_id:42`` when asked for."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token: int) -> str:
        """The token's text."""
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def utf8(self, token: int) -> list[int]:
        """The token's bytes; of the name when names are ids."""
        return list(self.name(token).encode() if self._as_ids else self._tokenizer.token_bytes(token))


def completion_logprobs(
    names: TokenNames,
    tokens: list[int],
    positions: list[TokenLogprobs | None],
    *,
    top: int,
    offset: int,
) -> tuple[CompletionLogprobs, int]:
    """The lists of ``/v1/completions``, and the text offset behind them."""
    result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token, position in zip(tokens, positions, strict=False):
        name = names.name(token)
        result.tokens.append(name)
        result.text_offset.append(offset)
        offset += len(name)
        if position is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        result.token_logprobs.append(_floor(position.logprobs[0]))
        best = {names.name(i): _floor(p) for i, p in _top(position, top)}
        best.setdefault(name, _floor(position.logprobs[0]))
        result.top_logprobs.append(best)
    return result, offset


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


def _floor(logprob: float) -> float:
    return max(logprob, _LOWEST)
