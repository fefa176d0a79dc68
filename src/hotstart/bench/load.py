"""``hotstart bench load``: loaders side by side, over the same bytes, in one run.

Each measurement is a process of its own, and each round runs every loader once, beginning with
another one each time, so that a slow minute of the machine slows all of them. Imports do not count;
one byte of every page of every tensor is read within the time, so that a lazy loader pays for its
pages; a checksum of these bytes must be the same for all. Into a GPU the time ends when the device has
nothing left to do, and these bytes are copied back afterwards.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from hotstart.bench import pagecache
from hotstart.bench.load_children import run_once, run_together
from hotstart.bench.load_formats import PLAIN_FORMAT, described, format_of, open_model
from hotstart.bench.load_libraries import convert_for_tensorizer
from hotstart.bench.load_loader import Measurement, Task
from hotstart.bench.load_loaders import NAMED, READERS
from hotstart.bench.load_local import OURS
from hotstart.bench.load_readers import first_hole
from hotstart.bench.load_remote import CEILING
from hotstart.checkpoint.base import Checkpoint
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.config.command import Command
from hotstart.config.flags import Group, Positional, flag
from hotstart.config.output_file import check_output, write_output
from hotstart.config.values import Choice, Many, Number, Text, Whole
from hotstart.device.choose import DeviceChoice, choose
from hotstart.device.host import cores
from hotstart.errors import ConfigError, EngineError, HotstartError, raise_all
from hotstart.storage.location import is_location, scheme_of
from hotstart.units import format_size

WARM, COLD, STORE = "warm", "cold", "object store"
_FINALISTS = 3
"""Of the plain readers: as many go on after the first round."""
_TOGETHER, _CONTEXT = 12, 1 << 30
"""Processes of a GPU's round that import at once, and bytes that each has there: imports outlast loads."""

_NAME = Choice(*NAMED)
_NAME.metavar = "NAME"

LOAD = Command(
    "bench load",
    "Measure loaders side by side: the same bytes into memory, and their share of what plain readers get.",
    (
        Group(
            "What to measure",
            flag(
                "--loader",
                to="loaders",
                kind=Many(_NAME),
                help=f"some of {', '.join(NAMED)}; default: each that is installed and can read from there",
            ),
            flag(
                "--device",
                to="device",
                kind=Text("DEVICE"),
                default="cpu",
                help="where the tensors are to lie: cpu, cuda or cuda:N",
            ),
            flag(
                "--cache",
                to="cache",
                kind=Choice(WARM, COLD, "both"),
                default=WARM,
                help="page cache of a directory's files: holds them, or does not",
            ),
            flag(
                "--iterations", to="iterations", kind=Whole(1), default=5, help="rounds; medians are printed"
            ),
            flag("--timeout", to="timeout", kind=Number(1), default=900.0, help="seconds one load may take"),
        ),
        Group(
            "Output",
            flag("--json", to="json", kind=Text("FILE"), help="write every number of every round"),
            flag("--png", to="png", kind=Text("FILE"), help="draw the rates (needs hotstart[plot])"),
        ),
    ),
    positional=Positional(
        "MODEL", to="model", help="a model directory, or its address in an object store or on a web server"
    ),
)


class Subject(Struct, frozen=True):
    """What is loaded."""

    location: str
    medium: str
    """Mount, file system and device; or endpoint, region and source of credentials."""
    files: list[tuple[str, int]]
    names: list[str]
    small_files: str = ""
    device: DeviceChoice | None = None
    """Where its tensors are to lie; None: in memory."""
    format: str = PLAIN_FORMAT
    """See :mod:`hotstart.bench.load_formats`."""
    found: str = ""
    """The format for people; empty: a plain checkpoint."""

    @property
    def kind(self) -> str:
        """Of the device."""
        return "cpu" if self.device is None else self.device.kind

    @property
    def scheme(self) -> str:
        """``file`` or that of the address."""
        return "file" if not self.small_files else scheme_of(self.location)

    @property
    def paths(self) -> list[str]:
        """Of the files."""
        return [path for path, _ in self.files]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size in self.files)


