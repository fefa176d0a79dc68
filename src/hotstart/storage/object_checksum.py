"""The checksum that a store keeps of an object: asked for by HEAD, and only believed of the same object."""

from __future__ import annotations

import time
from collections.abc import Mapping

from msgspec.structs import replace

from hotstart.errors import HotstartError
from hotstart.storage.checksums import Checksum, Offer, offered
from hotstart.storage.http_connection import Head, at
from hotstart.storage.object_source import agree, is_transient, validator
from hotstart.storage.object_store import NEVER, ObjectStore
from hotstart.storage.retry import Persistence, TransientError

_ASK: dict[str, dict[str, str]] = {
    "s3": {"x-amz-checksum-mode": "ENABLED"},
    "gs": {},
    "az": {},
    "https": {"Want-Repr-Digest": "sha-256=10, sha-512=5", "Want-Digest": "sha-256, sha-512;q=0.5"},
}


def stored_checksum(store: ObjectStore, key: str, size: int, identity: str) -> Offer:
    """What the store says of the object with this size and identity; nothing where it does not tell.

    Raises StorageError when it cannot be reached.
    """
    if not store.settings.signs:
        return Offer()  # the cloud's client gives no checksum
    head = _head(store, key, {})
    if head is None and store.location.scheme == "s3" and not _signs_all(store):
        return Offer(others=("a role's requests cannot ask for them",))
    if head is None or head.length != size or not agree(identity, validator(head)):
        return Offer()
    offer = offered(head.headers)
    if offer.best is None or not offer.best.parts:
        return offer
    whole = _with_part(store, key, size, offer.best)
    return Offer(whole, offer.others if whole else (*offer.others, "parts of unknown length"))


def _signs_all(store: ObjectStore) -> bool:
    """Whether a request of S3 may have headers of its own: with keys that are known here, or unsigned."""
    return bool(store.settings.base_url) or store.settings.credential_provider is not None


def _with_part(store: ObjectStore, key: str, size: int, found: Checksum) -> Checksum | None:
    """The parts' length, where all but the last have the same."""
    first, last = (_head(store, key, {"partNumber": str(number)}) for number in (1, found.parts))
    if first is None or last is None or first.length is None or first.length <= 0:
        return None
    if first.headers.get("x-amz-mp-parts-count") != str(found.parts):
        return None
    part, rest = first.length, size - (found.parts - 1) * first.length
    return replace(found, part=part) if last.length == rest and 0 < rest <= part else None


def _head(store: ObjectStore, key: str, query: Mapping[str, str]) -> Head | None:
    """The answer, None for a refusal: what cannot be told apart by a HEAD, a GET will tell."""
    headers = _ASK["https" if store.location.is_web else store.location.scheme]
    persistence = Persistence(store.patience)
    while True:
        try:
            until = at(time.monotonic() + persistence.silence)
            head = store.ask_head(key, headers, query, NEVER, until=until)
            if is_transient(head, b""):
                raise TransientError(f"the server answers {head.status} {head.reason}")
            return head if head.status in (200, 206) else None
        except HotstartError:  # noqa: PERF203 - any attempt may fail
            raise
        except OSError as error:
            store.wait(key, persistence, error, NEVER)
