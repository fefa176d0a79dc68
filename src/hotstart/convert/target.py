"""Where a converted model goes: all of it, or nothing.

A target takes files one after the other or side by side, keeps the SHA-256 of each, and shows nothing
under its name until :meth:`Target.publish`. :meth:`Target.discard` leaves nothing behind, or says what.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Protocol

from hotstart.storage.digests import SUMS

_ESCAPED = re.compile(r"[\\\n\r]")
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
RESERVE = 1 << 20
"""Bytes of a file system for directories and the ends of blocks."""


class Output(Protocol):
    """One file being written. Whoever opened it closes it; what was not closed is not published."""

    def write(self, data: memoryview | bytes) -> None:
        """Append. Raises StorageError."""
        ...

    def close(self) -> None:
        """The file is whole. Raises StorageError."""
        ...


class Target(Protocol):
    """See the module."""

    shown: str
    """What messages call it."""
    digests: dict[str, str]
    """SHA-256 of the files that are whole, by name."""

    @property
    def left(self) -> str:
        """What lies there that :meth:`discard` could not or did not yet remove, and what to do; or empty."""
        ...

    def check(self) -> None:
        """Raise ConfigError where something is there already, StorageError where nothing can be written."""
        ...

    def reserve(self, nbytes: int, *, named: int = 0) -> None:
        """Raise StorageError where so many bytes have no room, of which ``named`` lie at :meth:`path`."""
        ...

    def together(self, size: int) -> int:
        """How many files of about ``size`` bytes may be open at once.

        Raises ConfigError where memory is not even for one.
        """
        ...

    def open(self, name: str, *, size: int = 0, beside: int = 1) -> Output:
        """Begin a file of about ``size`` bytes, one of ``beside`` at once. Raises StorageError."""
        ...

    def path(self, name: str) -> str:
        """Where a file that a library writes by its name is to lie until :meth:`adopt`."""
        ...

    def adopt(self, name: str) -> None:
        """Take in the file at :meth:`path`, which is whole. Raises StorageError."""
        ...

    def settle(self) -> None:
        """Before the files that make it a model: raise StorageError if others wrote there meanwhile."""
        ...

    def publish(self) -> None:
        """Make everything visible. Raises StorageError."""
        ...

    def discard(self) -> None:
        """Remove whatever was written, after a failure; raises nothing. See :attr:`left`."""
        ...


def put(target: Target, name: str, data: bytes) -> None:
    """Write a small file."""
    output = target.open(name, size=len(data))
    output.write(data)
    output.close()


def put_sums(target: Target, later: Mapping[str, bytes]) -> None:
    """Write the digests of all files, those that come ``later`` too, in the form of ``sha256sum``."""
    lines = []
    digests = target.digests | {name: hashlib.sha256(data).hexdigest() for name, data in later.items()}
    for name, digest in sorted(digests.items()):
        escaped = _ESCAPED.sub(lambda found: _ESCAPES[found[0]], name)
        lines.append(f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n")
    put(target, SUMS, "".join(lines).encode())


class Digesting:
    """An output that adds to ``digests`` when it is whole."""

    def __init__(self, output: Output, name: str, digests: dict[str, str]) -> None:
        self._output = output
        self._name = name
        self._digests = digests
        self._hash = hashlib.sha256()

    def write(self, data: memoryview | bytes) -> None:
        """See :class:`Output`."""
        self._output.write(data)
        self._hash.update(data)

    def close(self) -> None:
        """See :class:`Output`."""
        self._output.close()
        self._digests[self._name] = self._hash.hexdigest()
