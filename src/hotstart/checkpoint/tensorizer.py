"""Tensorizer's files: the index at their front, validated before any of it is believed. Torch-free.

After ``|TZR|`` come a version, 32 bytes of flags, sizes and the number of tensors, then an index of all
tensors: name, dtype, shape, and where header and data of each lie (``_FileHeader`` and
``_MetadataDeserializer`` in ``serialization.py`` of tensorizer 2.12). The library reads it once more when
it loads; here it is read so that a file that is incomplete or another model's is known before.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING

from hotstart.checkpoint.base import Checkpoint, ShardFile, Skipped, TensorRef
from hotstart.checkpoint.folder import Folder, LocalFolder
from hotstart.checkpoint.safetensors import DTYPE_BITS, MAX_RANK
from hotstart.config.paths import absolute
from hotstart.errors import ConfigError, HotstartError, ModelError
from hotstart.storage.source import FileSource

if TYPE_CHECKING:
    from hotstart.checkpoint.remote import ObjectFolder
    from hotstart.storage.source import Source

DEFAULT_NAME = "model.tensors"
RANK_NAME = "model-rank-%03d.tensors"
"""Of each of several ranks."""
_RANK = re.compile(r"model-rank-(\d{3,9})\.tensors")
KEY_BYTES = 32
MARKER = "vllm_tensorized_marker"
"""A tensor by which vLLM knows its own files; as the library writes it, with a dot before."""
MAX_INDEX = 256 << 20
"""Bytes."""

_MAGIC = b"|TZR|"
_FRONT = struct.Struct("<5sI32sQ8xQQ")
_HEAD = 512 << 10
"""Bytes read first: the index takes 256 KiB at least."""
_VERSIONS = range(1, 6)
_ENCRYPTED_VERSION, _FLAGS_VERSION = 3, 4
_ENCRYPTED, _VERSIONED = 1, 2
_LONG_SHAPES = 5
_PLACE = struct.Struct("<QQQ")
_NUMPY = {"f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8",
          "u1": "U8", "u2": "U16", "u4": "U32", "u8": "U64", "b1": "BOOL", "c8": "C64"}  # fmt: skip
_TORCH = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32", "torch.float64": "F64",
          "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2"}  # fmt: skip
_AGAIN = "Copy the file again, or write it again: hotstart convert tensorizer SRC DST"


def open_tensorizer(
    place: Folder | str,
    name: str = DEFAULT_NAME,
    *,
    keyfile: str | None = None,
    said: str = "encryption_keyfile",
) -> Checkpoint:
    """Read the index of a folder's Tensorizer file. ``keyfile``: it is to be decrypted with this.

    ``said``: the key of ``--model-loader-extra-config``, or the flag, that names the keyfile, for messages.
    Raises ModelError for a file that is absent, incomplete or damaged, encrypted without a key or not
    encrypted with one; StorageError for what cannot be read.
    """
    folder = LocalFolder(place) if isinstance(place, str) else place
    if keyfile is not None:
        read_key(keyfile, said)
    found = _open(folder, name)
    if found is None:
        raise _absent(folder, name)
    file, source = found
    try:
        encrypted, indexed, data_start = _read_index(file, source)
    finally:
        source.close()
    flag = f"{said} PATH" if said.startswith("--") else ""
    extra = f'--model-loader-extra-config \'{{"{said}": "PATH"}}\''
    if encrypted and keyfile is None:
        raise ModelError(
            f"{file.path} is encrypted, and there is no key",
            expected=said if flag else f"{said} in --model-loader-extra-config",
            advice=f"Pass {flag or extra} with the file of its key",
        )
    if keyfile is not None and not encrypted:
        raise ModelError(
            f"{file.path} is not encrypted, and {said} names a key",
            expected="an encrypted file, or no key",
            advice=f"Leave {said} out if the file is the right one",
        )
    tensors = [ref for ref in indexed if ref.name.lstrip(".") != MARKER]
    metadata = {MARKER: "true"} if len(tensors) < len(indexed) else {}
    return Checkpoint(
        path=folder.path,
        folder=folder,
        files=(ShardFile(file.path, file.size, data_start, metadata, file.identity),),
        tensors={ref.name: ref for ref in tensors},
        skipped=_skipped(folder, name),
    )


def read_key(path: str, said: str) -> bytes:
    """The key in a file of this machine. ``said``: the key or flag that names it, for messages.

    Raises ConfigError for what is no file of a key, or cannot be read.
    """
    how = (
        f"Make one that nobody else can read: (umask 077; set -C; head -c {KEY_BYTES} /dev/urandom > {path})"
    )
    try:
        fd = os.open(
            absolute(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        )  # a FIFO would wait for its writer
        try:
            kind = os.fstat(fd).st_mode
            key = os.read(fd, KEY_BYTES + 1) if stat.S_ISREG(kind) else b""
        finally:
            os.close(fd)
    except OSError as error:
        absent = isinstance(error, FileNotFoundError) and not os.path.lexists(absolute(path))
        raise ConfigError(
            f"{said} {path} cannot be read: {error.strerror}",
            expected=f"a file of this machine with the {KEY_BYTES} bytes of a key",
            advice=how if absent and said.startswith("--") else "",
        ) from None
    if not stat.S_ISREG(kind):
        what = "a directory" if stat.S_ISDIR(kind) else "no regular file"
        raise ConfigError(f"{said} {path} is {what}", expected=f"a file with the {KEY_BYTES} bytes of a key")
    if len(key) != KEY_BYTES:
        found = f"more than {KEY_BYTES}" if len(key) > KEY_BYTES else str(len(key))
        raise ConfigError(
            f"{said} {path} has {found} bytes",
            expected=f"a key of {KEY_BYTES} bytes",
            advice="Name the file of the key, which holds these bytes and no text or line end",
        )
    return key


def _open(folder: Folder, name: str) -> tuple[ShardFile, Source] | None:
    if isinstance(folder, LocalFolder):
        path = os.path.join(folder.path, name)
        if not os.path.lexists(path):
            return None
        opened = FileSource(path)
        return ShardFile(path, opened.size, 0, {}, opened.identity), opened
    from hotstart.checkpoint.remote import ObjectFolder

    assert isinstance(folder, ObjectFolder)
    return _open_stored(folder, name)


def _open_stored(folder: ObjectFolder, name: str) -> tuple[ShardFile, Source] | None:
    first = folder.store.fetch(name, 1)
    if first is None:
        return None
    file = ShardFile(f"{folder.path}/{name}", first.size, 0, {}, first.identity)
    return file, folder.stored(file)


def _read_index(file: ShardFile, source: Source) -> tuple[bool, list[TensorRef], int]:
    """Whether it is encrypted, its tensors, and where their part begins."""
    head = _read(source, 0, min(file.size, _HEAD))
    if len(head) < _FRONT.size or head[:5] != _MAGIC:
        raise ModelError(
            f"{file.path} is no Tensorizer file",
            expected="a file that begins with |TZR|",
            advice="A safetensors checkpoint loads without --load-format; or convert it: "
            "hotstart convert tensorizer SRC DST",
        )
    _, version, flags, _, count, length = _FRONT.unpack_from(head)
    if version not in _VERSIONS:
        raise ModelError(
            f"{file.path} has version {version} of Tensorizer's format", expected="versions 1 to 5"
        )
    bits = int.from_bytes(flags, "little") if version >= _FLAGS_VERSION else 0
    encrypted = version == _ENCRYPTED_VERSION or bool(bits & _ENCRYPTED)
    begin, end = _FRONT.size, _FRONT.size + length
    if length > MAX_INDEX:
        raise _damaged(file, f"its index is said to have {length} bytes")
    if end > file.size:
        raise _incomplete(file, f"ends inside its index, which has {length} bytes")
    index = head[begin:end] + _read(source, len(head), max(0, end - len(head)))
    try:
        tensors = _Index(index, versioned=bool(bits & _VERSIONED)).tensors(count)
    except (struct.error, IndexError, UnicodeDecodeError, KeyError, ValueError) as error:
        raise _damaged(file, f"its index cannot be read ({error})") from None
    _check(file, [ref for ref in tensors if ref.name.lstrip(".") != MARKER], end)
    return encrypted, tensors, end


def _read(source: Source, offset: int, length: int) -> bytes:
    data = bytearray(length)
    if length:
        source.read_into(memoryview(data), offset, threading.Event())
    return bytes(data)


class _Index:
    """A cursor over the index. Raises what :func:`_read_index` catches."""

    def __init__(self, data: bytes, *, versioned: bool) -> None:
        self._data, self._at, self._versioned = data, 0, versioned

    def tensors(self, count: int) -> list[TensorRef]:
        if count * 30 > len(self._data):  # the least that an entry takes
            raise ValueError(f"{count} tensors in {len(self._data)} bytes")
        return [self._tensor() for _ in range(count)]

    def _tensor(self) -> TensorRef:
        long = self._versioned and self._unpack("<I")[0] >= _LONG_SHAPES
        name = self._bytes(self._unpack("<H")[0]).decode()
        self._at += 1  # parameter, buffer, or entry of a state dict
        dtype = self._bytes(self._unpack("<B")[0]).decode()
        rank = self._unpack("<B")[0]
        if rank > MAX_RANK:
            raise ValueError(f"{name!a} has {rank} dimensions")
        shape = self._unpack(f"<{rank}{'Q' if long else 'I'}")
        _, offset, length = self._unpack(_PLACE.format)
        return TensorRef(name, 0, _dtype(dtype), tuple(shape), offset, length)

    def _bytes(self, length: int) -> bytes:
        found = self._data[self._at : self._at + length]
        if len(found) < length:
            raise IndexError("it ends early")
        self._at += length
        return found

    def _unpack(self, text: str) -> tuple[int, ...]:
        found = struct.unpack_from(text, self._data, self._at)
        self._at += struct.calcsize(text)
        return found


def _dtype(text: str) -> str:
    """``<f4``, or a number of numpy's with torch's own name behind it: ``<V2\\0torch.bfloat16``.

    Numbers that no weight has are given as they are: a tensor that no model asks for may have them.
    Raises ValueError for what are no numbers (objects are pickles), or not in this machine's order.
    """
    numpy, _, torch = text.partition("\0")
    if re.fullmatch(r"torch\.(complex|float|bfloat|bool|q?u?int)\w*", torch):
        return _TORCH.get(torch, torch)
    found = re.fullmatch(r"[<|=]?([biufc]\d{1,2})", numpy)
    if found is None or torch:
        raise ValueError(text)
    return _NUMPY.get(found[1], numpy)


def _check(file: ShardFile, tensors: list[TensorRef], begin: int) -> None:
    if len({ref.name for ref in tensors}) < len(tensors):
        raise _damaged(file, "its index has a name twice")
    for ref in sorted(tensors, key=lambda ref: ref.offset):
        bits = DTYPE_BITS.get(ref.dtype)
        size = ref.nbytes if bits is None else prod(ref.shape) * bits // 8
        if ref.offset < begin or ref.nbytes not in (size, 0):
            raise _damaged(
                file,
                f"{ref.name!a} is said to have {ref.nbytes} bytes at {ref.offset}, and {size} by its shape",
            )
        if size and not ref.nbytes:
            raise ModelError(
                f"{file.path} holds {ref.name!a} without its values", expected="a file that was written whole"
            )
        if ref.offset + ref.nbytes > file.size:
            raise _incomplete(
                file,
                f"ends inside the tensor {ref.name!a}, whose last byte is the {ref.offset + ref.nbytes}th",
            )


def _incomplete(file: ShardFile, found: str) -> ModelError:
    return ModelError(
        f"{file.path} has {file.size} bytes and {found}", expected="a whole file", advice=_AGAIN
    )


def _damaged(file: ShardFile, found: str) -> ModelError:
    return ModelError(f"{file.path} is damaged: {found}", expected="a whole file", advice=_AGAIN)


def _absent(folder: Folder, name: str) -> ModelError:
    names: list[str] = []
    with suppress(HotstartError):  # a store that gives no list has said all that it says
        names = sorted(folder.sizes() if isinstance(folder, LocalFolder) else _listing(folder))
    return absent_file(folder.path, names, name)


def absent_file(place: str, names: Sequence[str], name: str) -> ModelError:
    """The error for a place without the Tensorizer file; ``names``: of what lies there, as far as known."""
    others = [each for each in names if each.endswith(".tensors") and "/" not in each]
    ranks = {each: int(found[1]) for each in others if (found := _RANK.fullmatch(each))}
    if any(ranks.values()):
        return ModelError(
            f"{place} holds Tensorizer files for --tensor-parallel-size {1 + max(ranks.values())} "
            f"({next(iter(ranks))} among them), and this start has one rank",
            expected=f"{name}, which holds the whole model",
            advice="Write it from the plain checkpoint: hotstart convert tensorizer SRC DST",
        )
    if others:
        return ModelError(
            f"{place} holds no {name}, but {others[0]}",
            expected=name,
            advice=f'Name it: --model-loader-extra-config \'{{"tensorizer_uri": "{others[0]}"}}\'',
        )
    plain = "is an ordinary checkpoint" if any(n.endswith(".safetensors") for n in names) else "holds none"
    return ModelError(
        f"There is no {name} in {place}, which --load-format tensorizer reads"
        + (f": it {plain}" if names else ""),
        expected="a file of Tensorizer's beside config.json and the tokenizer",
        advice=f"Convert it: hotstart convert tensorizer {place} DST; or leave --load-format out",
    )


def _listing(folder: Folder) -> dict[str, int]:
    from hotstart.checkpoint.remote import ObjectFolder

    assert isinstance(folder, ObjectFolder)
    return folder.listing()


def _skipped(folder: Folder, name: str) -> tuple[Skipped, ...]:
    if not isinstance(folder, LocalFolder):
        return ()
    return tuple(
        Skipped(other, size, "no part of the Tensorizer file")
        for other, size in sorted(folder.sizes().items())
        if other.endswith((".safetensors", ".tensors")) and other != name
    )
