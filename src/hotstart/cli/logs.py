"""The log: one writer, to stderr, as text for people or as JSON for collectors.

``logging`` costs 10 ms to import, so ``serve`` calls :func:`setup` after the engine was started;
what has to be said before is kept as notes. The engine does not write: its records travel to the
frontend, which logs them under their own names. A line about a request carries its id when logged
with ``extra={"request_id": …}``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hotstart.config.settings import LogConfig

_COLOURS = {"DEBUG": "\x1b[2m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}
_RESET = "\x1b[0m"
_OUR_NAMES = {
    "uvicorn": "hotstart.http",
    "uvicorn.error": "hotstart.http",
    "uvicorn.access": "hotstart.access",
}
"""The HTTP library's loggers as readers of the log know them; its ``error`` logs what is no error."""


class Stream(Protocol):
    """What the log needs of a file."""

    def write(self, text: str, /) -> object:
        """Take in some text."""

    def flush(self) -> object:
        """Pass it on."""

    def isatty(self) -> bool:
        """Whether a person reads along."""


def setup(config: LogConfig, stream: Stream | None = None) -> logging.Handler:
    """Send every logger to one handler on ``stream`` (default: stderr); returns the handler.

    Calling it again replaces the handler.
    """
    stream = sys.stderr if stream is None else stream
    formatter: logging.Formatter
    formatter = JsonFormatter() if config.log_format == "json" else TextFormatter(colour=_colour(stream))
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for before in [h for h in root.handlers if isinstance(h.formatter, (JsonFormatter, TextFormatter))]:
        root.removeHandler(before)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)  # libraries
    logging.getLogger("hotstart").setLevel(config.log_level.upper())
    uvicorn = "DEBUG" if config.uvicorn_log_level == "trace" else config.uvicorn_log_level.upper()
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(uvicorn)
    logging.getLogger("uvicorn.access").setLevel("WARNING" if config.disable_uvicorn_access_log else uvicorn)
    return handler


class TextFormatter(logging.Formatter):
    """``11-30 12:30:45.123 INFO  engine: message [request-id]``; colour for what is not INFO."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """One record, and its traceback on lines of its own."""
        clock = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created))
        level = "WARN" if record.levelname == "WARNING" else record.levelname
        name = _name(record).removeprefix("hotstart.")
        text = f"{clock}.{int(record.msecs):03d} {level:<5} {name}: {record.getMessage()}"
        if request := getattr(record, "request_id", ""):
            text += f" [{request}]"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        colour = _COLOURS.get(record.levelname, "") if self._colour else ""
        return f"{colour}{text}{_RESET}" if colour else text


class JsonFormatter(logging.Formatter):
    """One object a line: timestamp (UTC, RFC 3339), level, logger, message, request_id, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        also = {}
        if request := getattr(record, "request_id", ""):
            also["request_id"] = request
        if record.exc_info:
            also["traceback"] = self.formatException(record.exc_info)
        return json_line(record.levelname.lower(), record.getMessage(), _name(record), record.created, **also)


def _name(record: logging.LogRecord) -> str:
    return _OUR_NAMES.get(record.name, record.name)


def json_line(
    level: str, message: str, logger: str = "hotstart", created: float | None = None, **also: object
) -> str:
    """The form of a JSON log line; ``created`` in seconds since the epoch, None: now."""
    at = time.time() if created is None else created
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    entry = {
        "timestamp": f"{clock}.{int(at % 1 * 1000):03d}Z",
        "level": level,
        "logger": logger,
        "message": message,
        **also,
    }
    return json.dumps(entry, ensure_ascii=False)


def is_json() -> bool:
    """Whether the log is set up and written as JSON, which errors at the end must be too."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _colour(stream: Stream) -> bool:
    """See https://no-color.org."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
