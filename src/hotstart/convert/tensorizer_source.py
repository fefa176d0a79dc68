"""What a Tensorizer file holds, by the offsets of its index: read by the library, compared and decrypted.

A tensor is had whole, and kept until another one is asked for.
"""

from __future__ import annotations

import bisect
import importlib
import threading
from typing import TYPE_CHECKING, Any

from hotstart.checkpoint.base import Checkpoint, ShardFile, TensorRef
from hotstart.checkpoint.folder import Folder
from hotstart.checkpoint.safetensors import Header
from hotstart.checkpoint.tensorizer import read_key
from hotstart.config.load_formats import FORMATS
from hotstart.errors import ConfigError, HotstartError, ModelError, StorageError
from hotstart.loading.streams.stored_file import Ranges, StoredFile
from hotstart.storage.source import ReadCancelled

if TYPE_CHECKING:
    from hotstart.storage.source import Cancel, Source

DECRYPT = "--decrypt"
_AHEAD = 1 << 20


class TensorizerFolder:
    """See :class:`hotstart.checkpoint.folder.Folder`: one whose sources give tensors as they were."""

    def __init__(self, folder: Folder, keyfile: str | None) -> None:
        """Raises ConfigError when the library is absent, or the file holds no key."""
        try:
            self._library = importlib.import_module("tensorizer")
        except ImportError:
            raise ConfigError(
                "The tensorizer library is not installed",
                expected="tensorizer, which reads these files",
                advice=f"Run {FORMATS['tensorizer'].install}",
            ) from None
        self.path, self.small_files = folder.path, folder.small_files
        self._folder = folder
        self._keyfile = keyfile
        self._key = read_key(keyfile, DECRYPT) if keyfile else None
        self._tensors: dict[str, list[TensorRef]] = {}

    def add(self, checkpoint: Checkpoint) -> None:
        """Tell what lies in a file of the folder, which is its only one."""
        refs = sorted(checkpoint.tensors.values(), key=lambda ref: ref.offset)
        self._tensors[checkpoint.files[0].path] = [ref for ref in refs if ref.nbytes]

    def sizes(self) -> dict[str, int]:
        """See :class:`hotstart.checkpoint.folder.Folder`."""
        return self._folder.sizes()

    def header(self, name: str, file: int) -> Header | None:
        """See :class:`hotstart.checkpoint.folder.Folder`."""
        return self._folder.header(name, file)

    def source(self, file: ShardFile, *, direct: bool = False) -> Source:
        """See :class:`hotstart.checkpoint.folder.Folder`."""
        encryption = None if self._key is None else self._library.DecryptionParams.from_key(self._key)
        stored = self._folder.source(file)
        return _Tensors(stored, self._tensors[file.path], self._library, encryption, self._keyfile or "")


class _Tensors:
    """See :class:`hotstart.storage.source.Source`."""

    align = 1

    def __init__(
        self, stored: Source, refs: list[TensorRef], library: Any, encryption: Any, keyfile: str
    ) -> None:
        self.name, self.size, self.identity = stored.name, stored.size, stored.identity
        self._keyfile = keyfile
        self._stored = stored
        self._refs = refs
        self._lock = threading.Lock()
        self._kept: tuple[str, memoryview] = ("", memoryview(b""))
        self._ranges = Ranges(stored, 1)
        try:
            self._opened: Any = library.TensorDeserializer(
                StoredFile(self._ranges, ahead=_AHEAD),
                device="cpu",
                lazy_load=True,
                num_readers=1,
                verify_hash=True,
                encryption=encryption,
            )
        except BaseException as error:
            self._ranges.close()
            if not isinstance(error, Exception):
                raise
            raise self._named("its index", error) from error

    def read_into(self, buffer: memoryview, offset: int, cancel: Cancel) -> None:
        """See :class:`hotstart.storage.source.Source`: within one tensor."""
        place = bisect.bisect_right(self._refs, offset, key=lambda ref: ref.offset) - 1
        ref = self._refs[place]
        with self._lock:
            if cancel.is_set():
                raise ReadCancelled
            if self._kept[0] != ref.name:
                self._kept = ("", memoryview(b""))
                self._kept = (ref.name, self._tensor(ref))
            begin = offset - ref.offset
            buffer[:] = self._kept[1][begin : begin + len(buffer)]

    def verify(self) -> None:
        """See :class:`hotstart.storage.source.Source`."""
        self._stored.verify()

    def close(self) -> None:
        """See :class:`hotstart.storage.source.Source`."""
        self._kept = ("", memoryview(b""))
        self._opened.close()
        self._ranges.close()

    def _tensor(self, ref: TensorRef) -> memoryview:
        import torch

        try:
            self._opened._last_yielded_key = None  # it would look behind the tensor before
            ((*_, found),) = self._opened.read_tensors(filter_func=lambda name: name == ref.name)
            for key in self._opened._cache:
                self._opened._cache[key] = None  # it would keep every tensor
            data = memoryview(found.data.contiguous().flatten().view(torch.uint8).numpy())
        except Exception as error:
            raise self._named(f"the tensor {ref.name}", error) from error
        if len(data) != ref.nbytes:
            raise ModelError(f"{self.name} is damaged: {ref.name} has {len(data)} bytes, not {ref.nbytes}")
        return data

    def _named(self, what: str, error: Exception) -> Exception:
        if isinstance(error, (HotstartError, ReadCancelled)):
            return error
        again = "Copy the file again from where it was written"
        if type(error).__name__ == "HashMismatchError":
            return ModelError(
                f"{self.name} is damaged: {what} has not the hash that was written with it",
                expected="the bytes that were written",
                advice=again,
            )
        if type(error).__name__ == "CryptographyError":
            return ModelError(
                f"{self.name}: {what} cannot be decrypted with {self._keyfile}",
                expected="the key that it was encrypted with, and a whole file",
                advice=f"Pass that key by {DECRYPT}; if it is, copy the file again",
            )
        return StorageError(
            f"tensorizer failed at {what} of {self.name}: {type(error).__name__}: {error}", advice=again
        )
