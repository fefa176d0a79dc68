"""``hotstart bench startup``: from process start to the first streamed token, against the floor.

Each round measures everything once, one after another, so that a slow minute of the machine slows
all of it: ``python -c "import torch"``, the floor, the server, and the other server if one is
named. Ratios are taken inside the run, between medians.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hotstart.bench import pagecache
from hotstart.bench.client import CHAT, COMPLETIONS, Target
from hotstart.bench.floor import Floor, import_torch, measure_floor, measure_read
from hotstart.bench.launch import Server, Start, free_port, observe, split_command
from hotstart.config.command import Command
from hotstart.config.flags import Group, Positional, flag
from hotstart.config.paths import absolute
from hotstart.config.values import Choice, Number, Switch, Text, Whole
from hotstart.errors import ConfigError, EngineError
from hotstart.storage.location import is_location, shown

WARM, COLD, COLD_NODE = "warm", "cold", "cold-node"

STARTUP = Command(
    "bench startup",
    "Measure a start: process start, port, ready, first streamed token, and their share of the floor.",
    (
        Group(
            "What to start",
            flag(
                "--command",
                to="command",
                kind=Text("COMMAND"),
                help="another server to measure in the same run",
            ),
            flag("--port", to="port", kind=Whole(1, 65535), help="where the server of --command listens"),
            flag(
                "--served-model-name",
                to="served_model_name",
                kind=Text("NAME"),
                help="the name that the server of --command serves; default: what its /v1/models lists",
            ),
        ),
        Group(
            "How to measure",
            flag(
                "--cache",
                to="cache",
                kind=Choice(WARM, COLD, COLD_NODE, "both"),
                default=WARM,
                help="page cache: holds the model; without the model; without the model and the libraries; "
                "both is warm and cold",
            ),
            flag(
                "--iterations", to="iterations", kind=Whole(1), default=5, help="rounds; medians are printed"
            ),
            flag(
                "--endpoint",
                to="endpoint",
                kind=Choice(COMPLETIONS, CHAT),
                default=COMPLETIONS,
                help="what the first request asks",
            ),
            flag(
                "--after-ready",
                to="after_ready",
                kind=Switch(),
                default=False,
                help="send the first request when the server says ready, not as soon as the port accepts",
            ),
            flag(
                "--details",
                to="details",
                kind=Switch(),
                default=False,
                help="one more start for peak memory and for the CPU time of an idle server",
            ),
            flag("--timeout", to="timeout", kind=Number(1), default=900.0, help="seconds one start may take"),
        ),
        Group(
            "Output",
            flag("--json", to="json", kind=Text("FILE"), help="write every number of every round"),
            flag("--png", to="png", kind=Text("FILE"), help="draw the phases (needs hotstart[plot])"),
        ),
    ),
    positional=Positional("MODEL", to="model", help="a model directory", required=False),
    takes_rest="flags of `hotstart serve`",
)


@dataclass
class Runs:
    """What was measured in one state of the page cache, a value for each round."""

    state: str
    resident: list[float | None] = field(default_factory=list)
    """Share of the weights that the page cache held just before each start; None: cannot be known."""
    imports: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    """The best plain parallel read; only where the cache is cold."""
    floors: list[Floor] = field(default_factory=list)
    starts: dict[str, list[Start]] = field(default_factory=dict)
    details: dict[str, Start] = field(default_factory=dict)


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ``HotstartError``."""
    arguments = STARTUP.parse(argv)
    values = arguments.values
    model = _directory(values.get("model"))
    if values.get("png"):
        from hotstart.bench.waterfall import require_pillow

        require_pillow()
    servers = _servers(values, model, arguments.rest)
    states = (WARM, COLD) if values["cache"] == "both" else (values["cache"],)
    gpu = "" if not model else _gpu(arguments.rest)
    results = [Runs(state) for state in states]
    for number in range(values["iterations"]):
        for runs in results:
            print(f"round {number + 1} of {values['iterations']}, {runs.state} page cache", file=sys.stderr)
            _round(runs, servers, model, gpu)
    if values["details"]:
        for server in servers:
            results[0].details[server.name] = observe(server, memory=True, idle_seconds=10.0)
    _report(values, results, model)
    return 0


def _report(values: dict[str, object], results: list[Runs], model: str) -> None:
    from hotstart.bench import report
    from hotstart.cli.output import say
    from hotstart.config.output_file import write_output

    for runs in results:
        say(report.table(runs, model))
    if path := values.get("json"):
        write_output("--json", str(path), report.as_json(results, model).encode())
    if path := values.get("png"):
        from hotstart.bench.waterfall import draw

        write_output("--png", str(path), draw(results))


