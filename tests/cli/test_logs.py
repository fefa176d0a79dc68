from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from hotstart.cli import logs
from hotstart.config.settings import LogConfig


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    names = [None, "hotstart", "uvicorn", "uvicorn.error", "uvicorn.access"]
    levels = {name: logging.getLogger(name).level for name in names}
    handlers = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def written(stream: io.StringIO | None = None, **config: object) -> tuple[io.StringIO, logging.Logger]:
    stream = io.StringIO() if stream is None else stream
    logs.setup(LogConfig(**config), stream)  # type: ignore[arg-type]
    return stream, logging.getLogger("hotstart.engine")


def test_a_text_line_has_day_time_level_room_and_message() -> None:
    stream, log = written()
    log.info("read %d files", 6)
    assert re.fullmatch(r"\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO  engine: read 6 files\n", stream.getvalue())


def test_a_json_line_is_one_object() -> None:
    stream, log = written(log_format="json")
    log.warning('two\nlines and a "quote"', extra={"request_id": "cmpl-1"})
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry.pop("timestamp"))
    assert entry == {
        "level": "warning",
        "logger": "hotstart.engine",
        "message": 'two\nlines and a "quote"',
        "request_id": "cmpl-1",
    }


def test_a_line_about_a_request_carries_its_id() -> None:
    stream, log = written()
    log.info("finished", extra={"request_id": "cmpl-1"})
    assert stream.getvalue().endswith("finished [cmpl-1]\n")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_is_kept(log_format: str) -> None:
    stream, log = written(log_format=log_format)
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    assert "ValueError: broken" in stream.getvalue()


def test_the_level_cuts_ours_and_libraries_speak_from_warning_on() -> None:
    stream, log = written(log_level="warning")
    log.info("quiet")
    logging.getLogger("somelibrary").info("quiet")
    logging.getLogger("somelibrary").warning("loud")
    assert [line.split(": ")[1] for line in stream.getvalue().splitlines()] == ["loud"]


def test_the_access_log_can_be_turned_off() -> None:
    stream, _ = written(uvicorn_log_level="info")
    logging.getLogger("uvicorn.access").info("GET /health")
    written(stream, uvicorn_log_level="info", disable_uvicorn_access_log=True)
    logging.getLogger("uvicorn.access").info("GET /metrics")
    assert "GET /health" in stream.getvalue()
    assert "GET /metrics" not in stream.getvalue()


def test_setting_up_twice_keeps_one_writer() -> None:
    stream, _ = written()
    _, log = written(stream)
    log.info("once")
    assert stream.getvalue().count("once") == 1


def test_colour_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal, log = written(Terminal())
    log.warning("careful")
    assert terminal.getvalue().startswith("\x1b[33m")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, log = written(Terminal())
    log.warning("careful")
    assert "\x1b" not in terminal.getvalue()


@pytest.mark.parametrize(
    ("library", "ours"),
    [("uvicorn.error", "hotstart.http"), ("uvicorn.access", "hotstart.access"), ("asyncio", "asyncio")],
)
def test_lines_of_the_http_library_bear_our_names(library: str, ours: str) -> None:
    for log_format in ("json", "text"):
        stream, _ = written(log_format=log_format, uvicorn_log_level="info")
        logging.getLogger(library).warning("seen")
        line = stream.getvalue()
        if log_format == "json":
            assert json.loads(line)["logger"] == ours
        else:
            assert line.endswith(f" {ours.removeprefix('hotstart.')}: seen\n")
