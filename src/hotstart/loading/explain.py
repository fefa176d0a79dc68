"""How a checkpoint will be read, told before it is: medium, strategy, reads in flight, memory, seconds.

The decisions are those of :mod:`hotstart.loading.choice` and :mod:`hotstart.loading.options`; nothing
is decided here. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from hotstart.checkpoint.base import Checkpoint, ShardFile
from hotstart.checkpoint.wording import count
from hotstart.device import host
from hotstart.loading.choice import COLD, ROOMY, Choice, choose_all, choose_for_gpu, in_flight
from hotstart.loading.image import STEP
from hotstart.loading.options import Ring
from hotstart.storage.mounts import Mount
from hotstart.units import format_rate, format_seconds, format_size

if TYPE_CHECKING:
    from hotstart.loading.probe import Probe
    from hotstart.loading.rates import Rate


class FilePlan(Struct, frozen=True):
    """How one file is read."""

    file: ShardFile
    medium: str
    """Mount, file system and device; or the store's endpoint, region and source of credentials."""
    choice: Choice


class Plan(Struct, frozen=True):
    """How all files are read."""

    files: tuple[FilePlan, ...]
    first: int
    """Reads in flight at first."""
    most: int
    """Reads in flight at most."""
    step: int
    """Bytes of one read at most."""
    ring: Ring | None = None
    """Staging memory; None: bytes are read where they stay."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(each.file.size for each in self.files)

    @property
    def groups(self) -> dict[tuple[str, str], list[FilePlan]]:
        """The files by medium and :attr:`~hotstart.loading.choice.Choice.kind`."""
        found: dict[tuple[str, str], list[FilePlan]] = {}
        for each in self.files:
            found.setdefault((each.medium, each.choice.kind), []).append(each)
        return found

    @property
    def is_pure(self) -> bool:
        """Whether all bytes come from one medium, which must be read: of pages that are mapped from the
        page cache the time says how busy the machine was, and nothing of any storage.
        """
        return len(self.groups) == 1 and all(
            each.choice.known and each.choice.resident < COLD for each in self.files
        )


def plan_of(
    checkpoint: Checkpoint,
    *,
    strategy: str = "auto",
    readers: int | None = None,
    ring: Ring | None = None,
    first: int | None = None,
    store: str = "",
) -> Plan:
    """The plan of a load that would begin now.

    ``ring``: of a GPU's readers, of which ``first`` begin (None: all). ``store``: what an object
    store is called. Raises StorageError for files that cannot be reached.
    """
    files = []
    media: dict[Mount | None, str] = {}
    choose = choose_all if ring is None else choose_for_gpu
    choices = choose(checkpoint.files, strategy)
    for file, choice in zip(checkpoint.files, choices, strict=True):
        if choice.mount not in media:
            media[choice.mount] = _medium(choice, store)
        files.append(FilePlan(file, media[choice.mount], choice))
    if ring is not None:
        return Plan(tuple(files), first or ring.threads, ring.threads, ring.buffer_bytes, ring)
    first, most = in_flight([each.choice for each in files], readers)
    steps = sum(-(-file.size // STEP) for file in checkpoint.files)
    return Plan(tuple(files), min(first, steps), min(most, steps), STEP)


def _medium(choice: Choice, store: str) -> str:
    if choice.strategy == "ranges":
        return store or "an object store"
    return choice.mount.describe() if choice.mount is not None else "an unknown file system"


def lines(plan: Plan, rates: Sequence[Rate | Probe], *, files: bool = True) -> Iterator[tuple[str, str]]:
    """Topic and text of each line. ``rates``: what each of :attr:`Plan.groups` is expected to bring."""
    for (medium, _), members in plan.groups.items():
        size = format_size(sum(each.file.size for each in members))
        yield "medium", f"{count(len(members), 'file')}, {size}: {medium}"
        for reason in dict.fromkeys(each.choice.reason for each in members):
            yield "strategy", f"{members[0].choice.strategy}: {reason}"
    if files:
        for each in plan.files:
            name = os.path.basename(each.file.path)
            yield "file", f"{name}, {format_size(each.file.size)}: {_way(each.choice)}"
    yield "reads", _reads(plan)
    yield "memory", _memory(plan)
    yield "expected", _expected(plan, rates)


def short(plan: Plan, rates: Sequence[Rate | None]) -> str:
    """One line for the log of a start, which does not probe: expected seconds only from earlier starts."""
    ways = ", ".join(
        f"{count(len(members), 'file')} {choice.strategy} from {_name(medium, choice)} ({choice.reason})"
        for (medium, _), members in plan.groups.items()
        for choice in (members[0].choice,)
    )
    known = [rate for rate in rates if rate is not None]
    text = f"{ways}; {_reads(plan)}"
    if known and len(known) == len(rates):
        text += f"; expected {_expected(plan, known)}"
    return text if plan.ring is None else f"{text}; {_memory(plan)}"


def _name(medium: str, choice: Choice) -> str:
    """Of a store's settings the first: the log has just told them all."""
    return medium.partition(", ")[0] if choice.strategy == "ranges" else medium


def _way(choice: Choice) -> str:
    if choice.strategy == "ranges":
        return "ranges"
    return f"{choice.strategy}, {choice.resident:.0%} in the page cache"


def _reads(plan: Plan) -> str:
    size = format_size(plan.step)
    if plan.first == plan.most:
        return f"{plan.most} in flight, of at most {size} each"
    return f"{plan.first} in flight at first, up to {plan.most} while more of them bring more, of {size} each"


def _memory(plan: Plan) -> str:
    memory = host.memory()
    free = f"{format_size(memory.available)} free of {format_size(memory.limit)} ({memory.limited_by})"
    if plan.ring is not None:
        ring = plan.ring
        bound = "" if ring.limit is None else f" of at most {format_size(ring.limit)} on this machine"
        return (
            f"{format_size(ring.nbytes)} of pinned staging memory "
            f"({ring.threads} x {ring.buffers} x {format_size(ring.buffer_bytes)}){bound}; {free}"
        )
    mapped = sum(each.file.size for each in plan.files if each.choice.strategy == "map")
    parts = []
    if mapped < plan.nbytes:
        parts.append(f"{format_size(plan.nbytes - mapped)} read where they stay, no staging")
    if mapped:
        parts.append(f"{format_size(mapped)} mapped, shared with the page cache")
    copied = any(each.choice.strategy == "buffered" for each in plan.files)
    if copied and memory.available < ROOMY * plan.nbytes:
        parts.append("pages of the page cache are dropped once they are read")
    return "; ".join([*parts, free])


def _to_read(file: FilePlan) -> float:
    """Bytes: what the page cache has of a file that is mapped and read ahead need not be read."""
    return file.file.size * (1.0 - file.choice.resident if file.choice.reads_ahead else 1.0)


def _expected(plan: Plan, rates: Sequence[Rate | Probe]) -> str:
    seconds = 0.0
    why = []
    for members, rate in zip(plan.groups.values(), rates, strict=True):
        seconds += sum(_to_read(each) for each in members) / rate.rate
        why.append(f"{format_rate(rate.rate, 1)} {rate.origin}")
    return f"{format_seconds(seconds)}: {', '.join(why)}"
