from __future__ import annotations

import io
import json
import logging
import os
import threading
from pathlib import Path

import pytest

from hotstart.cli.progress import Progress, Screen, ended_line, startup_table, write_startup_json
from hotstart.errors import StorageError
from hotstart.timeline import Phase, Timeline


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timeline() -> Timeline:
    return Timeline("engine", origin=100.0)


def tick_for(seconds: float, progress: Progress, clock: Clock) -> None:
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 0.5
        progress.tick()


def test_each_phase_that_ends_is_one_line(
    timeline: Timeline, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    Progress(timeline, clock=clock)
    phase = timeline.begin("read weights", total=269_000_000, start=100.0)
    timeline.progress(phase, 269_000_000)
    timeline.end(phase, detail="mapped", at=100.11)
    timeline.end(phase)
    timeline.end(timeline.begin("first step", start=100.2), at=100.25)
    assert caplog.messages == [
        "read weights: 269 MB in 110 ms (2.45 GB/s), done at 110 ms, mapped",
        "first step: 50 ms, done at 250 ms",
    ]


def test_a_phase_that_ended_before_anybody_followed_has_its_line_too(
    timeline: Timeline, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    timeline.end(timeline.begin("parse flags, spawn", start=100.0), at=100.07)
    Progress(timeline)
    assert caplog.messages == ["parse flags, spawn: 70 ms, done at 70 ms"]


def test_without_a_terminal_a_long_phase_speaks_at_least_every_5_seconds(
    timeline: Timeline, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    progress = Progress(timeline, clock=clock)
    phase = timeline.begin("read weights", total=1000, start=100.0)
    timeline.progress(phase, 250)
    tick_for(4.0, progress, clock)
    assert caplog.messages == []
    tick_for(1.0, progress, clock)
    assert caplog.messages == ["read weights: 25 %, 250 B of 1.00 kB, 56 B/s, 13.5 s left"]
    tick_for(60.0, progress, clock)
    assert 12 <= len(caplog.messages) - 1 <= 14
    assert not any("\r" in line or "\x1b" in line for line in caplog.messages)


def test_a_phase_without_bytes_says_how_long_it_runs(
    timeline: Timeline, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    progress = Progress(timeline, clock=clock)
    timeline.begin("import torch", start=100.0)
    timeline.begin("checks", start=102.0)
    tick_for(4.5, progress, clock)
    assert caplog.messages == ["import torch: for 4.50 s; checks: for 2.50 s"]


def test_silence_between_phases_is_broken_too(
    timeline: Timeline, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    progress = Progress(timeline, clock=clock)
    tick_for(5.0, progress, clock)
    assert caplog.messages == ["starting for 4.50 s"]


def test_a_line_of_a_phase_counts_as_a_sign_of_life(
    timeline: Timeline, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    progress = Progress(timeline, clock=clock)
    timeline.begin("import torch", start=100.0)
    tick_for(4.0, progress, clock)
    timeline.end(timeline.begin("checks", start=103.0), at=104.0)
    tick_for(4.0, progress, clock)
    assert caplog.messages == ["checks: 1.00 s, done at 4.00 s"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def bottom(self) -> str:
        """What stands in the last line after all the overwriting."""
        return self.getvalue().rpartition("\n")[2].rpartition("\x1b[K")[2]


def test_on_a_terminal_a_bar_shows_what_is_going_on(timeline: Timeline, clock: Clock) -> None:
    terminal = Terminal()
    progress = Progress(timeline, clock=clock, screen=Screen(terminal))
    phase = timeline.begin("read weights", total=1000, start=100.0)
    timeline.begin("import torch", start=100.0)
    progress.tick()
    assert terminal.getvalue() == ""
    timeline.progress(phase, 500)
    clock.now += 1
    progress.tick()
    assert terminal.bottom().startswith("█" * 12 + "░" * 12 + " read weights: 50 %")
    progress.stop()
    assert terminal.bottom() == ""


def test_a_phase_with_all_its_bytes_is_not_what_the_bar_waits_for(timeline: Timeline, clock: Clock) -> None:
    terminal = Terminal()
    progress = Progress(timeline, clock=clock, screen=Screen(terminal))
    phase = timeline.begin("read weights", total=1000, start=100.0)
    timeline.begin("build model", start=100.5)
    timeline.progress(phase, 1000)
    clock.now += 2
    progress.tick()
    assert terminal.bottom() == "build model: for 1.50 s · read weights 100 %"


def test_on_a_terminal_the_table_has_the_phases_and_the_log_what_has_no_room_there(
    timeline: Timeline, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    progress = Progress(timeline, screen=Screen(Terminal()))
    why = "direct (0% resident in the page cache; reading past it saves a copy); longest stall 25 ms"
    phase = timeline.begin("read weights", total=1000, start=100.0)
    timeline.progress(phase, 1000)
    timeline.end(phase, detail=why, at=100.1)
    timeline.end(timeline.begin("first step", start=100.2), detail="held request", at=100.3)
    assert progress.tabular
    assert caplog.messages == [f"read weights: {why}"]
    assert "10.0 kB/s, direct\n" in startup_table(timeline)


def test_log_lines_go_above_the_bar() -> None:
    terminal = Terminal()
    screen = Screen(terminal)
    screen.show("███")
    screen.write("a line\n")
    assert terminal.getvalue() == "\r\x1b[K███\r\x1b[Ka line\n███"


def test_turned_off_there_is_no_ticking_thread(timeline: Timeline) -> None:
    terminal = Terminal()
    progress = Progress(timeline, screen=Screen(terminal), enabled=False)
    progress.start()
    progress.stop()
    assert terminal.getvalue() == ""


def test_the_ticking_thread_ends_with_stop(timeline: Timeline) -> None:
    terminal = Terminal()
    screen = Screen(terminal)
    shown = screen.show
    drawn = threading.Event()

    def show(bar: str) -> None:
        shown(bar)
        if bar:
            drawn.set()

    screen.show = show  # type: ignore[method-assign]
    progress = Progress(timeline, screen=screen)
    timeline.begin("import torch", start=timeline.origin - 10_000_000)
    progress.start()
    assert drawn.wait(10)
    progress.stop()
    assert terminal.bottom() == ""


def example() -> Timeline:
    timeline = Timeline("frontend", origin=100.0)
    rows = [
        ("python", "frontend", 0.0, 0.03, 0, ""),
        ("checks", "frontend", 0.05, 0.15, 0, "9 passed"),
        ("read weights", "engine", 0.1, 0.2, 269_000_000, "mapped"),
        ("import torch", "engine", 0.1, 0.95, 0, ""),
        ("first step", "engine", 0.95, 1.0, 0, ""),
    ]
    for name, process, start, end, size, detail in rows:
        timeline.merge(
            Phase(
                name=name,
                process=process,
                start=100 + start,
                end=100 + end,
                bytes=size,
                total=size,
                detail=detail,
            )
        )
    return timeline


def test_the_table_shows_when_each_phase_ran() -> None:
    assert startup_table(example(), cells=20).splitlines() == [
        "                                0      500 ms 1.00 s",
        "python        frontend   30 ms  ▌",
        "checks        frontend  100 ms   ██                   9 passed",
        "read weights  engine    100 ms    ██                  269 MB, 2.69 GB/s, mapped",
        "import torch  engine    850 ms    █████████████████",
        "first step    engine     50 ms                     █",
    ]


def test_a_row_that_would_pass_100_columns_says_less() -> None:
    timeline = example()
    timeline.end(timeline.begin("a phase with a rather long name", start=100.0), at=100.07)
    rows = startup_table(timeline).splitlines()
    assert max(map(len, rows)) <= 100
    [reading] = [row for row in rows if row.startswith("read weights")]
    assert reading.endswith("  269 MB")


def test_the_table_of_nothing_says_so(timeline: Timeline) -> None:
    assert startup_table(timeline) == "no phase was recorded"


def test_the_json_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "start.json"
    path.write_text("old")
    write_startup_json(example(), str(path))
    data = json.loads(path.read_text())
    assert [phase["name"] for phase in data["phases"]][2:4] == ["read weights", "import torch"]
    numbers = {"start": 0.1, "end": 0.2, "bytes": 269_000_000, "total": 269_000_000}
    assert data["phases"][2] == {"name": "read weights", "process": "engine", "detail": "mapped", **numbers}
    assert os.listdir(tmp_path) == ["start.json"]


def test_a_json_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file or directory"):
        write_startup_json(example(), str(tmp_path / "absent" / "start.json"))


def test_no_time_is_negative() -> None:
    """As without /proc, where the origin is the moment that somebody asked for it."""
    timeline = Timeline("engine", origin=100.0)
    phase = timeline.begin("python start", start=100.1)
    timeline.end(phase, at=99.998)
    assert ended_line(phase, timeline.origin) == "python start: 0 ms, done at 100 ms"
    early = timeline.begin("spawn", start=99.0)
    timeline.end(early, at=99.5)
    assert ended_line(early, timeline.origin) == "spawn: 500 ms, done at 0 ms"
    shown = timeline.as_dict()["phases"]
    assert isinstance(shown, list)
    assert min(phase["start"] for phase in shown) == 0
