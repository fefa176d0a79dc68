"""The phases of a start, read from what other servers print while they start.

Two forms are understood: a line that says how long something took, which then ended when the line
came; and a pair of lines, for its begin and its end. A server that changes its words loses the
phase, never the measurement.
"""

from __future__ import annotations

import re

_TOOK: tuple[tuple[str, re.Pattern[str]], ...] = (
    # vLLM
    ("load weights", re.compile(r"Loading weights took ([\d.]+) s")),
    ("load model", re.compile(r"Model loading took \S+ GiB memory and ([\d.]+) s")),
    ("torch.compile", re.compile(r"torch\.compile took ([\d.]+) s in total")),
    ("capture graphs", re.compile(r"Graph capturing finished in ([\d.]+) s")),
    ("init engine", re.compile(r"init engine \(.*\) took ([\d.]+) s")),
)
_PAIRS: tuple[tuple[str, re.Pattern[str], re.Pattern[str]], ...] = (
    # SGLang
    (
        "init distributed",
        re.compile(r"Init torch distributed begin"),
        re.compile(r"Init torch distributed ends?\b"),
    ),
    ("load weights", re.compile(r"Load weight begin"), re.compile(r"Load weight end")),
    ("capture graphs", re.compile(r"Capture cuda graph begin"), re.compile(r"Capture cuda graph end")),
)


class LogPhases:
    """What a log has told so far; times are seconds since ``origin`` of ``time.monotonic()``."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._rest = b""
        self._begun: dict[str, float] = {}
        self._found: dict[str, tuple[float, float]] = {}

    def feed(self, output: bytes, now: float) -> None:
        """Take in what the server has printed since the last call."""
        *lines, self._rest = (self._rest + output).split(b"\n")
        for line in lines:
            self._read(line.decode(errors="replace"), now - self._origin)

    def phases(self) -> tuple[dict[str, object], ...]:
        """In the form of /startup.json; what several ranks tell is one phase, from first to last."""
        return tuple(
            {"process": "log", "name": name, "start": begin, "end": end}
            for name, (begin, end) in self._found.items()
        )

    def _read(self, line: str, at: float) -> None:
        for name, took in _TOOK:
            if match := took.search(line):
                self._add(name, max(0.0, at - float(match[1])), at)
        for name, begins, ends in _PAIRS:
            if begins.search(line):
                self._begun.setdefault(name, at)
            elif ends.search(line) and name in self._begun:
                self._add(name, self._begun[name], at)

    def _add(self, name: str, begin: float, end: float) -> None:
        first, last = self._found.get(name, (begin, end))
        self._found[name] = min(first, begin), max(last, end)
