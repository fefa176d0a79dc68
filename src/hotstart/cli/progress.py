"""What a person sees of a start: a line for each phase, a bar or lines while it lasts, a table.

All are views of a :class:`~hotstart.timeline.Timeline`. On a terminal one line below the log shows
what is going on, and a table at the end what went on. Elsewhere nothing is ever overwritten: each
phase is a line when it ends, and whatever takes long is reported by a full line at least every 5 s,
since a silent server looks like a dead one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from typing import TextIO

from hotstart.timeline import Phase, Timeline, awaited
from hotstart.units import format_rate, format_seconds, format_size

log = logging.getLogger("hotstart.start")

QUIET_SECONDS = 4.5
"""With a tick of :data:`TICK_SECONDS` no silence lasts longer than 5 s."""
TICK_SECONDS = 0.5
BAR_TICK_SECONDS = 0.1
BAR_AFTER_SECONDS = 0.4
"""Shorter phases show no bar: it would only flicker."""
_BAR_CELLS = 24
_TABLE_COLUMNS = 100


class Screen:
    """A terminal with one line at the bottom that is no log. Written by any thread.

    Give it to :func:`hotstart.cli.logs.setup` as the stream, so that log lines go above the bar.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Write above the bar; the bar reappears once a line is complete."""
        with self._lock:
            if self._bar:
                self._stream.write("\r\x1b[K")
            written = self._stream.write(text)
            if self._bar and text.endswith("\n"):
                self._stream.write(self._bar)
            return written

    def flush(self) -> None:
        """Flush the terminal."""
        with self._lock:
            self._stream.flush()

    def isatty(self) -> bool:
        """Whether there is a terminal at all."""
        return self._stream.isatty()

    def show(self, bar: str) -> None:
        """Replace the bottom line; empty: remove it."""
        with self._lock:
            if bar == self._bar:
                return
            self._stream.write(f"\r\x1b[K{bar}")
            self._stream.flush()
            self._bar = bar


class Progress:
    """Follows a timeline until :meth:`stop`. With ``screen`` it draws a bar there, else it logs.

    ``enabled`` off (``--no-use-tqdm-on-load``): only the line of each phase that ended. ``tabular``:
    phases are left to :func:`startup_table`, and only what it has no room for is logged.
    """

    def __init__(
        self,
        timeline: Timeline,
        *,
        screen: Screen | None = None,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeline = timeline
        self._screen = screen
        self._enabled = enabled
        self.tabular = enabled and screen is not None
        self._clock = clock
        self._last_line = clock()
        self._ended: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        timeline.listen(self.heed)
        for phase in timeline.phases():
            self.heed(phase)

    def start(self) -> None:
        """Begin to tick, on a thread of its own."""
        if self._enabled:
            self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the ticking and remove the bar; phases that end later are still logged."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._screen is not None:
            self._screen.show("")

    def heed(self, phase: Phase) -> None:
        """Log a phase when it ends, once."""
        if phase.end is None:
            return
        with self._lock:
            key = (phase.process, phase.name)
            if key in self._ended:
                return
            self._ended.add(key)
            self._last_line = self._clock()
        if not self.tabular:
            log.info("%s", ended_line(phase, self._timeline.origin))
        elif phase.detail != _first_words(phase.detail):
            log.info("%s: %s", phase.name, phase.detail)

    def tick(self) -> None:
        """Show what is going on: redraw the bar, or log when nothing was for a while."""
        now = self._clock()
        running = awaited(self._timeline.phases())
        if self._screen is not None:
            long = [phase for phase in running if phase.seconds(now) >= BAR_AFTER_SECONDS]
            self._screen.show(bar_line(long, now) if long else "")
            return
        with self._lock:
            if now - self._last_line < QUIET_SECONDS:
                return
            self._last_line = now
        if running:
            log.info("%s", "; ".join(running_line(phase, now) for phase in running))
        else:
            log.info("starting for %s", format_seconds(now - self._timeline.origin))

    def _run(self) -> None:
        period = TICK_SECONDS if self._screen is None else BAR_TICK_SECONDS
        while not self._stop.wait(period):
            self.tick()


def ended_line(phase: Phase, origin: float) -> str:
    """``read weights: 269 MB in 110 ms (2.45 GB/s), done at 640 ms, mapped``."""
    seconds = phase.seconds()
    if phase.bytes:
        text = (
            f"{format_size(phase.bytes)} in {format_seconds(seconds)} ({format_rate(phase.bytes, seconds)})"
        )
    else:
        text = format_seconds(seconds)
    done = format_seconds(max(0.0, (time.monotonic() if phase.end is None else phase.end) - origin))
    return f"{phase.name}: {text}, done at {done}" + (f", {phase.detail}" if phase.detail else "")


def running_line(phase: Phase, now: float) -> str:
    """``read weights: 62 %, 1.66 of 2.69 GB, 540 MB/s, 1.91 s left``."""
    seconds = phase.seconds(now)
    if not phase.total:
        return f"{phase.name}: for {format_seconds(seconds)}"
    parts = [
        f"{_percent(phase):.0f} %",
        f"{format_size(phase.bytes)} of {format_size(phase.total)}",
        format_rate(phase.bytes, seconds),
    ]
    if phase.bytes and phase.bytes < phase.total:
        parts.append(f"{format_seconds(seconds / phase.bytes * (phase.total - phase.bytes))} left")
    return f"{phase.name}: {', '.join(parts)}"


def bar_line(running: list[Phase], now: float) -> str:
    """The first of what is awaited, with a bar if it moves bytes, and what runs beside it; no newline."""
    main, *others = running
    text = running_line(main, now)
    if main.moves:
        full = int(_percent(main) / 100 * _BAR_CELLS)
        text = f"{'█' * full}{'░' * (_BAR_CELLS - full)} {text}"
    return " · ".join([text, *(_beside(phase, now) for phase in others)])[: _columns()]


def _beside(phase: Phase, now: float) -> str:
    if phase.total:
        return f"{phase.name} {_percent(phase):.0f} %"
    return f"{phase.name} {format_seconds(phase.seconds(now))}"


def _columns() -> int:
    """A bar that wraps could not be removed again."""
    try:
        columns = os.get_terminal_size(2).columns
    except OSError:
        columns = 0
    return max(20, (columns or 80) - 1)  # a container's terminal may not know its size


def _percent(phase: Phase) -> float:
    return min(100.0, 100 * phase.bytes / phase.total)


def startup_table(timeline: Timeline, *, cells: int = 32) -> str:
    """The start as a waterfall: a row for each phase, its time, and when it ran, in 100 columns.

    ``cells``: characters for the time axis, each of two halves.
    """
    phases = timeline.phases()
    if not phases:
        return "no phase was recorded"
    now = time.monotonic()
    ends = [now if phase.end is None else phase.end for phase in phases]
    total = max(max(ends) - timeline.origin, 1e-9)
    rows = [
        (
            phase.name,
            phase.process,
            format_seconds(phase.seconds(now)),
            _span((phase.start - timeline.origin) / total, (end - timeline.origin) / total, cells),
        )
        for phase, end in zip(phases, ends, strict=True)
    ]
    name, process, took = (max(len(row[i]) for row in rows) for i in range(3))
    margin = " " * (name + process + took + 6)
    room = _TABLE_COLUMNS - len(margin) - cells - 2
    lines = [
        f"{row[0]:<{name}}  {row[1]:<{process}}  {row[2]:>{took}}  {row[3]:<{cells}}  "
        + _remark(phase, now, room)
        for row, phase in zip(rows, phases, strict=True)
    ]
    return "\n".join([margin + _axis(total, cells), *(line.rstrip() for line in lines)])


def _axis(total: float, cells: int) -> str:
    """``0        605 ms        1.21 s``, each word over its place."""
    middle, end = format_seconds(total / 2), format_seconds(total)
    left = f"0{middle:^{cells - 2}}"
    return left[: cells - len(end)] + end


def _span(start: float, end: float, cells: int) -> str:
    """A stretch between two fractions of the axis, in half cells; at least one half."""
    halves = 2 * cells
    first = min(round(start * halves), halves - 1)
    last = max(first + 1, min(halves, round(end * halves)))
    marks = " ▐▌█"  # none, right half, left half, both
    return "".join(
        marks[2 * (first <= half < last) + (first <= half + 1 < last)] for half in range(0, last, 2)
    )


def _remark(phase: Phase, now: float, room: int) -> str:
    """As much as there is room for, the most telling first."""
    parts = []
    if phase.end is None:
        parts.append("still running")
    if phase.bytes:
        parts += [format_size(phase.bytes), format_rate(phase.bytes, phase.seconds(now))]
    if phase.detail:
        parts.append(_first_words(phase.detail))
    while parts and len(", ".join(parts)) > room:
        parts.pop()
    return ", ".join(parts)


def _first_words(detail: str) -> str:
    """``direct`` of ``direct (57% resident in the page cache; …)``: the choice without its reason."""
    return re.split(r" \(|; |, ", detail, maxsplit=1)[0]


def write_startup_json(timeline: Timeline, path: str) -> None:
    """Write the timeline so that a reader sees all of it or nothing. Raises ``StorageError``."""
    from hotstart.config.output_file import write_output

    text = json.dumps(timeline.as_dict(), indent=1) + "\n"
    write_output("--startup-json", path, text.encode())
