"""The picture of a run: what is counted where, and that all of it can be drawn."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from hotstart.bench.serving.plot import draw, rate, spread, successful

RESULT: dict[str, Any] = {
    "start_times": [100.0, 101.0, 101.5],
    "ttfts": [0.5, 0.25, 9.0],
    "itls": [[0.25, 0.25], [0.25], [1.0]],
    "output_lens": [6, 2, 0],
    "errors": ["", "", "HTTP 500"],
}
"""Arrivals of good ones: at 0.5, 0.75 and 1 with 2 tokens each, at 1.25 and 1.5 with one each."""


def only(**columns: Any) -> dict[str, Any]:
    """The first request, changed."""
    return {name: columns.get(name, values[:1]) for name, values in RESULT.items()}


def test_requests_that_failed_do_not_count() -> None:
    assert [each.ttft for each in successful(RESULT)] == [0.5, 0.25]


def test_tokens_of_a_chunk_count_where_the_chunk_came() -> None:
    found = rate(successful(RESULT))
    seconds = [0.0] * 2
    for place, tokens in enumerate(found.tokens):
        seconds[int(place * found.width + found.width / 2)] += tokens * found.width
    assert seconds == pytest.approx([4, 4])


def test_every_value_is_in_the_histogram_the_far_ones_as_well() -> None:
    values = [0.0, 0.01, 0.010, 0.011, 0.012, 60.0]
    found = spread(values)
    assert sum(found.counts) == len(values)
    assert (found.counts[0], found.counts[-1]) == (1, 1)
    assert found.p50 == pytest.approx(0.0105)
    assert 0 < found.place(found.p50) < found.place(found.p99) <= 1


def test_equal_values_stand_in_the_middle() -> None:
    assert spread([0.02] * 5).place(0.02) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "result",
    [
        RESULT,
        {**RESULT, "title": "model, 2 requests"},
        only(itls=[[]], output_lens=[1]),
        only(ttfts=[0.0], itls=[[0.0, 0.0]]),
        only(errors=["HTTP 500"]),
        only(output_lens=[0]),
        only(ttfts=[7200.0]),
    ],
)
def test_any_run_can_be_drawn(result: dict[str, Any]) -> None:
    picture = Image.open(io.BytesIO(draw(result)))
    assert picture.format == "PNG"
    assert picture.width == 1200


def test_a_bar_stands_where_the_time_is() -> None:
    """The picture of one request has one bar of TTFT, in the middle of its axis."""
    picture = Image.open(io.BytesIO(draw(only(itls=[[]]))))
    bar = [x for x in range(600) if picture.getpixel((x, 200)) == (0x54, 0xAE, 0xFF)]
    assert pytest.approx(bar[0], abs=12) == 72 + (584 - 72) / 2
    assert len(bar) < 12
