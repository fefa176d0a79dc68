"""The tokens of answers: as the server counts them, else as a tokenizer does; and who it was."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hotstart.bench.serving.answer import Answer
from hotstart.bench.serving.datasets_tokenizer import Tokenizer
from hotstart.bench.serving.requests import SampleRequest
from hotstart.checkpoint.wording import count
from hotstart.errors import HotstartError

USAGE, CHUNKS = "the server's usage", "chunks, as nothing else counts them"


def count_tokens(
    answers: Sequence[Answer], requests: Sequence[SampleRequest], tokenizer: Tokenizer, origin: str
) -> str:
    """Fill in what the server did not say; returns who counted, in words. ``origin``: of the tokenizer."""
    good = [pair for pair in zip(answers, requests, strict=True) if not pair[0].error]
    _warn(good)
    for answer, request in good:
        answer.prompt_tokens = answer.prompt_tokens or request.prompt_len
    uncounted = [answer for answer, _ in good if not answer.output_tokens]
    if not uncounted:
        return USAGE
    other = origin
    try:
        for answer in uncounted:
            ids = tokenizer.encode(answer.text, add_special_tokens=False)
            answer.output_tokens = max(1, len(ids))
    except HotstartError as error:
        print(f"hotstart: tokens are not counted but chunks: {error}", file=sys.stderr)
        other = CHUNKS
        for answer in uncounted:
            answer.output_tokens = len(answer.chunks)
    if len(uncounted) == len(good):
        return other
    return f"{USAGE}; of {count(len(uncounted), 'answer')} {other}"


def _warn(good: Sequence[tuple[Answer, SampleRequest]]) -> None:
    """Of counts that cannot be right; they are taken all the same, as everybody else takes them."""
    many = sum(answer.output_tokens > request.expected_output_len for answer, request in good)
    few = sum(0 < answer.output_tokens < len(answer.chunks) for answer, _ in good)
    for number, what in ((many, "than were asked for"), (few, "than there were chunks with content")):
        if number:
            more = "more" if what.endswith("asked for") else "fewer"
            print(
                f"hotstart: of {count(number, 'answer')} the server counts {more} tokens {what}: "
                "throughput and TPOT are built on its count",
                file=sys.stderr,
            )
