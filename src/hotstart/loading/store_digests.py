"""The checksums that a store keeps of a model's weight files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from hotstart.checkpoint.wording import count
from hotstart.storage.digests import Expected

if TYPE_CHECKING:
    from hotstart.storage.object_store import ObjectStore

_AT_ONCE = 32


def ask(
    store: ObjectStore, objects: Sequence[tuple[str, int, str]], say: Callable[[int, str], None]
) -> dict[int, Expected]:
    """What the store keeps, by position in ``objects``: name in the model's folder, size and identity.

    ``say`` is told which checksums are not compared. Raises StorageError when the store cannot be reached.
    """
    from hotstart.storage.object_checksum import stored_checksum

    with ThreadPoolExecutor(min(_AT_ONCE, len(objects))) as pool:
        offers = list(
            pool.map(lambda each: stored_checksum(store, store.location.key(each[0]), *each[1:]), objects)
        )
    found: dict[int, Expected] = {}
    reasons: set[str] = set()
    nothing = 0
    for number, offer in enumerate(offers):
        if offer.best is None:
            nothing += bool(offer.others)
            reasons.update(offer.others)
        else:
            best = offer.best
            found[number] = Expected(
                best.value,
                f"the store's {best.header}",
                stored=True,
                algorithm=best.algorithm,
                part=best.part,
            )
    if nothing:
        files = count(nothing, "file")
        say(
            logging.INFO,
            f"digests: the store's checksums of {files} are not compared ({', '.join(sorted(reasons))})",
        )
    return found
