"""``hotstart convert``: the flags of each kind, progress, and what a signal does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hotstart.cli.output import say
from hotstart.config.command import Command
from hotstart.config.flags import Group, Positional, flag
from hotstart.config.values import Choice, Number, Size, Text, Whole
from hotstart.units import format_rate, format_seconds, format_size, parse_size

if TYPE_CHECKING:
    from types import FrameType

    from hotstart.convert.job import Writer
    from hotstart.convert.origin import Origin
    from hotstart.convert.target import Target
    from hotstart.timeline import Timeline

_MEMORY_LIMIT = 256 << 20
_SHARD_SIZE = parse_size("4GB")
_SOURCE = Positional(
    "SRC", to="source", help="a directory, an address (s3://, gs://, az://, https://) or a name on the hub"
)
_DESTINATION = Positional(
    "DST",
    to="destination",
    help="a new directory, or an empty folder of an object store (s3://, gs://, az://)",
)
_COMMON = (
    Group(
        "Reading and writing",
        flag(
            "--memory-limit",
            to="memory_limit",
            kind=Size(1 << 20),
            help="bytes of weights in memory at once, beside one tensor where a format needs it whole; "
            "default: 256MiB",
        ),
        flag("--revision", to="revision", kind=Text("NAME"), help="branch, tag or commit on the hub"),
        flag(
            "--storage-timeout",
            to="storage_timeout",
            kind=Number(1),
            default=60.0,
            help="seconds without a byte after which a store is given up",
        ),
        flag("--cache-root", to="cache_root", kind=Text("PATH"), help="where small files of stores are kept"),
    ),
    Group(
        "Log",
        flag(
            "--log-format",
            to="log_format",
            kind=Choice("text", "json"),
            default="text",
            help="for people or for collectors",
        ),
    ),
)

_FILES = Group(
    "Files",
    flag(
        "--shard-size",
        to="shard_size",
        kind=Size(1),
        help="bytes of tensors that a file has at most; default: 4GB",
    ),
)

SAFETENSORS = Command(
    "convert safetensors",
    "Write a model's weights anew, in safetensors files of another size, with its small files and digests; "
    "files for ranks and Tensorizer files are joined.",
    (
        _FILES,
        Group(
            "Tensorizer",
            flag(
                "--decrypt",
                to="decrypt",
                kind=Text("KEYFILE"),
                help="decrypt the Tensorizer files of SRC with the 32 bytes of this file",
            ),
        ),
        *_COMMON,
    ),
    positional=_SOURCE,
    second=_DESTINATION,
)


_TENSOR_PARALLEL = flag(
    "--tensor-parallel-size",
    "-tp",
    to="tensor_parallel",
    kind=Whole(1, 64),
    default=1,
    help="ranks that share each layer",
)

SHARDED = Command(
    "convert sharded",
    "Write files for each rank, with vLLM's names: for --load-format sharded_state, of hotstart and of vLLM.",
    (
        Group(
            "Ranks",
            _TENSOR_PARALLEL,
            flag(
                "--pipeline-parallel-size",
                "-pp",
                to="pipeline_parallel",
                kind=Whole(1, 64),
                default=1,
                help="stages that share the layers",
            ),
        ),
        _FILES,
        *_COMMON,
    ),
    positional=_SOURCE,
    second=_DESTINATION,
)
TENSORIZER = Command(
    "convert tensorizer",
    "Write files of the tensorizer library, with vLLM's names: for --load-format tensorizer, of both.",
    (
        Group(
            "Files",
            _TENSOR_PARALLEL,
            flag(
                "--encrypt",
                to="encrypt",
                kind=Text("KEYFILE"),
                help="encrypt tensors with the 32 bytes of this file; whoever loads them needs it",
            ),
        ),
        *_COMMON,
    ),
    positional=_SOURCE,
    second=_DESTINATION,
)
COMMANDS = {"safetensors": SAFETENSORS, "sharded": SHARDED, "tensorizer": TENSORIZER}


class _Terminated(BaseException):
    """SIGTERM was received."""


def main(kind: str, argv: Sequence[str]) -> int:
    """Run a conversion. Raises ``HotstartError``; returns 143 after SIGTERM, as 0 after success."""
    command = COMMANDS[kind]
    values = command.parse(argv).values
    target: Target | None = None
    try:
        with _interruptible():
            target = _open_target(values)
            _run(kind, values, target)
    except BaseException as error:
        left = target.left if target is not None else ""
        if isinstance(error, _Terminated):
            print(f"hotstart: stopped on SIGTERM; {left or 'nothing was left behind'}", file=sys.stderr)
            return 143
        if left:
            print(f"hotstart: {left}", file=sys.stderr)
        raise
    return 0


def _open_target(values: dict[str, Any]) -> Target:
    from hotstart.convert.destination import open_target

    return open_target(
        values["destination"],
        environ=os.environ,
        patience=values["storage_timeout"],
        memory_limit=values.get("memory_limit", _MEMORY_LIMIT),
    )


def _run(kind: str, values: dict[str, Any], target: Target) -> None:
    from hotstart.cli import logs
    from hotstart.cli.progress import Progress, Screen
    from hotstart.config.settings import LogConfig
    from hotstart.timeline import Timeline

    screen = Screen(sys.stderr) if sys.stderr.isatty() and values["log_format"] == "text" else None
    logs.setup(LogConfig(log_format=values["log_format"]), screen)
    timeline = Timeline("convert")
    progress = Progress(timeline, screen=screen)
    progress.tabular = False  # a phase is a line here, not a row
    progress.start()
    try:
        target.check()
        writer = _writer(kind, values)  # a key that is none is found before anything is fetched
        origin = _open(kind, values, timeline)
        _write(kind, values, origin, target, writer, timeline)
    finally:
        progress.stop()
    done = next(phase for phase in timeline.phases() if phase.name == "write weights")
    seconds = done.seconds()
    say(
        f"{target.shown}: {len(target.digests)} files, {format_size(done.total)} of tensors in "
        f"{format_seconds(seconds)} ({format_rate(done.total, seconds)})"
    )


def _open(kind: str, values: dict[str, Any], timeline: Timeline) -> Origin:
    from hotstart.config import cache_root
    from hotstart.convert.origin import open_origin

    root = cache_root.resolve(values.get("cache_root"), os.environ)
    with timeline.phase("find model") as phase:

        def report(done: int, total: int) -> None:
            phase.total = total
            timeline.progress(phase, done)

        return open_origin(
            values["source"],
            environ=os.environ,
            cache=root.path if root.writable else "",
            patience=values["storage_timeout"],
            hub_cache=cache_root.hub_cache(root, os.environ),
            revision=values.get("revision"),
            report=report,
            keyfile=values.get("decrypt"),
            joins=kind == "safetensors",
        )


def _writer(kind: str, values: dict[str, Any]) -> Writer:
    if kind == "tensorizer":
        from hotstart.convert.tensorizer_files import tensorizer_writer

        return tensorizer_writer(values.get("encrypt"))
    from hotstart.convert.job import write_safetensors

    return write_safetensors


def _write(
    kind: str, values: dict[str, Any], origin: Origin, target: Target, writer: Writer, timeline: Timeline
) -> None:
    from hotstart.convert.job import convert

    if kind == "tensorizer":
        from hotstart.convert.tensorizer_files import plan_tensorizer

        plan = plan_tensorizer(origin, values["tensor_parallel"])
    elif kind == "sharded":
        from hotstart.convert.ranks import plan_ranks

        sizes = values["tensor_parallel"], values["pipeline_parallel"]
        plan = plan_ranks(origin, *sizes, values.get("shard_size", _SHARD_SIZE))
    else:
        from hotstart.convert.shards import plan_shards

        plan = plan_shards(origin.tensors, values.get("shard_size", _SHARD_SIZE))
    convert(
        origin,
        plan,
        target,
        writer=writer,
        timeline=timeline,
        memory_limit=values.get("memory_limit", _MEMORY_LIMIT) // 2,  # half is for what is uploaded
    )


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends a conversion as Ctrl-C does; a second signal does not end the tidying up."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise _Terminated if number == signal.SIGTERM else KeyboardInterrupt

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
