"""safetensors headers: parsed, and validated completely before any of them is believed.

A file is an 8-byte little-endian length, that many bytes of JSON, and the tensors' bytes
(https://github.com/huggingface/safetensors#format). The file comes from strangers: every number in
it is checked against the file's real size before use. As in the reference library, the tensors
must cover the data exactly, without holes: hidden bytes make files that are two things at once.
"""

from __future__ import annotations

import json
import os
import stat
from math import prod
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from hotstart.checkpoint.base import ShardFile, TensorRef
from hotstart.checkpoint.lfs import MAX_STUB, stub_error
from hotstart.errors import HotstartError, ModelError
from hotstart.storage.access import read_error, read_exactly
from hotstart.storage.source import identity

MAX_HEADER = 100_000_000
"""Bytes; the reference library's own limit."""
MAX_RANK = 64
"""Dimensions; torch's own limit. It also bounds the work of multiplying them."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

_ADVICE_BROKEN = "The file is damaged or was written by a faulty program: copy or convert it again"
_ADVICE_SHORT = (
    "The copy or download was probably interrupted, or the disk was full: "
    "copy the file again and compare sizes or checksums"
)


class Header(Struct, frozen=True):
    """A validated header; ``tensors`` are in the order of the header."""

    file: ShardFile
    tensors: tuple[TensorRef, ...]


def read_header(path: str, file: int = 0) -> Header:
    """Read and validate the header of one file; reads nothing of the tensors.

    ``file`` becomes :attr:`TensorRef.file`. Raises ModelError for content that is damaged,
    StorageError for a file that cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not hang the start
    except OSError as error:
        raise read_error(path, error, doing="open") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path} is {_kind(status.st_mode)}", expected="a safetensors file")
        head = os.pread(fd, MAX_STUB if status.st_size <= MAX_STUB else 8, 0)
        length = header_length(path, head, status.st_size)
        text = read_exactly(fd, length, 8)
    except OSError as error:
        if isinstance(error, HotstartError):
            raise
        raise read_error(path, error) from None
    finally:
        os.close(fd)
    return parse_header(path, status.st_size, text, file, identity(status))


def parse_header(path: str, size: int, text: bytes, file: int = 0, pinned: str = "") -> Header:
    """Validate a header's JSON against the size of its file, whose identity is ``pinned``.

    Raises ModelError.
    """
    entries, metadata = _decode(path, text)
    data_start = 8 + len(text)
    tensors = []
    try:
        for name, entry in entries.items():
            begin, end = entry.data_offsets
            shape = entry.shape
            if len(shape) > MAX_RANK or prod(shape) * DTYPE_BITS[entry.dtype] != (end - begin) * 8:
                raise _wrong_size(path, name, entry)
            tensors.append(TensorRef(name, file, entry.dtype, shape, data_start + begin, end - begin))
    except KeyError:
        raise _broken(
            path,
            f"tensor {_quoted(name)} has dtype {_quoted(entry.dtype)}",
            f"one of {', '.join(DTYPE_BITS)}",
        ) from None
    end = _check_ranges(path, tensors, data_start)
    if size < end:
        raise ModelError(
            f"{path} has {size} bytes, {end - size} too few",
            expected=f"{end} bytes (8 + header {len(text)} + tensors {end - data_start})",
            advice=_ADVICE_SHORT,
        )
    if size > end:
        raise ModelError(
            f"{path} has {size} bytes, of which the last {size - end} belong to no tensor",
            expected=f"{end} bytes (8 + header {len(text)} + tensors {end - data_start})",
            advice=_ADVICE_BROKEN,
        )
    shard = ShardFile(path=path, size=size, data_start=data_start, metadata=metadata, identity=pinned)
    return Header(shard, tuple(tensors))


_Natural = Annotated[int, Meta(ge=0)]


class _Entry(Struct, frozen=True):
    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


_names = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry = msgspec.json.Decoder(_Entry)
_list = msgspec.json.Decoder(list[_Entry])
_metadata = msgspec.json.Decoder(dict[str, str])


