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
    ordered: bool = False
    """By the user: then there is no falling back."""
    network: bool = False
    """Each reader has a descriptor of its own, and there are more of them."""
    mount: Mount | None = None
    """What the file lies on; None: an object store, or unknown."""

    @property
    def is_cold(self) -> bool:
        """Whether the file comes from its device, in whichever of two ways proves faster."""
        return not self.ordered and self.strategy == "direct" and self.resident < COLD

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
            choices[number] = structs.replace(choice, strategy="buffered")
        elif choice.strategy == "direct" and again and not choice.ordered:
            reason = "what is read again for its digest stays in the page cache"
            choices[number] = structs.replace(choice, strategy="buffered", reason=reason)
    return choices


def choose(file: ShardFile, strategy: str = "auto", mounts: Mounts | None = None) -> Choice:
    """Map, read directly or read through the page cache. ``strategy`` other than auto is an order.

    ``mounts``: as they were for the files before; None: as they are now. Raises StorageError and
    ModelError for a file that cannot be reached.
    """
    if not os.path.isabs(file.path):
        return Choice("ranges", "an object store is read by ranges, straight into memory", 0.0)
    known = resident_fraction(file.path)
    mount = (Mounts() if mounts is None else mounts).of(file.path)
    network = mount is None or mount.network
    resident = 0.0 if known is None else known
    if strategy != "auto":
        way, reason = strategy, "as ordered by --read-strategy"
    else:
        way, reason, resident = _by_medium(mount, known)
    return Choice(way, reason, resident, ordered=strategy != "auto", network=network, mount=mount)


def _by_medium(mount: Mount | None, known: float | None) -> tuple[str, str, float]:
    """Strategy, reason and share in the page cache, of which ``known`` is what the kernel tells."""
    resident = 0.0 if known is None else known
    if mount is None:
        return "buffered", "an unknown file system gets large ordered reads", resident
    if mount.network:
        # FUSE gets them only past the page cache, through which the kernel asks for 128 KiB at a time.
        past = mount.fuse and known is not None and resident < RESIDENT
        return "direct" if past else "buffered", f"{mount.fs_type} gets large ordered reads", resident
    if mount.memory:
        return "map", f"{mount.fs_type} is memory already", 1.0
    if known is None:
        # Past the page cache, a file that lies there whole would be read from its device.
        return "buffered", "the kernel does not tell this user what is resident", resident
    if resident >= RESIDENT:
        return "map", f"{resident:.0%} resident in the page cache", resident
    how = "reading past it saves a copy" if resident < COLD else "that is copied, the rest read past it"
    return "direct", f"{resident:.0%} resident in the page cache; {how}", resident


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
