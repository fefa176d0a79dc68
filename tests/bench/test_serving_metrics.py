"""The figures of ``bench serve``, each beside its value by hand."""

from __future__ import annotations

from array import array

import pytest

from hotstart.bench.serving.answer import Answer
from hotstart.bench.serving.delay import Delay, delays, too_late
from hotstart.bench.serving.metrics import Metrics, summarize


def answer(start: float, *chunks: float, tokens: int, arrived: float | None = None, **other: float) -> Answer:
    return Answer(
        planned=start,
        arrived=start if arrived is None else arrived,
        start=start,
        chunks=array("d", chunks),
        end=other.get("end", chunks[-1]),
        prompt_tokens=10,
        output_tokens=tokens,
    )


FAILED = Answer(start=100.0, error="HTTP 500")
SHORT = answer(100.0, 100.5, 100.75, 101.0, tokens=3)
"""TTFT 0.5, gaps 0.25 and 0.25, latency 1, TPOT 0.25."""
BUNDLED = answer(101.0, 102.0, 104.0, tokens=9)
"""TTFT 1, one gap of 2, latency 3, TPOT 2 / 8 = 0.25: four tokens came in a chunk."""
SINGLE = answer(100.0, 100.25, tokens=1, arrived=99.0)
"""TTFT and latency 0.25, no gap, no TPOT; it waited a second for its turn."""


@pytest.fixture
def found() -> Metrics:
    return summarize([SHORT, FAILED, BUNDLED, SINGLE], 5.0, (50, 90, 99.9))


def test_totals_and_rates_leave_failed_requests_out(found: Metrics) -> None:
    assert (found.completed, found.failed) == (3, 1)
    assert (found.total_input, found.total_output) == (30, 13)
    assert found.request_throughput == pytest.approx(3 / 5)
    assert found.output_throughput == pytest.approx(13 / 5)
    assert found.total_token_throughput == pytest.approx(43 / 5)


def test_ttft_is_to_the_first_content(found: Metrics) -> None:
    ttft = found.distributions["ttft"]
    assert ttft.mean == pytest.approx((500 + 1000 + 250) / 3)
    assert ttft.median == pytest.approx(500)
    assert ttft.std == pytest.approx(311.805, abs=1e-3)  # of a population, as numpy's
    # Of 250, 500, 1000: P90 is at place 1.8.
    assert list(ttft.percentiles) == ["50", "90", "99.9"]
    assert ttft.percentiles["90"] == pytest.approx(500 + 0.8 * 500)
    assert ttft.percentiles["99.9"] == pytest.approx(500 + 0.998 * 500)


def test_tpot_is_of_each_request_with_more_than_one_token_whatever_its_chunks(found: Metrics) -> None:
    assert found.distributions["tpot"].mean == pytest.approx(250)
    assert found.distributions["tpot"].std == pytest.approx(0)


def test_itl_is_of_all_gaps_together(found: Metrics) -> None:
    itl = found.distributions["itl"]
    assert itl.mean == pytest.approx((250 + 250 + 2000) / 3)
    assert itl.median == pytest.approx(250)


def test_latency_goes_to_the_end_of_the_answer_and_not_to_its_last_text() -> None:
    late = answer(0.0, 1.0, 2.0, tokens=3, end=3.0)
    found = summarize([late], 3.0).distributions
    assert found["e2el"].mean == pytest.approx(3000)
    assert found["tpot"].mean == pytest.approx(1000)
    assert found["itl"].mean == pytest.approx(1000)


def test_waiting_in_the_client_is_apart_from_latency(found: Metrics) -> None:
    assert found.distributions["client_queue_time"].mean == pytest.approx(1000 / 3)
    assert found.distributions["e2el"].mean == pytest.approx((1000 + 3000 + 250) / 3)
    assert found.distributions["e2el_including_client_queue"].mean == pytest.approx((1000 + 3000 + 1250) / 3)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 500}, 2),
        ({"ttft": 499}, 1),
        ({"tpot": 250}, 3),
        ({"tpot": 249}, 1),  # an answer of one token counts as 0
        ({"e2el": 1000, "tpot": 250}, 2),
        ({"ttft": 2000, "tpot": 250, "e2el": 2999}, 2),
    ],
)
def test_goodput_counts_requests_that_keep_every_limit(limits: dict[str, float], good: int) -> None:
    found = summarize([SHORT, FAILED, BUNDLED, SINGLE], 5.0, limits=limits)
    assert found.request_goodput == pytest.approx(good / 5)


def test_peaks_are_of_the_fullest_second(found: Metrics) -> None:
    # Second 0: two tokens of SHORT and the one of SINGLE; 1: one; 2: 4.5 of BUNDLED; 4: 4.5.
    assert found.peak_output == pytest.approx(4.5)
    # As vLLM counts, SHORT is in seconds 0 and 1, and BUNDLED in 1 to 4.
    assert found.peak_requests == 2
    assert found.in_flight == 2


def test_requests_of_one_second_are_not_in_flight_at_once() -> None:
    after_each_other = [answer(place / 10, place / 10 + 0.05, tokens=1) for place in range(8)]
    found = summarize(after_each_other, 1.0)
    assert (found.peak_requests, found.in_flight) == (8, 1)


def test_distribution_of_nothing_is_nothing() -> None:
    assert summarize([SINGLE], 1.0).distributions["itl"].percentiles == {"99": 0.0}


def test_client_delay_is_from_the_plan_to_the_turn_and_of_the_loop() -> None:
    answers = [Answer(planned=10.0, arrived=10.0 + late) for late in (0.0, 0.001, 0.005)]
    found = delays(answers, [0.002, 0.004])
    assert found.sending.mean == pytest.approx(0.002)
    assert found.sending.longest == pytest.approx(0.005)
    assert found.seeing.mean == pytest.approx(0.003)
    assert found.seeing.p99 == pytest.approx(0.00398)


def test_slow_client_is_told_by_its_share_of_what_is_measured() -> None:
    def warnings(sending: float, seeing: float) -> list[str]:
        late = delays([], [])
        late = type(late)(Delay(sending, sending, sending), Delay(seeing, seeing, seeing))
        return too_late(late, [SHORT, FAILED])  # TTFT 500 ms, TPOT 250 ms

    assert warnings(0.001, 0.001) == []
    assert warnings(0.05, 0.0) == ["requests went out 50.00 ms late on average, 10% of TTFT"]
    assert warnings(0.0, 0.01) == ["chunks were seen 10.00 ms late on average, 4% of TPOT"]