def _decode(path: str, text: bytes) -> tuple[dict[str, _Entry], dict[str, str]]:
    name = ""
    try:
        raw = _names.decode(text)
        metadata_text = bytes(raw.pop(name := "__metadata__", b""))
        metadata = _metadata.decode(metadata_text or b"{}")
        json.loads(metadata_text or b"{}", object_pairs_hook=_refuse_duplicates)
        # Each value is a whole one, so together they make a list, which takes one call.
        values = b",".join(raw.values())
        # Quotes, colon and comma of each pair, of which the last has no comma, and two braces.
        compact = sum(map(len, raw)) + len(values) + 3 * len(raw) + 2
        if metadata_text:
            compact += len('"__metadata__":') + len(metadata_text) + bool(raw)
        try:
            entries = dict(zip(raw, _list.decode(b"[" + values + b"]"), strict=True))
        except msgspec.DecodeError:
            entries = {}
            for name, value in raw.items():  # which of them it is
                entries[name] = _entry.decode(value)
        if not _surely_unique(text, compact, len(entries)):
            json.loads(text, object_pairs_hook=_refuse_duplicates)
    except RecursionError:
        raise _broken(path, "its header nests too deeply", "a flat JSON object") from None
    except _DuplicateKeyError as error:
        raise _broken(path, f"its header has the key {_quoted(str(error))} twice", "unique names") from None
    except UnicodeDecodeError:
        raise _broken(path, "its header is not UTF-8", "JSON in UTF-8") from None
    except (msgspec.DecodeError, ValueError) as error:
        where = f"the entry {_quoted(name)} of its header" if name else "its header"
        raise _broken(
            path,
            f"{where} is invalid: {str(error)[:200]}",
            "names and texts" if name == "__metadata__" else "dtype, shape and data_offsets of each tensor",
        ) from None
    return entries, metadata


def _surely_unique(text: bytes, compact: int, count: int) -> bool:
    """Cheap proof that no key of the header occurs twice; False means "look closely".

    A duplicate vanishes when JSON is decoded into a dict. In ``compact`` JSON without escapes, the
    lengths of the distinct names and values account for every byte, so a vanished pair shows; and
    an entry that has a field twice shows in the number of times the field's name occurs.
    """
    return (
        b"\\" not in text
        and text.isascii()
        and len(text.rstrip(b" ")) == compact
        and all(text.count(field) == count for field in (b'"dtype"', b'"shape"', b'"data_offsets"'))
    )


class _DuplicateKeyError(Exception):
    pass


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise _DuplicateKeyError(name)
        seen.add(name)


def _check_ranges(path: str, tensors: list[TensorRef], data_start: int) -> int:
    """The end of the last tensor; raises for overlaps and holes."""
    end = data_start
    for ref in tensors:
        if ref.offset != end:
            break
        end += ref.nbytes
    else:
        return end  # as nearly every writer has them: nothing to sort
    end, previous = data_start, ""
    for ref in sorted(tensors, key=lambda ref: (ref.offset, ref.nbytes)):
        if ref.offset != end:
            here, there = ref.offset - data_start, end - data_start
            if ref.offset < end:
                found = (
                    f"tensor {_quoted(ref.name)} begins at {here}, before {_quoted(previous)} ends at {there}"
                )
            else:
                found = f"bytes {there} to {here}, before tensor {_quoted(ref.name)}, belong to no tensor"
            raise _broken(path, found, "tensors one after the other, without overlaps or holes")
        end, previous = ref.offset + ref.nbytes, ref.name
    return end


def header_length(path: str, head: bytes, size: int) -> int:
    """Bytes of the header of a file of ``size`` bytes that begins with ``head``. Raises ModelError."""
    if (stub := stub_error(path, head)) is not None:
        raise stub
    if size < 8:
        raise ModelError(
            f"{path} has {size} bytes" if size else f"{path} is empty (0 bytes)",
            expected="a safetensors file: at least 8 bytes and its header",
            advice=_ADVICE_SHORT,
        )
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER:
        raise _broken(
            path, f"its first 8 bytes announce a header of {length} bytes", f"at most {MAX_HEADER} (100 MB)"
        )
    if 8 + length > size:
        raise ModelError(
            f"{path} has {size} bytes and ends inside its header",
            expected=f"a header of {length} bytes and the tensors after it",
            advice=_ADVICE_SHORT,
        )
    return length


def _wrong_size(path: str, name: str, entry: _Entry) -> ModelError:
    begin, end = entry.data_offsets
    if len(entry.shape) > MAX_RANK:
        return _broken(
            path, f"tensor {_quoted(name)} has {len(entry.shape)} dimensions", f"at most {MAX_RANK}"
        )
    bits = prod(entry.shape) * DTYPE_BITS[entry.dtype]
    shape = " x ".join(map(str, entry.shape)) or "one element"
    return _broken(
        path,
        f"tensor {_quoted(name)} ({entry.dtype}, {shape}) has bytes {begin} to {end}, {end - begin} in all",
        f"{bits // 8} bytes" if bits % 8 == 0 else "a whole number of bytes",
    )


def _broken(path: str, found: str, expected: str) -> ModelError:
    return ModelError(f"{path}: {found}", expected=expected, advice=_ADVICE_BROKEN)


def _quoted(name: str) -> str:
    """A name from a stranger, printable and short."""
    shown = ascii(name) if not name.isprintable() else f"'{name}'"
    return shown if len(shown) <= 120 else shown[:100] + "…'"


def _kind(mode: int) -> str:
    for test, word in ((stat.S_ISDIR, "a directory"), (stat.S_ISBLK, "a device"), (stat.S_ISFIFO, "a pipe")):
        if test(mode):
            return word
    return "no regular file"
