"""An object of a cloud that cannot sign addresses, read by the cloud's client.

Slower than :mod:`hotstart.storage.object_source`: the client copies what it receives. It retries by
itself; the object is pinned all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotstart.errors import StorageError
from hotstart.storage.object_errors import refusal_of_client
from hotstart.storage.source import Cancel, ReadCancelled

if TYPE_CHECKING:
    from hotstart.storage.object_store import Fetched, ObjectStore

_PIECE = 4 << 20
"""Bytes of one request: a request cannot be cancelled."""


class ClientSource:
    """See :class:`hotstart.storage.source.Source`."""

    align = 1

    def __init__(self, store: ObjectStore, client: Any, key: str, size: int, identity: str) -> None:
        """``client``: the store as ``obstore`` has it."""
        self.name = store.name(key)
        self.size = size
        self.identity = identity
        self._store = store
        self._client = client
        self._key = key

    def read_into(self, buffer: memoryview, offset: int, cancel: Cancel) -> None:
        """See :class:`hotstart.storage.source.Source`."""
        import obstore

        at = 0
        while at < len(buffer):
            if cancel.is_set():
                raise ReadCancelled(self.name)
            begin = offset + at
            end = min(begin + _PIECE, offset + len(buffer))
            options: dict[str, Any] = {"range": (begin, end)}
            if self.identity.startswith('"'):
                options["if_match"] = self.identity
            try:
                answer = obstore.get(self._client, self._key, options=options)  # type: ignore[arg-type]
                data = answer.bytes()
            except obstore.exceptions.PreconditionError:
                raise self._changed() from None
            except Exception as error:
                raise self._store.failed(error, "read", self._key) from None
            etag = answer.meta["e_tag"]
            if answer.meta["size"] != self.size or (self.identity and etag and etag != self.identity):
                raise self._changed()
            if len(data) != end - begin:
                raise StorageError(f"{self.name}: {len(data)} bytes came of {end - begin}")
            buffer[at : at + len(data)] = memoryview(data)
            at += len(data)

    def verify(self) -> None:
        """Each answer was compared with what is pinned: there is nothing left to compare."""

    def close(self) -> None:
        """Nothing is held."""

    def _changed(self) -> StorageError:
        return StorageError(
            f"{self.name} was replaced while it was read",
            expected=f"the object with ETag {self.identity} during the whole load",
            advice="Start again when the upload is complete; publish a new model under a new prefix",
        )


def fetch_first(
    store: ObjectStore, client: Any, key: str, limit: int, known: str, optional: bool
) -> Fetched | None:
    """The first ``limit`` bytes of an object; see :meth:`ObjectStore.fetch`. Raises StorageError."""
    import obstore

    from hotstart.storage.object_store import Fetched

    try:
        meta = obstore.head(client, key)
        identity = meta["e_tag"] or ""
        if known and identity == known:
            return Fetched(b"", 0, known, unchanged=True)
        size = meta["size"]
        data = obstore.get_range(client, key, start=0, end=min(limit, size)) if size else b""
    except FileNotFoundError:
        return None
    except Exception as error:
        if optional and refusal_of_client(error).code in ("", "AccessDenied") and _denied(error):
            return None
        raise store.failed(error, "read", key) from None
    return Fetched(bytes(data), size, identity)


def _denied(error: Exception) -> bool:
    import obstore

    return isinstance(error, obstore.exceptions.PermissionDeniedError)
