"""``hotstart bench startup``: from process start to the first streamed token, against the floor.

Each round measures everything once, one after another, so that a slow minute of the machine slows
all of it: ``python -c "import torch"``, the floor, and each server, another one first in every
round. Ratios are taken inside the run, between medians.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotstart.bench import compare, first_minute, pagecache
from hotstart.bench.client import CHAT, COMPLETIONS, Target
from hotstart.bench.floor import Floor, import_torch, measure_floor, measure_read
from hotstart.bench.launch import Server, Start, free_port, observe
from hotstart.bench.output import check_outputs
from hotstart.config.command import Command
from hotstart.config.flags import Group, Positional, flag
from hotstart.config.paths import absolute
from hotstart.config.values import Choice, Number, Repeated, Switch, Text, Whole
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
                "--compare",
                to="compare",
                kind=Repeated(Text("COMMAND")),
                default=(),
                help="a command that starts a server, measured in turns with the others; may be given "
                "several times; {port} in it becomes a free port",
            ),
            flag(
                "--served-model-name",
                to="served_model_name",
                kind=Text("NAME"),
                help="the name that the servers of --compare serve; default: what the command says, else "
                "what /v1/models lists",
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
                help="one more start for peak memory by PSS and for the CPU time of an idle server",
            ),
            flag(
                "--first-minute",
                to="first_minute",
                kind=Switch(),
                default=False,
                help="one more start in each state of the page cache: tokens a second in the minute after "
                "the first token, under a small load",
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
    kept: dict[str, float] = field(default_factory=dict)
    """By weight file, the greatest share that the page cache held just before any start."""
    imports: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    """The best plain parallel read; only where the cache is cold."""
    floors: list[Floor] = field(default_factory=list)
    starts: dict[str, list[Start]] = field(default_factory=dict)
    minutes: dict[str, first_minute.FirstMinute] = field(default_factory=dict)
    details: dict[str, Start] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """What ended the measurement of a server before its time."""


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    model: str
    """The directory whose floor is measured; empty: there is none."""
    files: list[str]
    """What is read or evicted before each start."""
    servers: list[Server]
    gpu: str = ""
    """Where the floor's weights go, if not to the CPU."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ``HotstartError``."""
    arguments = STARTUP.parse(argv)
    values = arguments.values
    plan = _plan(values, arguments.rest)
    if values.get("png"):
        from hotstart.bench.waterfall import require_pillow

        require_pillow()
    check_outputs({"--json": values.get("json"), "--png": values.get("png")})
    states = (WARM, COLD) if values["cache"] == "both" else (values["cache"],)
    results = [Runs(state) for state in states]
    interrupted = False
    try:
        _measure(values, results, plan)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted; these are the rounds that were complete", file=sys.stderr)
    measured = [runs for runs in results if any(runs.starts.values())]
    if measured:
        _report(values, measured, plan)
    for problem in {name: text for runs in results for name, text in runs.failed.items()}.values():
        print(f"hotstart: {problem}", file=sys.stderr)
    failed = any(runs.failed for runs in results)
    return 130 if interrupted else EngineError.exit_code if failed else 0


def _measure(values: dict[str, Any], results: list[Runs], plan: Plan) -> None:
    for number in range(values["iterations"]):
        for runs in results:
            print(f"round {number + 1} of {values['iterations']}, {runs.state} page cache", file=sys.stderr)
            _round(runs, plan, first=number)
    for runs in results if values["first_minute"] else ():
        for server in _able(runs, plan):
            print(f"first minute of {server.name}, {runs.state} page cache", file=sys.stderr)
            _prepare(runs.state, plan.files)
            start = _observe(runs, plan, server, load_seconds=first_minute.SECONDS)
            if start is not None and start.minute is not None:
                runs.minutes[server.name] = start.minute
    for server in _able(results[0], plan) if values["details"] else ():
        print(f"details of {server.name}", file=sys.stderr)
        start = _observe(results[0], plan, server, memory=True, idle_seconds=10.0)
        if start is not None:
            results[0].details[server.name] = start


def _report(values: dict[str, Any], results: list[Runs], plan: Plan) -> None:
    from hotstart.bench import report
    from hotstart.cli.output import say
    from hotstart.config.output_file import write_output

    for runs in results:
        say(report.table(runs, plan.model))
    say("\n".join(["", *(f"{server.name}: {compare.shown(server.argv)}" for server in plan.servers)]))
    if path := values.get("json"):
        write_output("--json", str(path), report.as_json(results, plan).encode())
    if path := values.get("png"):
        from hotstart.bench.waterfall import draw

        write_output("--png", str(path), draw(results, os.path.basename(plan.model)))


