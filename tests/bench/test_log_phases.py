"""Phases of servers that only print what they do."""

from __future__ import annotations

import pytest

from hotstart.bench.log_phases import LogPhases


def phases(*printed: tuple[float, str]) -> dict[str, tuple[float, float]]:
    """What a log tells whose parts came at these times, the process having begun at 100 s."""
    log = LogPhases(100.0)
    for at, text in printed:
        log.feed(text.encode(), at)
    return {str(p["name"]): (float(str(p["start"])), float(str(p["end"]))) for p in log.phases()}


def test_line_that_says_how_long_something_took_ends_it() -> None:
    found = phases(
        (105.0, "(EngineCore pid=7) INFO 08-01 default_loader.py:502] Loading weights took 2.50 seconds\n"),
        (106.0, "INFO Model loading took 0.25 GiB memory and 3.500000 seconds\n"),
        (
            120.0,
            "INFO torch.compile took 9.00 s in total\nINFO Graph capturing finished in 2 secs, took 1 GiB\n",
        ),
        (121.0, "INFO init engine (profile, create kv cache, warmup model) took 14.00 s\n"),
    )
    assert found == {
        "load weights": (2.5, 5.0),
        "load model": (2.5, 6.0),
        "torch.compile": (11.0, 20.0),
        "capture graphs": (18.0, 20.0),
        "init engine": (7.0, 21.0),
    }


def test_pair_of_lines_is_a_phase_and_ranks_are_one() -> None:
    found = phases(
        (103.0, "[2025 TP0] Load weight begin. avail mem=46.81 GB\n"),
        (103.5, "[2025 TP1] Load weight begin. avail mem=46.81 GB\n"),
        (105.0, "[2025 TP0] Load weight end. type=Llama\n"),
        (
            106.0,
            "[2025 TP1] Load weight end. type=Llama\n[2025 TP0] Capture cuda graph end. Time elapsed: 1 s\n",
        ),
    )
    assert found == {"load weights": (3.0, 6.0)}


def test_line_may_come_in_pieces() -> None:
    assert phases((101.0, "Loading weights to"), (102.0, "ok 1.0 seconds\n")) == {"load weights": (1.0, 2.0)}


@pytest.mark.parametrize("line", ["Loading weights took ages\n", "Load weight end\n", "\x00\xff\n", ""])
def test_other_lines_are_no_phases(line: str) -> None:
    assert phases((101.0, line)) == {}