class Runs(Struct):
    """What was measured in one state of the page cache, a value for each round."""

    state: str
    loaders: dict[str, list[Measurement]] = {}
    plain: dict[str, list[Measurement]] = {}
    """Readers with nothing around them; after the first round only the fastest go on."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ``HotstartError``; that of wrong bytes after the report."""
    arguments = LOAD.parse(argv)
    values = arguments.values
    if values.get("png"):
        from hotstart.bench.waterfall import require_pillow

        require_pillow()
    for name in ("json", "png"):
        if path := values.get(name):
            check_output(f"--{name}", str(path))
    device = choose(str(values["device"]))
    subject = _remote(values["model"]) if is_location(values["model"]) else _local(values["model"])
    if device.kind != "cpu":
        subject = replace(subject, device=device)
    if subject.small_files and "cache" in arguments.given:
        raise ConfigError(
            f"--cache {values['cache']} does not apply to {subject.location}",
            advice="What a store's servers hold in memory is theirs: leave the flag out",
        )
    chosen, left_out = choose_loaders(
        subject.scheme, values.get("loaders", ()), kind=subject.kind, model_format=subject.format
    )
    states = [STORE] if subject.small_files else _states(str(values["cache"]))
    results = [Runs(state) for state in states]
    with ExitStack() as stack:
        needs = subject.format == PLAIN_FORMAT and "tensorizer" in chosen
        converted = ""
        if needs:
            try:
                converted = _convert(subject, stack)
            except Exception as error:  # the others are measured all the same
                chosen.remove("tensorizer")
                left_out["tensorizer"] = f"its copy cannot be made: {type(error).__name__}: {error}"
        for number in range(values["iterations"]):
            for runs in results:
                print(f"round {number + 1} of {values['iterations']}, {runs.state}", file=sys.stderr)
                _round(runs, subject, _turned(chosen, number), converted, float(values["timeout"]))
    wrong = [line for runs in results for line in mark_different(runs)]
    _report(values, results, subject, left_out)
    if wrong:
        raise EngineError(
            f"Not all loaders brought the same bytes: {'; '.join(wrong)}",
            expected="the checksum of a plain read of the files",
            advice="Report it to whoever makes the loader; if the files were being written, measure again",
        )
    return 0


def choose_loaders(
    scheme: str, named: Sequence[str], *, kind: str = "cpu", model_format: str = PLAIN_FORMAT
) -> tuple[list[str], dict[str, str]]:
    """Those to measure, and the reasons of those that are left out. Raises ConfigError for a wrong name.

    ``kind``: of the device.
    """

    def wrong(name: str) -> str:
        loader = NAMED[name]
        if scheme not in loader.schemes:
            return f"does not read from {scheme}://" if scheme != "file" else "reads no files"
        if kind not in loader.devices:
            return f"does not load into {'an NVIDIA GPU' if kind == 'cuda' else 'memory'}"
        return "" if model_format in loader.formats else f"does not read the format {model_format}"

    right = [name for name in NAMED if not wrong(name)]
    problems: list[HotstartError] = [
        ConfigError(f"--loader {name} {wrong(name)}", expected=", ".join(right))
        for name in named
        if wrong(name)
    ]
    raise_all(problems)
    chosen, left_out = [], {}
    for name in right:
        loader = NAMED[name]
        if named and name not in named:
            continue
        if command := loader.absent:
            left_out[name] = f"not installed; {command}"
        elif loader.on_request and not named and model_format == PLAIN_FORMAT:
            left_out[name] = loader.on_request
        elif name.startswith(f"{OURS}-") and not named:
            continue
        else:
            chosen.append(name)
    return chosen, {name: why for name, why in left_out.items() if not name.startswith(f"{OURS}-")}


def mark_different(runs: Runs) -> list[str]:
    """Turn loads whose bytes are not those of the plain readers into errors; a line for each such loader."""
    everything = [*runs.plain.items(), *runs.loaders.items()]
    whole = [m for _, measured in everything for m in measured if not m.error]
    wrong = []
    for name, measured in everything:
        for number, each in enumerate(measured):
            if not each.error and each.digest != whole[0].digest:
                error = f"other bytes: checksum {each.digest}, not {whole[0].digest}"
                measured[number] = replace(each, error=error)
                wrong.append(f"{name} ({runs.state}): {error}")
    return list(dict.fromkeys(wrong))


def _local(model: str) -> Subject:
    from hotstart.storage.mounts import mount_of

    path = os.path.abspath(os.path.expanduser(model))
    if not os.path.isdir(path):
        raise ConfigError(
            f"{model} is no directory",
            expected="a model directory, or an address such as s3://bucket/model",
            advice="Download the model once with `hotstart serve NAME`, then pass its directory",
        )
    model_format = format_of(path)
    checkpoint = open_model(path, model_format)
    problems: list[HotstartError] = []
    for file in checkpoint.files:
        hole = first_hole(file.path)
        if hole < file.size:
            problems.append(
                ConfigError(
                    f"{file.path} is sparse: nothing is stored from byte {hole} on",
                    expected="files whose every byte lies on the storage",
                    advice="Reading holes measures nothing: write the file out (cp --sparse=never)",
                )
            )
    raise_all(problems)
    mount = mount_of(path)
    medium = mount.describe() if mount is not None else "an unknown file system"
    subject = _subject(checkpoint, path, medium)
    return replace(subject, format=model_format, found=described(path, model_format))