def _plan(values: dict[str, Any], serve_flags: Sequence[str]) -> Plan:
    """Raises ``ConfigError`` for what cannot be measured."""
    model = _directory(values.get("model"))
    commands = [compare.parsed(text) for text in values["compare"]]
    if not model and not commands:
        raise ConfigError("neither MODEL nor --compare is given", advice="Name what to start")
    targets = [
        (argv, port, values.get("served_model_name") or compare.served_name(argv)) for argv, port in commands
    ]
    if model:
        targets.insert(0, _ours(model, serve_flags))
    named = compare.names([(argv, port) for argv, port, _ in targets])
    early, timeout = not values["after_ready"], float(values["timeout"])
    servers = [
        Server(name, argv, Target("127.0.0.1", port, values["endpoint"], served), early, timeout)
        for name, (argv, port, served) in zip(named, targets, strict=True)
    ]
    every = [server.argv for server in servers]
    model = model or compare.model_directory(every)
    files = {file for argv in every for file in compare.model_files(argv)}
    files.update(pagecache.model_files(model) if model else ())
    return Plan(model, sorted(files), servers, _gpu(serve_flags) if model else "")


def _directory(model: str | None) -> str:
    """The model's directory; empty when only ``--compare`` is given."""
    if not model:
        return ""
    if is_location(model):
        raise ConfigError(
            f"{shown(model)} lies in a store, whose bytes cannot be evicted here nor read for the floor",
            expected="a model directory",
            advice="Measure such a start without the floor: `hotstart bench startup --compare "
            f"'hotstart serve {shown(model)} --port {compare.PORT}'`",
        )
    path = absolute(model)
    if not os.path.isdir(path):
        raise ConfigError(
            f"{model} is no directory",
            expected="a model directory: the benchmark must be able to evict and read its files",
            advice="download the model once with `hotstart serve NAME`, then pass its directory",
        )
    return path


def _ours(model: str, serve_flags: Sequence[str]) -> tuple[tuple[str, ...], int, str]:
    port = free_port()
    script = Path(sys.executable).with_name("hotstart")
    program = (str(script),) if script.exists() else (sys.executable, "-m", "hotstart")
    argv = (*program, "serve", model, "--port", str(port), *serve_flags)
    return argv, port, compare.served_name(argv)


def _gpu(serve_flags: Sequence[str]) -> str:
    """The GPU that the server will take, whose floor is another; empty: it runs on the CPU."""
    from hotstart.device.choose import choose

    choice = choose(compare.value_of(("--device",), serve_flags) or "auto")
    return "" if choice.kind == "cpu" else choice.torch_name


def _round(runs: Runs, plan: Plan, *, first: int) -> None:
    """Everything once; the page cache is put into its state before each of them."""
    _prepare(runs.state, plan.files)
    imported = import_torch()
    if plan.model:
        how = "map"
        if runs.state != WARM:
            seconds, how = min(_cold_reads(runs.state, plan))
            runs.reads.append(seconds)
        _prepare(runs.state, plan.files)
        floor = measure_floor(plan.model, "arena", plan.gpu) if plan.gpu else measure_floor(plan.model, how)
        runs.floors.append(floor)
    runs.imports.append(imported)
    turn = first % len(plan.servers)
    for server in plan.servers[turn:] + plan.servers[:turn]:
        if server in _able(runs, plan):
            _start(runs, plan, server)


def _start(runs: Runs, plan: Plan, server: Server) -> None:
    """One start, and what the page cache held of the weights just before it."""
    _prepare(runs.state, plan.files)
    weights = [file for file in plan.files if file.endswith((".safetensors", ".gguf"))]
    if weights:
        runs.resident.append(pagecache.resident_share(weights))
        for file, share in pagecache.resident_shares(weights).items():
            runs.kept[file] = max(share, runs.kept.get(file, 0.0))
    start = _observe(runs, plan, server)
    if start is None:
        return
    # In the order of the plan, whoever came first in the first round.
    runs.starts.setdefault(server.name, []).append(start)
    order = [each.name for each in plan.servers]
    runs.starts = dict(sorted(runs.starts.items(), key=lambda item: order.index(item[0])))


def _observe(runs: Runs, plan: Plan, server: Server, **how: Any) -> Start | None:
    """None: it failed, which ends the measurement of this server, but not what there is to report."""
    try:
        return observe(server, **how)
    except EngineError as error:
        if len(plan.servers) == 1 and not runs.starts:
            raise
        runs.failed[server.name] = str(error)
        print(f"{server.name} failed and is left out from here on", file=sys.stderr)
        return None


def _able(runs: Runs, plan: Plan) -> list[Server]:
    """The servers that have not failed."""
    return [server for server in plan.servers if server.name not in runs.failed]


def _cold_reads(state: str, plan: Plan) -> Iterator[tuple[float, str]]:
    """Seconds of each plain way to read the weights; some file systems have no direct reads."""
    for how in ("buffered", "direct"):
        _prepare(state, plan.files)
        try:
            yield measure_read(plan.model, how), how
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
