"""Digests of weight files: those that came with the model, and those of an earlier start.

A publisher's digests lie beside the files: ``SHA256SUMS``, or ``NAME.sha256`` for each. Without them,
and without a checksum of the store's (:mod:`hotstart.storage.checksums`), those that a start found are
kept below the cache root, under the file's name and what tells that it is the same file (ETag; or size
and time of its last change), so that a later start notices bytes that changed by themselves. A record
that cannot be read or written is no record.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct

from hotstart.errors import ModelError
from hotstart.storage.checksums import label

SUMS = "SHA256SUMS"
MAX_SUMS = 16 << 20
"""Bytes that a file of digests may have."""

_GNU = re.compile(r"(\\?)([0-9a-fA-F]{64})(?: [ *]|[ \t]+)(.+)")
_BSD = re.compile(r"(\\?)SHA(?:2-)?256 ?\((.+)\) ?= ([0-9a-fA-F]{64})")
_ALONE = re.compile(r"[0-9a-fA-F]{64}")
_HERE = re.compile(r"\A(?:\./+)+")
_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


DISPUTED = ""
"""In place of a digest: there are two that differ."""


class Expected(Struct, frozen=True):
    """The digest that a file should have, in hexadecimal, and who says so."""

    digest: str
    origin: str
    recorded: bool = False
    """By an earlier start of ours."""
    stored: bool = False
    """By the store or web server that the file comes from."""
    algorithm: str = "sha256"
    part: int = 0
    """See :class:`hotstart.storage.checksums.Checksum`."""

    @property
    def label(self) -> str:
        """What kind of digest it is, as people write it."""
        return label(self.algorithm, self.part)


def parse_sums(text: str) -> dict[str, str]:
    """Digests by name as ``sha256sum``, the BSDs' ``sha256`` and ``openssl dgst`` write them.

    A digest alone, as ``NAME.sha256`` often holds, has the empty name; a name with digests that differ
    is ``DISPUTED``. Other lines are passed over.
    """
    found: dict[str, str] = {}
    for line in text.removeprefix("\ufeff").split("\n"):
        line = line.rstrip("\r")
        if _ALONE.fullmatch(line.strip()):
            escaped, digest, name = "", line.strip(), ""
        elif match := _GNU.fullmatch(line):
            escaped, digest, name = match.groups()
        elif match := _BSD.fullmatch(line):
            escaped, name, digest = match.groups()
        else:
            continue
        if escaped:
            name = re.sub(r"\\[\\nr]", lambda found: _ESCAPES[found[0]], name)
        name = _HERE.sub("", name)
        digest = digest.lower()
        found[name] = digest if found.get(name, digest) == digest else DISPUTED
    return found


def published(
    names: Sequence[str], read: Callable[[Sequence[str]], Sequence[str | None]]
) -> dict[str, Expected]:
    """What was published beside the files ``names``. ``read`` gives texts of files, None for absent ones.

    Raises ModelError for a file that has two digests.
    """
    sums = parse_sums(read([SUMS])[0] or "")
    found = {name: _agreed(sums[name], name, SUMS) for name in names if name in sums}
    others = [name for name in names if name not in found]
    if not others:
        return found
    texts = read([f"{name}.sha256" for name in others])
    for name, text in zip(others, texts, strict=True):
        own = parse_sums(text or "")
        # Whatever it calls the file: it may have been renamed together with it.
        digest = own.get(name, own.get("", next(iter(own.values())) if len(own) == 1 else None))
        if digest is not None:
            found[name] = _agreed(digest, name, f"{name}.sha256")
    return found


def _agreed(digest: str, name: str, origin: str) -> Expected:
    if digest == DISPUTED:
        raise ModelError(
            f"{origin} has two digests of {name}",
            expected="one for each file",
            advice=f"Write {origin} anew: sha256sum *.safetensors > {SUMS}",
        )
    return Expected(digest, origin)


class Known(Struct, frozen=True):
    """A record: which file, and its digest."""

    name: str
    identity: str
    digest: str


class Records:
    """The digests that earlier starts found, below a cache root; empty: there is none."""

    def __init__(self, cache_root: str) -> None:
        self._directory = os.path.join(cache_root, "digests") if cache_root else ""

    def find(self, name: str, identity: str) -> Expected | None:
        """The digest of a file as it is, if a start found it before."""
        if not identity:
            return None
        try:
            with open(self._path(name, identity), "rb") as file:
                known = msgspec.json.decode(file.read(), type=Known)
        except (OSError, msgspec.MsgspecError):
            return None
        if (known.name, known.identity) != (name, identity):
            return None
        return Expected(known.digest, "an earlier start", recorded=True)

    def keep(self, name: str, identity: str, digest: str) -> None:
        """Record a digest, all of it or nothing. Raises OSError."""
        if not self._directory or not identity:
            return
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        fd, fresh = tempfile.mkstemp(prefix=".new-", dir=self._directory)
        try:
            with open(fd, "wb") as file:
                file.write(msgspec.json.encode(Known(name, identity, digest)))
            os.rename(fresh, self._path(name, identity))
        except OSError:
            with suppress(OSError):
                os.unlink(fresh)
            raise

    def _path(self, name: str, identity: str) -> str:
        if not self._directory:
            return ""
        key = hashlib.sha256(f"{name}\0{identity}".encode()).hexdigest()[:32]
        return os.path.join(self._directory, f"{key}.json")


def local_identity(path: str) -> str:
    """What tells that a local file is the same: size and time of the last change. Raises OSError."""
    status = os.stat(path)
    return f"{status.st_size}:{status.st_mtime_ns}"