def _remote(model: str) -> Subject:
    from hotstart.checkpoint.remote import ObjectFolder, fetch_small_files, open_store
    from hotstart.config import cache_root

    store = open_store(model, environ=os.environ, patience=60.0)
    root = cache_root.resolve(None, os.environ)
    small_files = fetch_small_files(store, root.path if root.writable else "")
    checkpoint = open_checkpoint(ObjectFolder(store, small_files))
    store.close()
    return _subject(checkpoint, model, store.settings.described, small_files)


def _subject(checkpoint: Checkpoint, location: str, medium: str, small_files: str = "") -> Subject:
    files = [(file.path, file.size) for file in checkpoint.files]
    return Subject(location, medium, files, sorted(checkpoint.tensors), small_files)


def _states(cache: str) -> list[str]:
    return [WARM, COLD] if cache == "both" else [cache]


def _turned(names: list[str], number: int) -> list[str]:
    """Nobody always comes after the same neighbour's memory and writes."""
    at = number % len(names) if names else 0
    return names[at:] + names[:at]


def _convert(subject: Subject, stack: ExitStack) -> str:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hotstart-bench-"))
    target = os.path.join(folder, "model.tensors")
    print(f"converting {format_size(subject.nbytes)} for tensorizer to {target}", file=sys.stderr)
    convert_for_tensorizer(subject.paths, target)
    return target


def _round(runs: Runs, subject: Subject, names: list[str], converted: str, timeout: float) -> None:
    """Everything once; the page cache is in its state before each of them."""
    plain = [] if subject.small_files else _finalists(runs, subject.kind)
    tasks = [_task(name, runs, subject, converted) for name in (*plain, *names)]
    for task, measured in zip(tasks, _measured(tasks, runs, subject, timeout), strict=True):
        if task.converted and not measured.error:
            notes = filter(None, (measured.note, _of_copy(converted, runs.state)))
            measured = replace(measured, note="; ".join(notes))
        rows = runs.plain if task.loader in READERS else runs.loaders
        rows.setdefault(task.loader, []).append(measured)


def _task(name: str, runs: Runs, subject: Subject, converted: str) -> Task:
    copy = converted if name == "tensorizer" else ""
    return Task(
        name,
        subject.location,
        subject.files,
        subject.names,
        paths=[] if subject.small_files else [copy] if copy else subject.paths,
        evict=runs.state == COLD,
        small_files=subject.small_files,
        converted=copy,
        device="cpu" if subject.device is None else subject.device.torch_name,
        format=subject.format,
    )


def _measured(tasks: list[Task], runs: Runs, subject: Subject, timeout: float) -> Iterable[Measurement]:
    def warm(task: Task) -> None:
        if runs.state == WARM and pagecache.resident_share(task.paths) != 1.0:
            pagecache.warm(task.paths)

    if subject.device is None:
        for task in tasks:
            warm(task)
            yield run_once(task, timeout)
        return
    # Some loaders hold everything twice for a while.
    room = int(0.9 * subject.device.info.total - 2.2 * subject.nbytes) // _CONTEXT
    together = max(1, min(_TOGETHER, cores(), room))
    for begin in range(0, len(tasks), together):
        yield from run_together(tasks[begin : begin + together], timeout, warm)


def _of_copy(converted: str, state: str) -> str:
    """What is to be known of a file that was written for this run."""
    from hotstart.storage.mounts import mount_of

    mount = mount_of(converted)
    note = "a copy converted for this run" + (f", on {mount.describe()}" if mount is not None else "")
    if state == COLD:
        note += "; it is new: the host of a virtual machine may still hold in memory what was evicted here"
    return note


def _finalists(runs: Runs, kind: str) -> list[str]:
    """All plain readers in the first round, then those that were fastest in it."""
    if not runs.plain:
        return [name for name, reader in READERS.items() if kind in reader.devices]
    first = {name: measured[0].seconds for name, measured in runs.plain.items() if not measured[0].error}
    return sorted(first, key=lambda name: first[name])[:_FINALISTS]


def ceiling(runs: Runs) -> tuple[str, float] | None:
    """The fastest plain reader that went on to the last round, and its median seconds."""
    rows = runs.plain or {name: rows for name, rows in runs.loaders.items() if name == CEILING}
    longest = max((len(measured) for measured in rows.values()), default=0)
    medians = [
        (median(m.seconds for m in measured), name)
        for name, measured in rows.items()
        if len(measured) == longest and not any(m.error for m in measured)
    ]
    return min(medians)[::-1] if medians else None


def _report(
    values: dict[str, object], results: list[Runs], subject: Subject, left_out: dict[str, str]
) -> None:
    from hotstart.bench import load_report

    for runs in results:
        print(load_report.table(runs, subject))
    for line in load_report.left_out(left_out):
        print(line)
    if path := values.get("json"):
        write_output("--json", str(path), load_report.as_json(results, subject, left_out).encode())
    if path := values.get("png"):
        from hotstart.bench.load_chart import draw

        write_output("--png", str(path), draw(results, subject))
