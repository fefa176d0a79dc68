"""What counts in a stream, read from any pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotstart.bench.serving.answer import Answer, EventReader
from stub_streams import DONE, delta, event, text, usage


def read(pieces: Sequence[bytes]) -> Answer:
    """Pieces come at 1, 2, 3 …; the request was sent at 0."""
    answer = Answer()
    reader = EventReader(answer)
    for second, piece in enumerate(pieces, 1):
        reader.feed(piece, float(second))
    reader.close(len(pieces) + 1.0)
    return answer


def test_role_comment_empty_text_and_usage_are_no_content() -> None:
    pieces = [
        delta(role="assistant", content=""),  # 1
        b": ping\n\n",
        delta(content="Hel"),  # 3
        delta(content=""),
        delta(content="lo"),  # 5
        delta(finish="stop"),  # 6
        usage(2, prompt=30),
        DONE,
    ]
    answer = read(pieces)
    assert answer.first_chunk == 1
    assert list(answer.chunks) == [3, 5]
    assert (answer.ttft, answer.itl, answer.latency) == (3, [2], 6)
    assert (answer.text, answer.output_tokens, answer.prompt_tokens) == ("Hello", 2, 30)


@pytest.mark.parametrize(
    "content",
    [
        {"content": "word"},
        {"reasoning_content": "word"},
        {"reasoning": "word"},
        {"tool_calls": [{"index": 0, "function": {"name": "f"}}]},
    ],
)
def test_text_reasoning_and_tool_calls_are_content(content: dict[str, object]) -> None:
    answer = read([delta(role="assistant"), delta(**content), delta(finish="stop"), DONE])
    assert answer.ttft == 2


def test_last_usage_counts_where_every_chunk_has_one() -> None:
    def chunk(tokens: int) -> bytes:
        counts = {"prompt_tokens": 5, "completion_tokens": tokens}
        return event(choices=[{"text": "a"}], usage=counts)

    answer = read([chunk(1), chunk(2), chunk(3), DONE])
    assert (answer.output_tokens, len(answer.chunks)) == (3, 3)


def test_several_tokens_in_a_chunk_are_one_chunk() -> None:
    answer = read([text("a b c d"), text(" e", finish="length"), usage(5), DONE])
    assert (answer.itl, answer.output_tokens) == ([1], 5)


def test_tokens_without_any_text_are_there_when_the_answer_ends() -> None:
    answer = read([text(""), text("", finish="length"), usage(1), DONE])
    assert (answer.ttft, answer.latency) == (2, 2)


def test_cached_tokens_are_those_of_the_usage() -> None:
    told = usage(1, prompt=40, prompt_tokens_details={"cached_tokens": 32})
    assert read([text("a", finish="stop"), told, DONE]).cached_tokens == 32
    assert read([text("a", finish="stop"), usage(1), DONE]).cached_tokens is None


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([text("a"), event(error={"message": "out of memory"})], "an error in the stream: out of memory"),
        ([text("a"), b"data: {nonsense\n\n"], r"a chunk that is not understood \(.*\): \{nonsense"),
        ([text("a"), event(choices="none")], r"a chunk that is not understood"),
        ([text("a")], "the stream ended before the answer did"),
        ([delta(role="assistant"), delta(finish="stop"), DONE], "the stream ended without any content"),
        ([], "the stream ended before the answer did"),
    ],
)
def test_stream_that_is_no_whole_answer_is_an_error(pieces: list[bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(pieces)


STREAM = b"".join(
    [text("é"), b": c\r\n\r\n", b"event: x\r\nid: 3\r\n", text("b", finish="stop"), usage(2), DONE]
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_stream_means_the_same_however_it_is_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    answer = read([STREAM[begin:end] for begin, end in pairwise(places)])
    assert (answer.text, len(answer.chunks), answer.output_tokens) == ("éb", 2, 2)


def test_last_event_counts_without_the_empty_line_behind_it() -> None:
    assert read([text("a"), text("b", finish="stop").rstrip()]).text == "ab"
