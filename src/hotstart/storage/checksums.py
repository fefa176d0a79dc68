"""Checksums that a store or web server gives with an object, and how bytes are compared with them.

Purpose: whoever publishes a model rarely publishes digests, but most stores keep one for each object.
Which: those that the standard library computes fast. CRC-32C and CRC-64/NVME are not among them, and
are named instead, so that nobody believes that they were compared.
Safety: an ETag is never taken for a digest. It often looks like an MD5 and is one only where the
store neither encrypts nor received the object in parts, which it does not tell.

S3: https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
Google: https://cloud.google.com/storage/docs/xml-api/reference-headers#xgooghash
Web servers: RFC 9530 (``Repr-Digest``), RFC 3230 (``Digest``), RFC 1864 (``Content-MD5``, Azure's too)
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from hotstart.units import format_size

_BYTES = {"sha256": 32, "crc32": 4, "sha1": 20, "sha512": 64, "md5": 16}
"""What can be compared and how long it is, from the one liked best. On one core: SHA-256 1.8 GB/s,
CRC-32 4.1, SHA-1 1.9, SHA-512 0.8, MD5 0.7 (with SHA instructions)."""
_LABELS = {"sha256": "SHA-256", "crc32": "CRC-32", "sha1": "SHA-1", "sha512": "SHA-512", "md5": "MD5"}
_LABELS |= {"crc32c": "CRC-32C", "crc64nvme": "CRC-64/NVME"}
_S3 = "x-amz-checksum-"
_ITEM = re.compile(r"\s*([\w-]+)\s*=\s*([^,\s]+)\s*")
_SHORT = {"sha-256": "sha256", "sha-512": "sha512", "sha": "sha1", "sha-1": "sha1"}


class Checksum(Struct, frozen=True):
    """What an object should hash to, in hexadecimal."""

    algorithm: str
    """As ``hashlib`` calls it, or ``crc32``."""
    value: str
    header: str
    """Which header gave it."""
    parts: int = 0
    """Of so many parts the digests were digested again; 0: it is the whole object's."""
    part: int = 0
    """Bytes of each part but the last; 0: not known, or there are none."""


class Offer(Struct, frozen=True):
    """What a server says of an object."""

    best: Checksum | None = None
    """The one to compare; of several parts, it still lacks their length."""
    others: tuple[str, ...] = ()
    """Algorithms that cannot be computed here, as people write them, and other reasons for none."""


class Hasher:
    """A digest of bytes as they come. ``part``: see :attr:`Checksum.part`."""

    def __init__(self, algorithm: str, part: int = 0) -> None:
        self._algorithm = algorithm
        self._part = part
        self._open = _new(algorithm)
        self._digests = _new(algorithm)
        self._filled = 0
        """Bytes of the part that has begun."""

    def update(self, piece: memoryview) -> None:
        """Take the next bytes; the interpreter's lock is free meanwhile."""
        while self._part and len(piece) >= self._part - self._filled:
            rest = self._part - self._filled
            self._open.update(piece[:rest])
            piece = piece[rest:]
            self._end_part()
        self._open.update(piece)
        self._filled += len(piece)

    def hexdigest(self) -> str:
        """Of all bytes."""
        if not self._part:
            return str(self._open.digest().hex())
        if self._filled:
            self._end_part()
        return str(self._digests.digest().hex())

    def _end_part(self) -> None:
        self._digests.update(self._open.digest())
        self._open = _new(self._algorithm)
        self._filled = 0


def label(algorithm: str, part: int = 0) -> str:
    """As people write it: ``SHA-256``, ``CRC-32 of parts of 8 MB``."""
    name = _LABELS.get(algorithm, algorithm)
    return f"{name} of parts of {format_size(part)}" if part else name


def offered(headers: Mapping[str, str]) -> Offer:
    """What an answer's headers, in lower case, say of the whole object that was asked for."""
    found: dict[str, Checksum] = {}
    others: list[str] = []
    for header, algorithm, text in _named(headers):
        value, parts = _decoded(algorithm, text)
        if algorithm not in _BYTES:
            others.append(label(algorithm))
        elif value:
            found.setdefault(algorithm, Checksum(algorithm, value, header, parts))
    best = next((found[algorithm] for algorithm in _BYTES if algorithm in found), None)
    return Offer(best, tuple(dict.fromkeys(others)))


def _named(headers: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Header, algorithm and text of each checksum."""
    for header, text in headers.items():
        name = header.removeprefix(_S3)
        if name != header and name not in ("type", "mode", "algorithm"):
            yield header, name, text
    yield from _items("x-goog-hash", headers)
    yield from _items("repr-digest", headers)
    yield from _items("digest", headers)
    for header in ("content-md5", "x-ms-blob-content-md5"):
        if header in headers:
            yield header, "md5", headers[header]


def _items(header: str, headers: Mapping[str, str]) -> Iterable[tuple[str, str, str]]:
    for item in _ITEM.finditer(headers.get(header, "")):
        name = item[1].lower()
        yield header, _SHORT.get(name, name), item[2]


def _decoded(algorithm: str, text: str) -> tuple[str, int]:
    """In hexadecimal, and of how many parts; empty for what is no such digest."""
    match = re.fullmatch(r"(:?)([A-Za-z0-9+/]+=*)\1(?:-(\d{1,5}))?", text)
    try:
        value = base64.b64decode(match[2], validate=True) if match else b""
    except binascii.Error:
        value = b""
    if match is None or len(value) != _BYTES.get(algorithm):
        return "", 0
    return value.hex(), int(match[3] or 0)


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, piece: Any) -> None:
        self._value = zlib.crc32(piece, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


def _new(algorithm: str) -> Any:
    return _Crc32() if algorithm == "crc32" else hashlib.new(algorithm, usedforsecurity=False)
