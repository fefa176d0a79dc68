"""An object of a cloud that cannot sign addresses, read by the cloud's client.

Slower than :mod:`hotstart.storage.object_source`: the client copies what it receives. It retries by
itself; the object is pinned all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotstart.errors import StorageError
from hotstart.storage.source import Cancel, ReadCancelled

if TYPE_CHECKING:
    from hotstart.storage.object_store import ObjectStore

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
