"""The objects that one conversion writes below a prefix, told from everybody else's.

Purpose: to overwrite and to delete nothing that another wrote. Safety: whoever writes puts a mark of its own
name first and lists the prefix then, so that of two who begin at once one at least sees the other; not every
store refuses to create what exists, and none does for uploads in parts. What was written is known again by
the identity that the store gave it. Failure: a killed process leaves mark and objects, and the next
conversion to the prefix is refused with their names.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from hotstart.checkpoint.wording import few
from hotstart.errors import ConfigError, HotstartError, StorageError
from hotstart.storage.object_errors import explain_client, refusal_of_client

if TYPE_CHECKING:
    from hotstart.storage.cloud_settings import CloudSettings
    from hotstart.storage.location import Location

_MARK = ".hotstart-converting-"
_CREATE_UNKNOWN = (400, 405, 501)
"""What stores answer to a condition that they do not know."""

Identity: TypeAlias = tuple[str, str, int]


class _Half(Struct, frozen=True):
    """An object that was not there before its upload ended, of so many bytes; the store did not say more."""

    size: int


class Objects:
    """See the module. ``location`` is the prefix."""

    def __init__(self, location: Location, settings: CloudSettings, *, patience: float) -> None:
        """Asks nobody yet. Raises ConfigError and StorageError for credentials that cannot be had."""
        self.location = location
        self.shown = str(location)
        self._settings = settings
        self.store = _open(settings, location, patience)
        self._written: dict[str, Identity | _Half] = {}
        self._mark = ""

    @property
    def left(self) -> list[str]:
        """Names of the objects that were written, and are not known to be gone."""
        names = [self._name(key) for key in self._written]
        return sorted(name for name in names if not name.startswith(_MARK)) + [
            name for name in names if name.startswith(_MARK)
        ]

    def check_empty(self) -> None:
        """Raise ConfigError where another's objects are, StorageError where that cannot be found out."""
        others = sorted(name for name in map(self._name, self.list()) if self._key(name) not in self._written)
        marks = [name for name in others if name.startswith(_MARK)]
        if marks:
            raise ConfigError(
                f"Another conversion writes to {self.shown}, or was killed there: it holds {few(marks)}",
                expected="a prefix for this conversion alone",
                advice="Name another prefix, or wait for the other one; if none runs, delete the objects "
                "below the prefix first",
            )
        if others:
            raise ConfigError(
                f"{self.shown} is not empty: it holds {few(others)}",
                expected="a prefix without objects",
                advice="Nothing is overwritten: name another prefix, or delete these objects first",
            )

    def claim(self) -> None:
        """Say that somebody writes here now. Raises as :meth:`check_empty` does, StorageError."""
        name = f"{_MARK}{os.urandom(8).hex()}"
        who = f"process {os.getpid()} of {socket.gethostname()} writes a model here\n"
        self._mark = self._key(name)
        self.put(name, who.encode())
        self.check_empty()

    def release(self) -> None:
        """The last step of a conversion that succeeded: the mark goes. Raises StorageError."""
        if failed := self._delete(self._mark):
            raise failed

    def recheck(self) -> None:
        """Raise StorageError where others wrote or deleted here while this conversion ran."""
        there = self.list()
        ours = self._written
        strange = [key for key in there if key not in ours or not _same(there[key], ours[key])]
        gone = [key for key in ours if key not in there]
        found = f"others wrote {few(sorted(map(self._name, strange)))}" if strange else ""
        found += " and " if strange and gone else ""
        found += f"{few(sorted(map(self._name, gone)))} went" if gone else ""
        if found:
            raise StorageError(
                f"In {self.shown} {found} while this conversion ran",
                expected="a prefix for this conversion alone",
                advice="Convert again to another prefix",
            )

    def put(self, name: str, data: bytes) -> None:
        """Write an object that does not exist. Raises StorageError."""
        import obstore

        key = self._key(name)
        self.check_absent(name)
        self._written[key] = _Half(len(data))
        try:
            try:
                answer = obstore.put(self.store, key, data, mode="create")
            except Exception as error:
                if not (isinstance(error, NotImplementedError) or _unknown(error)):
                    raise
                answer = obstore.put(self.store, key, data)
        except Exception as error:
            if type(error).__name__ == "AlreadyExistsError":
                del self._written[key]
                raise self._exists(name) from None
            raise self.failed(key, error, "write") from None
        self._written[key] = _identity({**answer, "size": len(data)})

    def check_absent(self, name: str) -> None:
        """Raise StorageError for an object that another has written meanwhile."""
        if self._head(self._key(name)) is not None:
            raise self._exists(name)

    def ending(self, name: str, size: int) -> None:
        """An upload is about to be completed, after :meth:`check_absent`: from now on it may be there."""
        self._written[self._key(name)] = _Half(size)

    def ended(self, name: str) -> None:
        """The same upload is complete. Raises StorageError."""
        key = self._key(name)
        found = self._head(key)
        if found is None or not _same(found, self._written[key]):
            what = "is not there" if found is None else f"has {found['size']} bytes"
            raise StorageError(
                f"{self._shown(key)} {what} although its upload is complete",
                advice="Convert again to another prefix",
            )
        self._written[key] = _identity(found)

    def delete(self) -> None:
        """Remove what was written here and was not replaced since, the mark last; raises nothing.

        What could not be removed is :attr:`left`.
        """
        keys = [key for key in self._written if key != self._mark]
        for key in (*keys, self._mark) if self._mark in self._written else keys:
            with suppress(Exception):
                self._delete(key)

    def list(self) -> dict[str, Any]:
        """All objects below the prefix, by key. Raises StorageError."""
        import obstore

        try:
            pages = obstore.list(self.store, self.location.prefix or None)
            return {meta["path"]: meta for page in pages for meta in page}
        except Exception as error:
            raise explain_client(self.shown, self._settings, "list", error) from None

    def failed(self, key: str, error: Exception, doing: str) -> HotstartError:
        """The error for what ``obstore`` raised."""
        problem = explain_client(self._shown(key), self._settings, doing, error)
        if refusal_of_client(error).status in (401, 403, 405):
            return StorageError(
                problem.found,
                advice="The credentials must allow to write, list and delete there (of S3: s3:PutObject, "
                "s3:GetObject, s3:AbortMultipartUpload, s3:ListBucket, s3:DeleteObject)",
            )
        return problem

    def _delete(self, key: str) -> HotstartError | None:
        import obstore

        try:
            found = self._head(key)
            # Stores know no condition for a deletion, so what is there is looked at just before.
            if found is not None and _same(found, self._written[key]):
                obstore.delete(self.store, key)
        except FileNotFoundError:
            pass
        except HotstartError as error:
            return error
        except Exception as error:
            return self.failed(key, error, "delete")
        del self._written[key]
        return None

    def _head(self, key: str) -> Any:
        import obstore

        try:
            return obstore.head(self.store, key)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self.failed(key, error, "look at") from None

    def _exists(self, name: str) -> StorageError:
        return StorageError(
            f"{self._shown(self._key(name))} was written by somebody else while this conversion ran",
            expected="a prefix for this conversion alone",
            advice="It was not changed. Convert again to another prefix",
        )

    def _key(self, name: str) -> str:
        return self.location.key(name)

    def _name(self, key: str) -> str:
        return key[len(self.location.prefix) :].lstrip("/")

    def _shown(self, key: str) -> str:
        return f"{self.location.scheme}://{self.location.container}/{key}"


def _open(settings: CloudSettings, location: Location, patience: float) -> Any:
    if location.scheme != "s3":
        return settings.open(location, patience=patience)
    before = settings.config
    # Not every store has DeleteObjects; obstore uses it even for one object unless told otherwise.
    settings.config = {**before, "disable_bulk_delete": "true"}
    try:
        return settings.open(location, patience=patience)
    except HotstartError:
        raise
    except Exception:  # its versions before that option
        settings.config = before
        return settings.open(location, patience=patience)


def _unknown(error: Exception) -> bool:
    return refusal_of_client(error).status in _CREATE_UNKNOWN


def _identity(meta: Any) -> Identity:
    # Azure's listings leave out the quotes.
    return ((meta.get("e_tag") or "").strip('"'), meta.get("version") or "", meta["size"])


def _same(meta: Any, known: Identity | _Half) -> bool:
    """A version is only compared where both answers have one: listings of some stores leave it out."""
    if isinstance(known, _Half):
        return bool(meta["size"] == known.size)
    tag, version, size = _identity(meta)
    return (
        size == known[2]
        and (tag == known[0] or not (tag and known[0]))
        and (version == known[1] or not (version and known[1]))
    )