def _directory(model: str | None) -> str:
    """The model's directory; empty when only ``--command`` is given."""
    if not model:
        return ""
    if is_location(model):
        raise ConfigError(
            f"{shown(model)} lies in a store, whose bytes cannot be evicted here nor read for the floor",
            expected="a model directory",
            advice="Measure such a start without the floor: `hotstart bench startup --port 8001 --command "
            f"'hotstart serve {shown(model)} --port 8001'`",
        )
    path = absolute(model)
    if not os.path.isdir(path):
        raise ConfigError(
            f"{model} is no directory",
            expected="a model directory: the benchmark must be able to evict and read its files",
            advice="download the model once with `hotstart serve NAME`, then pass its directory",
        )
    return path


def _servers(values: dict[str, object], model: str, serve_flags: Sequence[str]) -> list[Server]:
    command, port = str(values.get("command") or ""), values.get("port")
    if not model and not command:
        raise ConfigError("neither MODEL nor --command is given", advice="name what to start")
    if bool(command) != bool(port):
        raise ConfigError("--command and --port belong together", advice="give both: the port it listens on")
    servers = []
    if model:
        servers.append(_ours(values, model, serve_flags))
    if command and isinstance(port, int):
        argv = split_command(command)
        name = str(values.get("served_model_name") or "")
        target = Target("127.0.0.1", port, str(values["endpoint"]), name)
        servers.append(Server(argv[0] if argv[0] != "env" else "other server", argv, target, *_pace(values)))
    return servers


def _ours(values: dict[str, object], model: str, serve_flags: Sequence[str]) -> Server:
    port = free_port()
    script = Path(sys.executable).with_name("hotstart")
    program = (str(script),) if script.exists() else (sys.executable, "-m", "hotstart")
    argv = (*program, "serve", model, "--port", str(port), *serve_flags)
    target = Target("127.0.0.1", port, str(values["endpoint"]), _served_name(serve_flags) or model)
    return Server("hotstart", argv, target, *_pace(values))


def _served_name(serve_flags: Sequence[str]) -> str:
    """The name that flags of ``serve`` give the model; empty: they do not."""
    return _value_of("--served-model-name", serve_flags)


def _gpu(serve_flags: Sequence[str]) -> str:
    """The GPU that the server will take, whose floor is another; empty: it runs on the CPU."""
    from hotstart.device.choose import choose

    choice = choose(_value_of("--device", serve_flags) or "auto")
    return "" if choice.kind == "cpu" else choice.torch_name


def _value_of(flag: str, words: Sequence[str]) -> str:
    """The value of a flag among words of a command line; empty: it is not there."""
    arguments = [part for word in words for part in word.split("=", 1)]
    return arguments[arguments.index(flag) + 1] if flag in arguments[:-1] else ""


def _pace(values: dict[str, object]) -> tuple[bool, float]:
    return not values["after_ready"], float(str(values["timeout"]))


def _round(runs: Runs, servers: list[Server], model: str, gpu: str) -> None:
    """Everything once; the page cache is put into its state before each of them."""
    files = pagecache.model_files(model) if model else []
    _prepare(runs.state, files)
    runs.imports.append(import_torch())
    how = "map"
    if model and runs.state != WARM:
        seconds, how = min(_cold_reads(runs.state, files, model))
        runs.reads.append(seconds)
    if model:
        _prepare(runs.state, files)
        runs.floors.append(measure_floor(model, "arena", gpu) if gpu else measure_floor(model, how))
    for server in servers:
        _prepare(runs.state, files)
        if files:
            runs.resident.append(pagecache.resident_share(f for f in files if f.endswith(".safetensors")))
        runs.starts.setdefault(server.name, []).append(observe(server))


def _cold_reads(state: str, files: list[str], model: str) -> Iterator[tuple[float, str]]:
    """Seconds of each plain way to read the weights; some file systems have no direct reads."""
    for how in ("buffered", "direct"):
        _prepare(state, files)
        try:
            yield measure_read(model, how), how
        except EngineError:
            if how == "buffered":
                raise


def _prepare(state: str, files: list[str]) -> None:
    if state == WARM:
        pagecache.warm(files)
        return
    pagecache.evict_all(files)
    if state == COLD_NODE and not pagecache.drop_everything():
        pagecache.evict_all(pagecache.library_files())
