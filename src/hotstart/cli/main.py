"""The door: find the command, import only that, print errors as people read them.

Exit codes: 0; 1 a defect; 2 to 6 as in :mod:`hotstart.errors`, the lowest when several problems are
found; 130 after Ctrl-C. What ``serve`` returns after signals is its own affair.
"""

from __future__ import annotations

import os
import sys

from hotstart.cli.output import discard_output, say
from hotstart.errors import ConfigError, EngineError, HotstartError, ProblemsFound

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

USAGE = """\
hotstart: from process start to the first token over HTTP in the least time the hardware permits

usage: hotstart COMMAND …

  serve MODEL            serve a model over an OpenAI-compatible HTTP API
  check MODEL            run the checks at the head of serve and report every problem
  bench startup MODEL    measure process start to first token, of hotstart or of another server
  bench serve            measure a running server, ours or another, under a load of requests
  bench latency MODEL    measure how long one batch takes, in this process
  bench throughput MODEL measure requests and tokens a second, in this process
  bench load MODEL       measure how fast loaders bring weights into memory, ours and others, side by side
  convert safetensors    write a model's weights anew, in files of another size
  convert sharded        write files for each rank, in vLLM's layout
  convert tensorizer     write files of the tensorizer library

  hotstart COMMAND --help    the flags of a command; --help=WORD: those with a word in their name
  hotstart --version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of the process); returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if None in (sys.stdin, sys.stdout, sys.stderr):
        _open_closed_streams()
    try:
        return _run(words)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `hotstart serve --help | head`
        discard_output()
        return 141
    except Exception as error:
        return explain(error, as_json=_json_wanted(words))


def explain(error: Exception, *, as_json: bool = False) -> int:
    """Print what ended a command, while it is being handled; returns the exit code."""
    from contextlib import suppress

    from hotstart.cli.limits import memory_limit

    limit = memory_limit(error)
    if limit and not isinstance(error, HotstartError):
        error = EngineError(f"memory could not be had: {type(error).__name__}: {error}")
    with suppress(OSError):  # the disk below the log is full: the exit code still counts
        if isinstance(error, HotstartError):
            print_error(error, as_json=as_json)
            if limit:
                print_error(EngineError(limit), as_json=as_json)
        else:
            _print_defect(as_json=as_json)
    return error.exit_code if isinstance(error, HotstartError) else 1


def print_error(error: HotstartError, *, as_json: bool = False) -> None:
    """One paragraph for each problem, its advice on a line of its own; to stderr.

    ``as_json``: one object for each problem, in the form of the log.
    """
    problems = error.problems if isinstance(error, ProblemsFound) else (error,)
    for problem in problems:
        if as_json:
            from hotstart.cli.logs import json_line

            line = json_line("error", str(problem), kind=problem.kind, exit_code=problem.exit_code)
            print(line, file=sys.stderr)
            continue
        print(f"hotstart: {problem.kind}: {problem.what}", file=sys.stderr)
        if problem.advice:
            print(f"  {problem.remedy}", file=sys.stderr)


def _print_defect(*, as_json: bool) -> None:
    import traceback

    text = "this is a defect of hotstart: please report it with the "
    if as_json:
        from hotstart.cli.logs import json_line

        print(
            json_line("critical", text + "traceback", traceback=traceback.format_exc(), exit_code=1),
            file=sys.stderr,
        )
    else:
        traceback.print_exc()
        print(f"hotstart: {text}lines above", file=sys.stderr)


def _open_closed_streams() -> None:
    """Whoever starts a process may close its streams; the next files opened would take their numbers."""
    while os.open(os.devnull, os.O_RDWR) <= 2:
        pass
    sys.stdin, sys.stdout, sys.stderr = (
        stream or open(number, mode)  # noqa: SIM115 - open for the life of the process
        for number, mode, stream in ((0, "r", sys.stdin), (1, "w", sys.stdout), (2, "w", sys.stderr))
    )


def _json_wanted(words: Sequence[str]) -> bool:
    """By the log as it is set up; before that, by the words, which may hold the very error."""
    logs = sys.modules.get("hotstart.cli.logs")
    if logs is not None and logs.is_json():
        return True
    line = " ".join(words).replace("_", "-")
    return "--log-format json" in line or "--log-format=json" in line


def _run(words: list[str]) -> int:
    first = words[0] if words else ""
    if first in ("", "help", "--help", "-h"):
        return _help(words[1:])
    if first in ("--version", "-V", "-v", "version"):
        from hotstart import __version__

        say(f"hotstart {__version__}")
        return 0
    for group in ("bench", "convert"):
        if words in ([group], [group, "--help"], [group, "-h"]):
            say("\n".join(line.strip() for line in USAGE.splitlines() if line.startswith(f"  {group} ")))
            return 0
    for name, run in COMMANDS.items():
        parts = name.split()
        if words[: len(parts)] == parts:
            return _with_help(run, words[len(parts) :])
    raise _unknown_command(words)


def _help(words: list[str]) -> int:
    """``hotstart help serve`` is ``hotstart serve --help``."""
    if not words:
        say(USAGE.rstrip())
        return 0
    return _run([*words, "--help"])


def _with_help(run: Callable[[list[str]], int], argv: list[str]) -> int:
    from hotstart.config.command import HelpWanted

    try:
        return run(argv)
    except HelpWanted as wanted:
        from hotstart.config.help import help_text

        say(help_text(wanted.command, wanted.topic).rstrip())
        return 0


def _serve(argv: list[str]) -> int:
    from hotstart.config.parse import parse_serve

    parsed = parse_serve(argv, os.environ)
    from hotstart.cli import serve

    return serve.run(parsed)


def _check(argv: list[str]) -> int:
    from hotstart.config.parse import parse_serve
    from hotstart.config.table import check_command

    parsed = parse_serve(argv, os.environ, command=check_command())
    explain = bool(parsed.values.pop("explain", False))  # of the command, not of the server
    from hotstart.cli import check

    return check.main(parsed.config, explain=explain)


def _bench_startup(argv: list[str]) -> int:
    from hotstart.bench import startup

    return startup.main(argv)


def _bench_serve(argv: list[str]) -> int:
    from hotstart.bench.serving import command

    return command.main(argv)


def _bench_latency(argv: list[str]) -> int:
    from hotstart.bench import latency

    return latency.main(argv)


def _bench_throughput(argv: list[str]) -> int:
    from hotstart.bench import throughput

    return throughput.main(argv)


def _bench_load(argv: list[str]) -> int:
    from hotstart.bench import load

    return load.main(argv)


def _convert(kind: str) -> Callable[[list[str]], int]:
    def run(argv: list[str]) -> int:
        from hotstart.cli import convert

        return convert.main(kind, argv)

    return run


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": _serve,
    "check": _check,
    "bench startup": _bench_startup,
    "bench serve": _bench_serve,
    "bench latency": _bench_latency,
    "bench throughput": _bench_throughput,
    "bench load": _bench_load,
    "convert safetensors": _convert("safetensors"),
    "convert sharded": _convert("sharded"),
    "convert tensorizer": _convert("tensorizer"),
}


def _unknown_command(words: list[str]) -> ConfigError:
    """Name the nearest command; a directory alone most likely misses ``serve``."""
    from difflib import get_close_matches

    first = words[0]
    tried = " ".join(words[:2]) if first in ("bench", "convert") else first
    near = get_close_matches(tried, COMMANDS, n=1, cutoff=0.5)
    if near:
        advice = f"Did you mean `hotstart {near[0]}`?"
    elif first[0] in "/.~" or "/" in first:
        advice = f"To serve a model: `hotstart serve {first}`"
    else:
        advice = "`hotstart --help` lists the commands"
    return ConfigError(f"there is no command {tried}", expected=", ".join(COMMANDS), advice=advice)
