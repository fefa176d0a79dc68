"""How each file of a checkpoint is read, and why: one place decides, for memory and for GPUs. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from msgspec import Struct, structs

from hotstart.checkpoint.base import ShardFile
from hotstart.storage.mounts import Mount, Mounts
from hotstart.storage.residency import resident_fraction

RESIDENT, COLD = 0.9, 0.05
"""Shares: from the first on a file or step counts as resident, below the second as all on its device."""
ROOMY = 2.2
"""Times the weights: with less memory there is none for a second copy in the page cache."""
_WIDE = 1 << 20
"""Bytes of read-ahead with which a few readers in order keep a device busy; most machines have 128 KiB."""
_READERS, _NETWORK_READERS = 4, 8
_RANGE_READERS = 8, 64
"""Of an object store: at first, and at most."""


class Choice(Struct, frozen=True):
    """How one file comes into memory, and why."""

    strategy: str
    """``map``, ``direct``, ``buffered``, or ``ranges`` of an object store."""
    reason: str
    resident: float
    """Share of the file in the page cache, 0 to 1."""
    known: bool = True
    """Whether the kernel tells that share; else it is given as 0."""
    ordered: bool = False
    """By the user: then there is no falling back."""
    network: bool = False
    """Each reader has a descriptor of its own, and there are more of them."""
    kept: bool = False
    """What is read is to stay in the page cache."""
    mount: Mount | None = None
    """What the file lies on; None: an object store, or unknown."""

    @property
    def rival(self) -> str:
        """Another way, where it may prove faster for bytes that come from their device; empty: none."""
        if self.ordered or self.kept or not self.known or self.resident >= COLD or self.streams:
            return ""
        if self.strategy == "direct":
            return "buffered"
        return "" if self.network or self.strategy == "ranges" else "direct"

    @property
    def kind(self) -> str:
        """What has a rate of its own: mapping resident pages is not reading them from their device."""
        return "map, read ahead" if self.reads_ahead else self.strategy

    @property
    def reads_ahead(self) -> bool:
        """Whether a file that is mapped must be read for it, or may have to be."""
        return self.strategy == "map" and self.resident < RESIDENT

    @property
    def streams(self) -> bool:
        """Whether the kernel reads ahead by itself of readers that go through a mapping in order.

        Then it takes large pages for the page cache: a tenth of the processor time, and faster.
        """
        return self.reads_ahead and self.mount is not None and self.mount.window >= _WIDE

    def buffered(self, why: str) -> Choice:
        """Through the page cache instead, for the file system has shown ``why`` not otherwise."""
        mount = self.mount
        where = "this file system" if mount is None else f"{mount.fs_type} mounted at {mount.mount_point}"
        return structs.replace(self, strategy="buffered", reason=f"{where} {why}")


def choose_all(files: Iterable[ShardFile], strategy: str = "auto") -> list[Choice]:
    """:func:`choose` for each file, as the mounts are now: they are read once."""
    mounts = Mounts()
    return [choose(file, strategy, mounts) for file in files]


def choose_for_gpu(
    files: Iterable[ShardFile], strategy: str = "auto", *, again: bool = False
) -> list[Choice]:
    """:func:`choose_all` for bytes that must be copied to a GPU: nothing is mapped.

    ``again``: the files are read a second time, so that the page cache is to have them.
    """
    choices = choose_all(files, strategy)
    for number, choice in enumerate(choices):
        if choice.strategy == "map":
            choices[number] = choice = structs.replace(choice, strategy="buffered")
        if again and choice.strategy != "ranges" and not choice.ordered:
            reason = choice.reason
            if choice.strategy == "direct":
                reason = "what is read again for its digest stays in the page cache"
            choices[number] = structs.replace(choice, strategy="buffered", reason=reason, kept=True)
    return choices


def choose(file: ShardFile, strategy: str = "auto", mounts: Mounts | None = None) -> Choice:
    """Map, read directly or read through the page cache. ``strategy`` other than auto is an order.

    ``mounts``: as they were for the files before; None: as they are now. Raises StorageError and
    ModelError for a file that cannot be reached.
    """
    if not os.path.isabs(file.path):
        return Choice("ranges", "what a server sends is read by ranges, straight into memory", 0.0)
    told = resident_fraction(file.path)
    mount = (Mounts() if mounts is None else mounts).of(file.path)
    known, resident = told is not None, told or 0.0
    if mount is not None and mount.memory:
        known, resident = True, 1.0
    network = mount is None or mount.network
    if strategy != "auto":
        way, reason = strategy, "as ordered by --read-strategy"
    elif mount is None:
        way, reason = "buffered", "an unknown file system gets large ordered reads"
    elif mount.network:
        # FUSE gets them only past the page cache, through which the kernel asks for 128 KiB at a time.
        past = mount.fuse and known and resident < RESIDENT
        way, reason = "direct" if past else "buffered", f"{mount.fs_type} gets large ordered reads"
    else:
        way, reason = "map", _why_map(mount, known, resident)
    return Choice(way, reason, resident, known, ordered=strategy != "auto", network=network, mount=mount)


def _why_map(mount: Mount, known: bool, resident: float) -> str:
    """The reason for files of this machine, which lie in the page cache, or will for the next start."""
    if mount.memory:
        return f"{mount.fs_type} is memory already"
    if not known:
        return "the kernel does not tell this user what is resident; what is not is read ahead"
    share = f"{resident:.0%} resident in the page cache"
    return share if resident >= RESIDENT else f"{share}; the rest is read ahead into it"


def describe(choices: Iterable[Choice]) -> str:
    """Strategies and reasons, for the log: ``map (100% resident in the page cache)``."""
    kinds: dict[tuple[str, str], int] = {}
    for choice in choices:
        kinds[choice.strategy, choice.reason] = kinds.get((choice.strategy, choice.reason), 0) + 1
    return ", ".join(
        f"{strategy} ({reason})" + (f" x{count}" if count > 1 else "")
        for (strategy, reason), count in kinds.items()
    )


def in_flight(choices: Sequence[Choice], readers: int | None = None) -> tuple[int, int]:
    """Reads in flight, at first and at most; ``readers`` is an order."""
    if readers is None and any(choice.strategy == "ranges" for choice in choices):
        return _RANGE_READERS
    usual = _NETWORK_READERS if any(choice.network for choice in choices) else _READERS
    return (readers or usual,) * 2
